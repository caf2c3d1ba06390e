"""Whitening of advantages over the trained tokens of a rollout on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Moments of the values of some trained tokens. `Moments()` stands for no tokens; a rank without trained tokens
    sends it, since the exchange is collective."""

    count: int = 0  # tokens
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean
    low: float = float("inf")  # least value
    high: float = float("-inf")  # largest value

    @classmethod
    def of(cls, values: Tensor, counts: Tensor) -> Moments:
        """values: `[n]`; counts: `[n]`, trained tokens that each value stands for (one value per token: the mask)."""
        seen = counts > 0
        values, counts = values[seen].double(), counts[seen].double()
        if not values.numel():
            return cls()
        total = float(counts.sum())
        mean = float((values * counts).sum()) / total
        squares = float(((values - mean).square() * counts).sum())
        return cls(int(total), mean, squares, float(values.min()), float(values.max()))

    @classmethod
    def merged(cls, parts: Iterable[Moments]) -> Moments:
        """Moments of all parts together.

        Source: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm", 1979.
        """
        parts = [part for part in parts if part.count]
        if not parts:
            return cls()
        count = sum(part.count for part in parts)
        mean = sum(part.count * part.mean for part in parts) / count
        squares = sum(part.squares + part.count * (part.mean - mean) ** 2 for part in parts)
        return cls(count, mean, squares, min(part.low for part in parts), max(part.high for part in parts))


def whiten(values: Tensor, moments: Moments, eps: float = 1e-8) -> Tensor:
    """`(A - mean) / sqrt(variance + eps)`, sample variance; exactly 0 if all tokens of the rollout have the same value.

    values: any shape; moments: of the rollout on all ranks. Returns float64 of the same shape; the caller sets
    masked tokens to 0. Source: REINFORCE++, arXiv 2501.03262; for PPO: arXiv 2006.05990.
    """
    if moments.low >= moments.high:
        return torch.zeros_like(values, dtype=torch.float64)
    variance = moments.squares / max(moments.count - 1, 1)
    return (values.double() - moments.mean) * (variance + eps) ** -0.5
