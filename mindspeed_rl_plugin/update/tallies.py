"""Reduce the tallies of a step over ranks, exactly once, on every rank alike."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mindspeed_rl_plugin.algorithms import Totals
from mindspeed_rl_plugin.update.objective import MAXIMA, PER_SEQUENCE, PER_TOKEN, WEIGHTED

SUMS = len(WEIGHTED) + len(PER_TOKEN) + len(PER_SEQUENCE)
WIDTH = SUMS + len(MAXIMA)


def reduce_tallies(
    tallies: Iterable[Tensor] | None, device: torch.device, *, width: int = WIDTH, sums: int = SUMS
) -> Tensor:
    """One tally of the global batch from those of this rank's micro-batches.

    tallies: vectors `[width]`, sums before maxima, None on ranks without the end of the model; device: where the
    process groups communicate. Returns `[width]` float64 on the host, the same on all ranks.
    Collective over DP where the model ends, then over each pipeline. Context parallel ranks hold the same tally each.
    """
    whole = torch.zeros(width, dtype=torch.float64)
    if tallies is not None:
        local = _combine(torch.stack([tally.double().cpu() for tally in tallies]), sums)
        whole = _combine(_gather(local, parallel_state.get_data_parallel_group(), device), sums)
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return whole
    ends = torch.full((1,), float(tallies is not None), dtype=torch.float64)
    stages = _gather(torch.cat([ends, whole]), parallel_state.get_pipeline_model_parallel_group(), device)
    return stages[stages[:, 0] == 1, 1:][0]


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


def _gather(tally: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """`[ranks, width]`, what each rank of the group has."""
    parts = [_as_bits(tally, device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, _as_bits(tally, device), group=group)
    return torch.stack([_from_bits(part) for part in parts])


# Bits travel as int32 and are summed on the host: HCCL neither reduces nor sends float64.
def _as_bits(tally: Tensor, device: torch.device) -> Tensor:
    return tally.view(torch.int32).to(device, copy=True)


def _from_bits(bits: Tensor) -> Tensor:
    return bits.cpu().view(torch.float64)
