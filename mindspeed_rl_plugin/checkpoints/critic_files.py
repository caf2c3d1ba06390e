"""The files of a critic: what a checkpoint for `--rl-critic-load` says of itself, before any model is built."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.checkpoints import checkpoint_files as files
from mindspeed_rl_plugin.checkpoints.saved_args import other_order, other_sizes

MARK = "rl_value_head"  # empty file beside Megatron's in a critic's checkpoint: its output layer is a value head


def source_folder(directory: str) -> str:
    """Iteration folder that `--rl-critic-load` means. Raises ValueError where there is none."""
    directory = os.path.abspath(directory)
    tracked = files.read_tracker(directory)
    if tracked is None:
        raise ValueError(
            f"--rl-critic-load {directory} holds no checkpoint ({files.TRACKER} is missing); give the directory of a "
            f"Megatron checkpoint, of a critic SAVE/iter_0000500/{files.CRITIC}, or leave the flag out"
        )
    folder = files.iteration_dir(directory, tracked)
    if not os.path.isdir(folder):
        raise ValueError(f"--rl-critic-load {directory}: {files.TRACKER} names {tracked}, but there is no {folder}")
    return folder


def problems(directory: str, args: Any) -> Iterator[str]:
    """What keeps the checkpoint of `--rl-critic-load` from being loaded into a critic of this run's model; what its
    arguments do not tell is refused when it is loaded (`weights_fit`).

    Raises ValueError where there is no checkpoint.
    """
    folder = Path(source_folder(directory))
    for line in (*other_sizes(folder, args), *other_order(folder, args)):
        yield (
            f"--rl-critic-load {directory}: {line}; a critic has the policy's own architecture: give a checkpoint of "
            "this model, or leave the flag out"
        )
