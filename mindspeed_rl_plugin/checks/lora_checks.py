"""Refuses arguments with which adapters of --rl-lora-rank cannot be right, and notes what is changed for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from mindspeed_rl_plugin.adapters.targets import adapted, linear_rows, matrices, target_names, unknown_targets
from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.checks.upstream_checks import OUTSIDE_OF_LAYERS, do_not_fit
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.layout.family_table import EXPERTS, IMPLS, Split
from mindspeed_rl_plugin.layout.parallel import Parallel, chunk_prefix
from mindspeed_rl_plugin.layout.shape import ModelShape

_OTHER_WAYS = {
    "mla_mm_split": "stores a matrix in two pieces",
    "schedules_method": "its pipeline was not tested with adapters",
    "defer_embedding_wgrad_compute": "waits for gradients of the head, which is frozen",
    "reuse_fp32_param": "its weights share memory with main parameters, which a frozen weight lacks",
} | dict.fromkeys(
    ("moe_alltoall_overlap_comm", "moe_allgather_overlap_comm", "swap_attention"),
    "uses weights outside of their module",
)


def problems(args: Any, config: RLConfig) -> Iterator[str]:
    """One message for each problem. Raises ValueError for a model of no known family."""
    rank, targets = config.lora.lora_rank, config.lora.target_names
    if rank is None:
        return
    flag = f"--rl-lora-rank {rank}"
    with suppress(ValueError):  # reported by `flag_checks`
        if resolve(config.algorithm).needs_critic:
            yield f"{flag} with --rl-advantage gae: a critic would be trained as a whole; remove {flag}"
    yield from do_not_fit(args, flag, _OTHER_WAYS | OUTSIDE_OF_LAYERS)
    if getattr(args, "enable_mg2hf_convert", False):
        yield (
            f"--enable-mg2hf-convert with {flag}: it converts whole models, and these checkpoints have adapters only; "
            "remove it, and use `python -m mindspeed_rl_plugin export` (where no direction of its conversion is given, "
            "MindSpeed-LLM turns both on)"
        )
    shape, tp = ModelShape.from_megatron_args(args, vocab=1), args.tensor_model_parallel_size
    if unknown := unknown_targets(shape, targets):
        known = ", ".join(target_names(shape))
        yield f"--rl-lora-targets {' '.join(unknown)}: this model has no such linear layer; it has {known}"
        return
    if rank > (most := max(min(size) for _, size in matrices(shape, targets))):
        yield f"{flag} is more than any of its matrices has rows or columns ({most}); lower it"
    heads = any(row.split is Split.QUERY_GROUPS for row in linear_rows(shape, targets))
    if heads and tp > shape.groups:
        yield (
            f"{flag} with --tensor-model-parallel-size {tp}: ranks would have parts of a query group (there are "
            f"{shape.groups}); give at most {shape.groups}"
        )
        return
    parallel = Parallel.from_megatron_args(args)
    for stage in range(parallel.pp):
        rank = next(r for r in range(parallel.world) if parallel.coordinates(r).pp == stage)
        found = adapted(shape, parallel, rank, (IMPLS[0], EXPERTS[0]), targets)
        if parallel.ep > 1 and found and all(m.experts for m in found):
            yield (
                f"{flag} with --expert-model-parallel-size {parallel.ep}: pipeline stage {stage} trains experts only, "
                "and Megatron cannot save an optimizer that has nothing else (one matrix of attention more is enough); "
                "remove --rl-lora-targets, or give --expert-model-parallel-size 1"
            )
        modules = [m.module for m in found]
        for chunk in range(parallel.vpp):
            if not any(name.startswith(chunk_prefix(chunk, parallel.vpp)) for name in modules):
                yield (
                    f"{flag}: pipeline stage {stage} has no matrix with an adapter, so nothing to train; give "
                    "--rl-lora-targets that every stage has (without the flag: all), or another division of the layers"
                )


def notes(args: Any, config: RLConfig) -> Iterator[str]:
    """Lines about what is changed for adapters."""
    rate = getattr(args, "moe_router_bias_update_rate", None)
    if config.lora.lora_rank is not None and rate and getattr(args, "moe_router_enable_expert_bias", False):
        yield (
            f"--moe-router-bias-update-rate {rate} is 0 in this run: with --rl-lora-rank the base model, which is the "
            "reference, must not change"
        )
