"""Attaching to Megatron-LM: the patch table, how it is applied and checked, and the diffs in `patches/`."""
