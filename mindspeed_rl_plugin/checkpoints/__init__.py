"""Checkpoints as files: contents of a directory, its model, the start of a run, free space, conversion."""
