"""How token losses become one number: a weight for each trained token.

The loss of a step is `sum_t w_t * l_t` over all trained tokens of the global batch. Each aggregation is a choice of
`w_t`, computed from counts that are known before the first micro-batch runs. So loss and gradient do not depend on how
the batch is divided into micro-batches, ranks or packs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Totals:
    """Counts over the global batch of one optimizer step, over all micro-batches and data parallel ranks."""

    tokens: int  # trained tokens
    sequences: int  # sequences with at least one trained token
    norm_length: int | None = None  # the constant length of `token-sum-norm`, in tokens; None for other aggregations


def token_mean(counts: Tensor, totals: Totals) -> Tensor:
    """Sum of all token losses / number of trained tokens. Source: DAPO, arXiv 2503.14476, Eq. 8."""
    return torch.full_like(counts, 1.0 / max(totals.tokens, 1))


def seq_mean_token_mean(counts: Tensor, totals: Totals) -> Tensor:
    """Mean over sequences of each sequence's mean over its tokens. Source: GRPO, arXiv 2402.03300, Eq. 3."""
    return 1.0 / (counts.clamp(min=1) * max(totals.sequences, 1))


def seq_mean_token_sum(counts: Tensor, totals: Totals) -> Tensor:
    """Mean over sequences of each sequence's sum. Source: RLOO, arXiv 2402.14740."""
    return torch.full_like(counts, 1.0 / max(totals.sequences, 1))


def token_sum_norm(counts: Tensor, totals: Totals) -> Tensor:
    """Sum of all token losses / (sequences x a constant length). Source: Dr.GRPO, arXiv 2503.20783, section 3.2."""
    return torch.full_like(counts, 1.0 / (max(totals.sequences, 1) * totals.norm_length))


AGGREGATIONS: dict[str, Callable[[Tensor, Totals], Tensor]] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "token-sum-norm": token_sum_norm,
}


def sequence_weights(name: str, counts: Tensor, totals: Totals) -> Tensor:
    """Weight of every trained token of each sequence, under aggregation `name`.

    counts: `[B]`, number of trained tokens of each sequence; the sequences may be any part of the global batch.
    Returns `[B]` float64. It is 0 for a sequence without a trained token, which `totals.sequences` does not count.
    """
    counts = counts.double()
    return torch.where(counts > 0, AGGREGATIONS[name](counts, totals), 0.0)
