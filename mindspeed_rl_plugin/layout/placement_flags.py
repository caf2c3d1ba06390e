"""Flags of Megatron, MindSpeed and MindSpeed-LLM that place layers on pipeline stages, and experts on ranks."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence

from mindspeed_rl_plugin.config.flag import spelt

# Flags that lay out pipeline stages in another way than `--schedules-method dualpipev`.
_PLACING = (
    *("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout", "num_layer_list"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
_SPELT = {"virtual_pipeline_model_parallel_size": "--num-layers-per-virtual-pipeline-stage"}  # Megatron derives it


def folds(args: argparse.Namespace) -> bool:
    """Whether MindSpeed's `--schedules-method dualpipev` places the layers.

    Raises ValueError for further flags that would place them otherwise, whatever MindSpeed does with them. Source:
    features_manager/pipeline_parallel/dualpipev_feature.py and core/pipeline_parallel/dualpipev of MindSpeed 26.1.0.
    """
    given = getattr(args, "schedules_method", None)
    if given is None:
        return False
    if given != "dualpipev":
        raise ValueError(f"--schedules-method {given}: its placement of layers is unknown; give dualpipev, or none")
    if beside := [name for name in _PLACING if getattr(args, name, None)]:
        shown = " and ".join(_SPELT.get(name) or spelt(name) for name in beside)
        raise ValueError(f"--schedules-method dualpipev gives every chunk equally many layers; remove {shown}")
    if args.pipeline_model_parallel_size == 1:
        raise ValueError("--schedules-method dualpipev needs --pipeline-model-parallel-size of at least 2; remove one")
    return True


def noop_layers(args: argparse.Namespace) -> tuple[int, ...]:
    """Numbers of MindSpeed's `--noop-layers`: a text such as "61,62", and a set after its validation.

    Raises ValueError for what is no list of layers of the model.
    """
    given = getattr(args, "noop_layers", None) or ()
    words = given.split(",") if isinstance(given, str) else given if isinstance(given, Collection) else (given,)
    layers = sorted({int(word) if str(word).isdigit() else -1 for word in words})
    if layers and not 0 <= layers[0] <= layers[-1] < args.num_layers:
        shown = ",".join(map(str, words))
        raise ValueError(f"--noop-layers {shown}: give numbers from 0 to {args.num_layers - 1}, as in 61,62")
    return tuple(layers)


def spread_experts(args: argparse.Namespace) -> int:
    """Tensor parallel ranks over which MindSpeed's `--moe-tp-extend-ep` spreads whole experts; 1 without it.

    Rank t of expert parallel rank e then has share e x tp + t of the experts, and tokens go to the experts' tensor and
    expert parallel group, which has tp x ep ranks only where the experts' own tensor parallel size is tp. Raises
    ValueError where it is another, and where the dispatcher is one that does not know of it.
    Source: features_manager/moe/tp_extend_ep.py and moe_feature/tp_extend_ep of MindSpeed 2.3.0.
    """
    tp, etp = args.tensor_model_parallel_size, args.expert_tensor_parallel_size
    if not getattr(args, "moe_tp_extend_ep", False) or tp == 1:
        return 1
    if etp not in (None, tp):
        raise ValueError(
            f"--moe-tp-extend-ep with --expert-tensor-parallel-size {etp}: it spreads whole experts over all {tp}"
            " tensor parallel ranks, and that size takes these out of the group to which tokens are sent; drop"
            " --expert-tensor-parallel-size, or give --expert-tensor-parallel-size 1 --expert-model-parallel-size"
            f" {tp * args.expert_model_parallel_size} without --moe-tp-extend-ep"
        )
    dispatcher = getattr(args, "moe_token_dispatcher_type", "alltoall_seq")
    if dispatcher != "alltoall_seq":
        raise ValueError(
            f"--moe-tp-extend-ep with --moe-token-dispatcher-type {dispatcher}: MindSpeed spreads experts over tensor "
            "parallel ranks with one only; give --moe-token-dispatcher-type alltoall_seq, or remove --moe-tp-extend-ep"
        )
    return tp


def count_layers(layout: str) -> tuple[int, ...]:
    """Layers of every chunk in a `--pipeline-model-parallel-layout` such as "Et*3|(tt|)*2tL": (3, 2, 2, 1)."""
    flat = re.sub(r"\(([^)]+)\)\*(\d+)", lambda m: m[1] * int(m[2]), layout.replace(",", ""))
    flat = re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), flat)
    if not re.fullmatch(r"E[t|]*L", flat):
        raise ValueError(f"pipeline layout {layout!r} must hold layers t between the embedding E and the loss L only")
    return tuple(stage.count("t") for stage in flat.split("|"))


def listed_layers(listed: str | Sequence[int], args: argparse.Namespace) -> tuple[int, ...]:
    """Layers of every stage in MindSpeed-LLM's `--num-layer-list` such as "7,7,8".

    Raises ValueError for what its own code refuses, and where it would build other dense layers than
    `--first-k-dense-replace` says: it counts them as if all stages had the same number of layers.
    Source: features_manager/pipeline_parallel/num_layer_list.py, core/transformer/transformer_block.py of 2.3.0.
    """
    words = listed.split(",") if isinstance(listed, str) else [str(n) for n in listed]
    if not all(word.strip().isdigit() for word in words):
        raise ValueError(f"--num-layer-list {listed}: it needs a number for every pipeline stage, as in 7,7,8")
    sizes, stages = tuple(map(int, words)), args.pipeline_model_parallel_size
    if len(sizes) != stages or stages == 1 or sum(sizes) != args.num_layers:
        raise ValueError(
            f"--num-layer-list {listed}: {len(sizes)} stages with {sum(sizes)} layers do not fit "
            f"--pipeline-model-parallel-size {stages} (at least 2) and --num-layers {args.num_layers}"
        )
    if getattr(args, "virtual_pipeline_model_parallel_size", None):
        raise ValueError(f"--num-layer-list {listed}: MindSpeed-LLM has no virtual pipeline stages with it")
    dense = getattr(args, "first_k_dense_replace", None) or 0
    every = getattr(args, "moe_layer_freq", None) if dense else 1
    every = every if isinstance(every, int) and every > 0 else 1
    for stage in range(stages):
        start, counted = sum(sizes[:stage]), stage * (args.num_layers // stages)
        moe = [[i >= dense and i % every == 0 for i in range(at, at + sizes[stage])] for at in (start, counted)]
        if dense and moe[0] != moe[1]:
            raise ValueError(
                f"--num-layer-list {listed}: for --first-k-dense-replace {dense} MindSpeed-LLM takes layer {start} for "
                f"layer {counted}, as if stages were even, and builds other dense layers; choose a list with which "
                "these are the same"
            )
    return sizes
