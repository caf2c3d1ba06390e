"""The files of a critic: what a checkpoint for `--rl-critic-load` says of itself, before any model is built."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.launch import checkpoint_files as files
from mindspeed_rl_plugin.launch import pickles

MARK = "rl_value_head"  # empty file beside Megatron's: the output layer in this checkpoint is a value head
# What must be equal, and how a user gives it. The layout counts where each rank reads a file of its own.
_SIZES = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "ffn_hidden_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "groups": "--num-query-groups",
    "kv_channels": "--kv-channels",
    "padded_vocab_size": "padded vocabulary",
}
_LAYOUT = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
}


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


def starts_with_head(folder: str) -> bool:
    """Whether the iteration folder of a checkpoint is a critic's, with a value head of its own."""
    return os.path.isfile(os.path.join(folder, MARK))


def mark(directory: str, iteration: int) -> None:
    """Say that a checkpoint is a critic's. Every rank may call it."""
    Path(files.iteration_dir(directory, iteration), MARK).touch()


def problems(directory: str, args: Any) -> Iterator[str]:
    """What keeps the checkpoint of `--rl-critic-load` from being loaded into a critic of this run's model.

    Sizes that either side does not know (the padded vocabulary before Megatron is initialised) are left to later.
    """
    try:
        folder = source_folder(directory)
        saved, layout = _arguments(Path(folder))
    except ValueError as error:
        yield str(error)
        return
    if saved is None:
        return
    for name, flag in (_SIZES | (_LAYOUT if layout else {})).items():
        theirs, ours = _value(saved, name), _value(args, name)
        if theirs is not None and ours is not None and theirs != ours:
            yield (
                f"--rl-critic-load {directory}: {flag} is {theirs} there and {ours} here; a critic has the policy's "
                "own architecture: give a checkpoint of this model, or leave the flag out"
            )


def _arguments(folder: Path) -> tuple[argparse.Namespace | None, bool]:
    """Megatron's arguments in a checkpoint, None where it has none, and whether it is one file a model rank."""
    ranks = sorted(folder.glob("mp_rank_*/model_optim_rng.pt"))
    common = folder / "common.pt"
    if not ranks and not common.is_file():
        return None, False
    saved = pickles.load(ranks[0] if ranks else common).get("args")
    return (saved if isinstance(saved, argparse.Namespace) else None), bool(ranks)


def _value(args: Any, name: str) -> Any:
    if name == "groups":
        name = "num_query_groups" if getattr(args, "group_query_attention", False) else "num_attention_heads"
    return getattr(args, name, None)
