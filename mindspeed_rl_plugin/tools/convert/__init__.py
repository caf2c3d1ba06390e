"""Megatron checkpoints to Hugging Face ones and back, by the tables of `layout`. Needs no Megatron."""
