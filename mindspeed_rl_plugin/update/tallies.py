"""Reduces counts and tallies of a step over the ranks, each exactly once; all ranks get the same result.

Uses gloo on the host, for two reasons. First, --rl-wait-timeout limits its waits (--distributed-timeout-minutes limits
those of collectives on a device). Second, it has float64, which HCCL does not have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from mindspeed_rl_plugin.algorithms import Totals
from mindspeed_rl_plugin.ranks import gather_all
from mindspeed_rl_plugin.update.objective import MAXIMA, PER_SEQUENCE, PER_TOKEN, WEIGHTED

SUM_COUNT = len(WEIGHTED) + len(PER_TOKEN) + len(PER_SEQUENCE)


def of_data_parallel_ranks(value: Any) -> list[Any]:
    """The value of each data parallel rank, in their order, on every rank of the job. Collective.

    value: equal on all model parallel ranks of a data parallel rank, or None on some of them.
    """
    every = gather_all((parallel_state.get_data_parallel_rank(), value))
    first = {rank: value for rank, value in reversed(every) if value is not None}
    return [first[rank] for rank in sorted(first)]


def summed(counts: Tensor) -> list[int]:
    """Sums of whole numbers `[N]` over the data parallel ranks. Collective."""
    return torch.tensor(of_data_parallel_ranks(counts.tolist())).sum(0).tolist()


def reduce_tallies(tallies: Iterable[Tensor] | None, sums: int = SUM_COUNT) -> Tensor:
    """One tally of the global batch from those of this rank's micro-batches.

    tallies: vectors `[width]`, equal on tensor and context parallel ranks; None on ranks without the last layer. The
    first `sums` entries are summed, of the others the maximum is taken. Returns `[width]` float64 on the host.
    Collective.
    """
    local = None
    if tallies is not None:
        local = _combine(torch.stack([tally.double().cpu() for tally in tallies]), sums).tolist()
    return _combine(torch.tensor(of_data_parallel_ranks(local), dtype=torch.float64), sums)


def to_metrics(tally: Tensor, totals: Totals) -> dict[str, float]:
    """The metrics of a reduced tally, by the names of `monitor.names`.

    `loss` and `loss/*` are sums with the weights of the loss. The others are means over trained tokens or sequences,
    maxima, minima, or counts (`trained/*`); `logp_diff/*` are of tokens that this rollout's weights sampled (left out
    if all are older). If no token is trained, means are 0 (of ratios and importance weights: 1), and maxima and minima
    are left out.
    """
    named = dict(zip(WEIGHTED + PER_TOKEN + PER_SEQUENCE + MAXIMA, tally.tolist(), strict=True))
    metrics = {name: named[name] for name in WEIGHTED}
    metrics.update({name: named[name] / max(totals.tokens, 1) for name in PER_TOKEN})
    metrics.update({name: named[name] / max(totals.sequences, 1) for name in PER_SEQUENCE})
    for name in ("ratio/mean", "rollout/weight_mean", "rollout/sequence_weight_mean", "rollout/geometric_weight_mean"):
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
