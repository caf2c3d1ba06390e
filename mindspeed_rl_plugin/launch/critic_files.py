"""The files of a critic: what a checkpoint for `--rl-critic-load` says of itself, before any model is built."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.launch import checkpoint_files as files
from mindspeed_rl_plugin.launch import pickles

MARK = "rl_value_head"  # empty file beside Megatron's in a critic's checkpoint: its output layer is a value head
# What must be equal, if both sides know it; the layout where each rank reads a file of its own.
_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("group_query_attention", "num_query_groups"),
)
_LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


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
    ranks = sorted(folder.glob("mp_rank_*/model_optim_rng.pt"))
    file = ranks[0] if ranks else folder / "common.pt"
    saved = pickles.load(file).get("args") if file.is_file() else None
    for name in _SIZES + (_LAYOUT if ranks else ()):
        theirs, ours = _value(saved, name), _value(args, name)
        if theirs is not None and ours is not None and theirs != ours:
            yield (
                f"--rl-critic-load {directory}: --{name.replace('_', '-')} is {theirs} there and {ours} here; a critic "
                "has the policy's own architecture: give a checkpoint of this model, or leave the flag out"
            )


def _value(args: Any, name: str) -> Any:
    """None where it is not known, and for groups without grouped attention, which Megatron sets while it builds."""
    if name == "num_query_groups" and not getattr(args, "group_query_attention", False):
        return None
    return getattr(args, name, None)
