"""Checkpoints as files: what a directory holds and says of its model, where a run starts from, space, conversion."""
