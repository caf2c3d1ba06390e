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
    """Name the numbers of a reduced tally.

    `loss`, `pg_loss`, `kl_loss`, `entropy_loss` are aggregated as the loss is; `ratio_mean`, `clip_fraction`,
    `entropy`, `kl` (to the reference), `kl_old` (to the policy the step started from) are means over the trained
    tokens, in nats where they have a unit; `logp_diff_mean` and `_max` (engine to trainer) are of those that this
    rollout's weights sampled, and `rollout_stale` is the share of the others. `rollout_weight_mean` and
    `rollout_weight_outside` are over tokens the mean importance weight of the engine's samples and the share outside
    the correction's bounds, `rollout_sequence_weight_mean` and `_outside` the same of whole responses, and
    `rollout_kl` the KL of the engine's policy to the trainer's. Without any trained token the means are 0 (ratio and
    weights 1) and the extremes are left out, without any of this rollout's weights those of `logp_diff`.
    """
    named = dict(zip(WEIGHTED + PER_TOKEN + PER_SEQUENCE + MAXIMA, tally.tolist(), strict=True))
    metrics = {name: named[name] for name in WEIGHTED}
    metrics.update({name: named[name] / max(totals.tokens, 1) for name in PER_TOKEN})
    metrics.update({name: named[name] / max(totals.sequences, 1) for name in PER_SEQUENCE})
    for name in ("ratio", "rollout_weight", "rollout_sequence_weight"):
        metrics[f"{name}_mean"] = 1.0 + metrics.pop(name)
    fresh = totals.tokens - named["rollout_stale"]
    if fresh:
        metrics["logp_diff_mean"] = named["logp_diff_mean"] / fresh
    elif totals.tokens:
        del metrics["logp_diff_mean"]
    if totals.tokens:
        metrics.update({name: named[name] for name in MAXIMA})
        metrics["ratio_min"] = -metrics["ratio_min"]
        if not fresh:
            del metrics["logp_diff_max"]
    return {**metrics, "trained_tokens": float(totals.tokens), "trained_sequences": float(totals.sequences)}


def _combine(tallies: Tensor, sums: int) -> Tensor:
    return torch.cat([tallies[:, :sums].sum(0), tallies[:, sums:].amax(0)])


# Bits travel as int32 and are summed on the host: HCCL neither reduces nor sends float64.
def _as_bits(tally: Tensor, device: torch.device) -> Tensor:
    return tally.view(torch.int32).to(device, copy=True)


def _from_bits(bits: Tensor) -> Tensor:
    return bits.cpu().view(torch.float64)
