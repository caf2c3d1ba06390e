"""Policy losses: one number per trained token, to be minimised.

A loss takes `TrainedTokens` and `Bounds` and returns `PolicyTerms`. It never averages over tokens:
weights come from `aggregate`. `sg` in formulas stops the gradient; `r = exp(logp - logp_old)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
LOG_SEQUENCE_RATIO_LIMIT = 10.0


@dataclass(frozen=True)
class TrainedTokens:
    """The T trained tokens of a micro-batch; masked and padded positions are not among them."""

    logp: Tensor  # `[T]` under the policy being trained; carries the gradient
    logp_old: Tensor  # `[T]` under the policy from which the update starts
    advantages: Tensor  # `[T]`
    sequence: Tensor  # `[T]` int64, the token's row in the micro-batch; all trained tokens of a row are here
    sequences: int  # rows of the micro-batch


@dataclass(frozen=True)
class Bounds:
    """Limits that a loss puts on the ratio."""

    low: float = 0.0  # the ratio is clipped to `[1 - low, 1 + high]`
    high: float = 0.0
    dual: float | None = None  # bound c for negative advantages; None: off
    tau_positive: float = 1.0  # temperature of SAPO's gate for advantages above 0
    tau_negative: float = 1.05  # the same for other advantages


@dataclass(frozen=True)
class PolicyTerms:
    """What a policy loss returns for each trained token."""

    loss: Tensor  # `[T]`
    ratio: Tensor  # `[T]`, detached
    clipped: Tensor  # `[T]` bool, whether the loss comes from the bound and not from the ratio


def clip(tokens: TrainedTokens, bounds: Bounds) -> PolicyTerms:
    """PPO's clipped surrogate: `max(-A*r, -A*clip(r, 1-low, 1+high))`.

    With `bounds.dual` = c, where A < 0: `min(that, -c*A)`. Source: arXiv 1707.06347, Eq. 7; two bounds:
    DAPO, arXiv 2503.14476, Eq. 10; dual clip: arXiv 1912.09729, Eq. 5.
    """
    return _clipped(likelihood_ratio(tokens.logp, tokens.logp_old), tokens.advantages, bounds)


def gspo(tokens: TrainedTokens, bounds: Bounds) -> PolicyTerms:
    """Sequence ratio `s = exp(mean_t (logp - logp_old))` in the place of r in `clip`.

    In token form, `sg(s) * exp(logp - sg(logp))`: on each token the value is s, and the gradient is the token's own
    part, so that advantages may differ between tokens. log s is capped at 10, beyond which no gradient flows. Source:
    GSPO-token, arXiv 2507.18071, Eq. 13 and 14; cap: verl, compute_policy_loss_gspo.
    """
    gap = (tokens.logp - tokens.logp_old).detach()
    sums = gap.new_zeros(tokens.sequences).index_add_(0, tokens.sequence, gap)
    counts = torch.bincount(tokens.sequence, minlength=tokens.sequences).clamp(min=1)
    mean = (sums / counts)[tokens.sequence]
    # In this order: the bracket is exactly 0, while mean + logp would round off digits that bounds of 3e-4 need.
    log_ratio = (mean + (tokens.logp - tokens.logp.detach())).clamp(max=LOG_SEQUENCE_RATIO_LIMIT)
    return _clipped(log_ratio.exp(), tokens.advantages, bounds)


def cispo(tokens: TrainedTokens, bounds: Bounds) -> PolicyTerms:
    """Clipped importance weight, every token keeps its gradient: `-sg(clip(r, 1-low, 1+high)) * A * logp`.

    Other code gives the upper bound itself; `high` here is its offset from 1. low above 1 is no lower bound.
    Source: MiniMax-M1, arXiv 2506.13585, Eq. 4 and 5.
    """
    ratio = likelihood_ratio(tokens.logp, tokens.logp_old).detach()
    weight = ratio.clamp(1.0 - bounds.low, 1.0 + bounds.high)
    return PolicyTerms(-weight * tokens.advantages * tokens.logp, ratio, weight != ratio)


def sapo(tokens: TrainedTokens, bounds: Bounds) -> PolicyTerms:
    """Soft gate for the clip: `-A * sigmoid(tau*(r - 1)) * 4/tau`, tau by the sign of A.

    Nothing counts as clipped. Source: SAPO, arXiv 2511.20347.
    """
    ratio = likelihood_ratio(tokens.logp, tokens.logp_old)
    tau = torch.full_like(ratio, bounds.tau_negative).masked_fill(tokens.advantages > 0, bounds.tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    return PolicyTerms(-tokens.advantages * gate, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))


def reinforce(tokens: TrainedTokens, bounds: Bounds) -> PolicyTerms:
    """Policy gradient: `-A * sg(r) * logp`; r is 1 in a rollout's first step and keeps later ones unbiased.

    Source: R. Williams, 1992; RLOO, arXiv 2402.14740.
    """
    ratio = likelihood_ratio(tokens.logp, tokens.logp_old).detach()
    return PolicyTerms(-tokens.advantages * ratio * tokens.logp, ratio, torch.zeros_like(ratio, dtype=torch.bool))


@dataclass(frozen=True)
class LossSpec:
    """A policy loss, and its default bounds."""

    function: Callable[[TrainedTokens, Bounds], PolicyTerms]
    clip_low: float | None = None  # default bound; None: the loss has none
    clip_high: float | None = None  # likewise
    dual: bool = False  # whether it supports dual clip
    gate: bool = False  # whether it has SAPO's temperatures


LOSSES: dict[str, LossSpec] = {
    "clip": LossSpec(clip, 0.2, 0.2, dual=True),
    "clip-higher": LossSpec(clip, 0.2, 0.28, dual=True),
    "gspo": LossSpec(gspo, 3e-4, 4e-4, dual=True),
    "cispo": LossSpec(cispo, 10.0, 0.2),
    "sapo": LossSpec(sapo, gate=True),
    "reinforce": LossSpec(reinforce),
}


def likelihood_ratio(logp: Tensor, logp_old: Tensor) -> Tensor:
    """`exp(logp - logp_old)`, `[T]`, with the difference kept within +-20 so that it stays finite."""
    return (logp - logp_old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _clipped(ratio: Tensor, advantages: Tensor, bounds: Bounds) -> PolicyTerms:
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - bounds.low, 1.0 + bounds.high)
    loss, clipped = torch.maximum(plain, bounded), bounded > plain
    if bounds.dual is not None:
        ceiling = -bounds.dual * advantages
        capped = (advantages < 0) & (loss > ceiling)
        loss, clipped = torch.where(capped, ceiling, loss), clipped | capped
    return PolicyTerms(loss, ratio.detach(), clipped)
