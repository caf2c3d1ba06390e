"""Reduce the tallies of a step over ranks, exactly once, on every rank alike."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mindspeed_rl_plugin.algorithms import Totals
from mindspeed_rl_plugin.forward.schedule import is_last_stage
from mindspeed_rl_plugin.update.objective import MAXIMA, PER_SEQUENCE, PER_TOKEN, WEIGHTED

SUMS = len(WEIGHTED) + len(PER_TOKEN) + len(PER_SEQUENCE)
WIDTH = SUMS + len(MAXIMA)


def reduce_tallies(tallies: Iterable[Tensor], device: torch.device, *, width: int = WIDTH, sums: int = SUMS) -> Tensor:
    """One tally of the global batch from those of this rank's micro-batches.

    tallies: vectors `[width]`, sums before maxima, empty on ranks that are not on the last pipeline stage; device:
    where the process groups communicate. Returns `[width]` float64 on the host, the same on all ranks.
    Collective over DP on the last stage, then over each pipeline. Context parallel ranks hold the same tally each.
    """
    if is_last_stage():
        local = _combine(torch.stack([tally.double().cpu() for tally in tallies]), sums)
        group = parallel_state.get_data_parallel_group()
        parts = [_as_bits(local, device) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, _as_bits(local, device), group=group)
        bits = _as_bits(_combine(torch.stack([_from_bits(part) for part in parts]), sums), device)
    else:
        bits = _as_bits(torch.zeros(width, dtype=torch.float64), device)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(bits, src=source, group=parallel_state.get_pipeline_model_parallel_group())
    return _from_bits(bits)


def to_metrics(tally: Tensor, totals: Totals) -> dict[str, float]:
    """The metrics of a reduced tally, by the register's names (`monitor.names` says what they are).

    `loss` and `loss/*` are aggregated as the loss is, the others are over the trained tokens or sequences;
    `logp_diff/*` over tokens that this rollout's weights sampled. Without any trained token the means are 0 (ratio and
    weights 1) and the extremes are left out, without any of this rollout's weights those of `logp_diff`.
    """
    named = dict(zip(WEIGHTED + PER_TOKEN + PER_SEQUENCE + MAXIMA, tally.tolist(), strict=True))
    metrics = {name: named[name] for name in WEIGHTED}
    metrics.update({name: named[name] / max(totals.tokens, 1) for name in PER_TOKEN})
    metrics.update({name: named[name] / max(totals.sequences, 1) for name in PER_SEQUENCE})
    for name in ("ratio/mean", "rollout/weight_mean", "rollout/sequence_weight_mean"):
        metrics[name] += 1.0
    fresh = totals.tokens - named["rollout/stale"]
    if fresh:
        metrics["logp_diff/mean"] = named["logp_diff/mean"] / fresh
    elif totals.tokens:
        del metrics["logp_diff/mean"]
    if totals.tokens:
        metrics.update({name: named[name] for name in MAXIMA})
        metrics["ratio/min"] = -metrics["ratio/min"]
        if not fresh:
            del metrics["logp_diff/max"]
    return {**metrics, "trained/tokens": float(totals.tokens), "trained/sequences": float(totals.sequences)}


def _combine(tallies: Tensor, sums: int) -> Tensor:
    return torch.cat([tallies[:, :sums].sum(0), tallies[:, sums:].amax(0)])


# Bits travel as int32 and are summed on the host: HCCL neither reduces nor sends float64.
def _as_bits(tally: Tensor, device: torch.device) -> Tensor:
    return tally.view(torch.int32).to(device, copy=True)


def _from_bits(bits: Tensor) -> Tensor:
    return bits.cpu().view(torch.float64)
