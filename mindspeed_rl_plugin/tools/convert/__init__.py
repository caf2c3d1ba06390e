"""Megatron checkpoints to Hugging Face ones and back, by the tables in `layout`. Megatron is not needed."""
