"""Compares a checkpoint with a run before the model is built, by the arguments that Megatron saved with it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.checkpoints import pickles
from mindspeed_rl_plugin.checkpoints.dist_files import DistFiles
from mindspeed_rl_plugin.config.flag import spelt

# Arguments that must be equal if both checkpoint and run have them; _LAYOUT only if each rank reads its own file.
_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("group_query_attention", "num_query_groups", "num_experts"),
)
_ORDER = "schedules_method"
_LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


def other_sizes(folder: Path, args: Any) -> Iterator[str]:
    """A line with both values for each difference of an iteration folder from this run: arguments of the model, the
    format, and (if each rank reads its own file) arguments of the layout."""
    ranks = sorted(folder.glob("mp_rank_*/model_optim_rng.pt"))
    # With --ckpt-format torch Megatron loads no distributed checkpoint, even with --auto-detect-ckpt-format.
    if not ranks and getattr(args, "ckpt_format", None) == "torch":
        yield "--ckpt-format is torch_dist in the checkpoint and torch in this run"
    saved = pickles.load(ranks[0]).get("args") if ranks else _common_args(folder)
    for name in _SIZES + (_LAYOUT if ranks else ()):
        theirs, ours = _value(saved, name), _value(args, name)
        if theirs is not None and ours is not None and theirs != ours:
            yield f"{spelt(name)} is {theirs} in the checkpoint and {ours} in this run"


def other_layout(folder: Path, args: Any) -> Iterator[str]:
    """A line for each layout argument in which a distributed checkpoint differs from this run, which resumes from it.
    No line if the checkpoint has no optimizer state, or if this state can be resharded: the optimizer is not
    distributed, or --dist-ckpt-optim-fully-reshardable was given (in core 0.12: --ckpt-fully-parallel-save). Source:
    _build_sharded_state_dict_metadata of megatron/training/checkpointing.py. But above an expert parallel size of 1
    experts have an optimizer of their own (ChainedOptimizer.load_state_dict of megatron/core/optimizer/optimizer.py).
    """
    saved, ep = _common_args(folder), "expert_model_parallel_size"
    reshards = getattr(saved, "dist_ckpt_optim_fully_reshardable", getattr(saved, "ckpt_fully_parallel_save", True))
    if getattr(saved, "no_save_optim", False):
        return
    experts = getattr(args, "num_experts", None)
    names = [*_LAYOUT, ep] if experts else [*_LAYOUT]
    etp, tp = "expert_tensor_parallel_size", "tensor_model_parallel_size"
    if reshards or not getattr(saved, "use_distributed_optimizer", False):
        names = [ep] if experts and 1 in (getattr(saved, ep, 1), getattr(args, ep)) else []
    # the checkpoint or this run gives experts another tensor parallel size
    elif any(getattr(each, etp, None) not in (None, getattr(each, tp)) for each in (saved, args)):
        names.append(etp)
    for name in names:
        if (theirs := getattr(saved, name, None)) not in (None, ours := getattr(args, name)):
            yield f"{spelt(name)} is {theirs} in the checkpoint and {ours} in this run"


def other_order(folder: Path, args: Any) -> Iterator[str]:
    """A message if the ranks' files of an iteration folder were saved with another --schedules-method: then they have
    other layers than this run expects. Names and sizes of parameters may be equal nevertheless."""
    for file in sorted(folder.glob("mp_rank_*/model_optim_rng.pt"))[:1]:
        saved = pickles.load(file).get("args")  # MindSpeed-LLM's converter of DeepSeek-V3 writes no arguments
        theirs, ours = (getattr(a, _ORDER, None) for a in (saved, args))
        if saved is not None and theirs != ours:
            ours, theirs = ours or "not given", theirs or "not given"
            yield f"--schedules-method is {theirs} in the checkpoint and {ours} in this run"


def check_rows(folder: str, vocab: int) -> None:
    """Raises ValueError if a distributed checkpoint has fewer rows of the embedding than the tokenizer has tokens.
    Megatron itself fills missing rows with zeros, since the padding of the vocabulary may change."""
    rows = getattr(_common_args(Path(folder)), "padded_vocab_size", None)
    if rows is not None and rows < vocab:
        raise ValueError(
            f"{folder} has {rows} rows of the embedding (--padded-vocab-size), fewer than the {vocab} tokens of the "
            "tokenizer; give the tokenizer of that model"
        )


@cache
def _common_args(folder: Path) -> Any:
    """Arguments of a distributed checkpoint. Cached, since this reads the checkpoint's index, which is large."""
    return DistFiles(folder).common().get("args")


def _value(saved: Any, name: str) -> Any:
    """Value of an argument; None if there is none. Also None for the query groups of a model without grouped attention,
    since Megatron sets their number only later."""
    if name == "num_query_groups" and not getattr(saved, "group_query_attention", False):
        return None
    return getattr(saved, name, None)
