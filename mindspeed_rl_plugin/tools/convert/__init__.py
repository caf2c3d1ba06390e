"""Megatron checkpoints to Hugging Face ones and back, by the layout tables of `reshard`. Needs no Megatron."""
