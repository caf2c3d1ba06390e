"""Policy losses: one number a trained token, to be minimised.

A loss takes `TrainedTokens` and `Bounds` and returns `PolicyTerms`. It never averages over tokens:
weights come from `aggregate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class TrainedTokens:
    """The T trained tokens of a micro-batch; masked and padded positions are not among them.

    logp: `[T]` under the policy being trained, carries the gradient; logp_old: `[T]` under the policy that
    the update starts from; advantages: `[T]`; sequence: `[T]` int64, row of each token in the micro-batch.
    """

    logp: Tensor
    logp_old: Tensor
    advantages: Tensor
    sequence: Tensor


@dataclass(frozen=True)
class Bounds:
    """Clip range `[1 - low, 1 + high]` of the ratio; dual: bound c for negative advantages, None is off."""

    low: float
    high: float
    dual: float | None = None


@dataclass(frozen=True)
class PolicyTerms:
    """loss: `[T]`; ratio: `[T]`, detached; clipped: `[T]` bool, where the bound and not the ratio gave the loss."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def clip(tokens: TrainedTokens, bounds: Bounds) -> PolicyTerms:
    """PPO's clipped surrogate: `max(-A*r, -A*clip(r, 1-low, 1+high))`, `r = exp(logp - logp_old)`.

    With `bounds.dual` = c, where A < 0: `min(that, -c*A)`. Source: arXiv 1707.06347, Eq. 7; two bounds:
    DAPO, arXiv 2503.14476, Eq. 10; dual clip: arXiv 1912.09729, Eq. 5.
    """
    ratio = likelihood_ratio(tokens.logp, tokens.logp_old)
    plain = -tokens.advantages * ratio
    bounded = -tokens.advantages * ratio.clamp(1.0 - bounds.low, 1.0 + bounds.high)
    loss, clipped = torch.maximum(plain, bounded), bounded > plain
    if bounds.dual is not None:
        ceiling = -bounds.dual * tokens.advantages
        capped = (tokens.advantages < 0) & (loss > ceiling)
        loss, clipped = torch.where(capped, ceiling, loss), clipped | capped
    return PolicyTerms(loss, ratio.detach(), clipped)


@dataclass(frozen=True)
class LossSpec:
    """A policy loss and the bounds that it has unless told otherwise; dual: whether it knows dual clip."""

    function: Callable[[TrainedTokens, Bounds], PolicyTerms]
    clip_low: float
    clip_high: float
    dual: bool = False


LOSSES: dict[str, LossSpec] = {
    "clip": LossSpec(clip, 0.2, 0.2, dual=True),
    "clip-higher": LossSpec(clip, 0.2, 0.28, dual=True),
}


def likelihood_ratio(logp: Tensor, logp_old: Tensor) -> Tensor:
    """`exp(logp - logp_old)`, `[T]`, with the difference kept within +-20 so that it stays finite."""
    return (logp - logp_old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
