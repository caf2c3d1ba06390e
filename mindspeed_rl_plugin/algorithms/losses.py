"""Policy losses: one number per trained token, to be minimised.

A loss takes `TrainedTokens` and `Bounds` and returns `PolicyTerms`. It never averages over tokens: their
weights come from `aggregate`. In formulas, `sg` stops the gradient and `r = exp(logp - logp_old)`.
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
    """Bounds of the ratio, and temperatures of SAPO."""

    low: float = 0.0  # the ratio is clipped to `[1 - low, 1 + high]`
    high: float = 0.0
    dual: float | None = None  # c in `clip`, for negative advantages; None: off
    tau_positive: float = 1.0  # temperature of SAPO's gate if the advantage is above 0
    tau_negative: float = 1.05  # temperature of SAPO's gate if the advantage is 0 or less


@dataclass(frozen=True)
class PolicyTerms:
    """What a policy loss returns for each trained token."""

    loss: Tensor  # `[T]`
    ratio: Tensor  # `[T]`, detached
    clipped: Tensor  # `[T]` bool, whether the loss comes from the bound and not from the ratio


def clip(tokens: TrainedTokens, bounds: Bounds) -> PolicyTerms:
    """PPO's clipped surrogate: `max(-A*r, -A*clip(r, 1-low, 1+high))`.

    With `bounds.dual` = c and A < 0, the loss is at most `-c*A`. Source: arXiv 1707.06347, Eq. 7; two
    bounds: DAPO, arXiv 2503.14476, Eq. 10; dual clip: arXiv 1912.09729, Eq. 5.
    """
    return _clipped(likelihood_ratio(tokens.logp, tokens.logp_old), tokens.advantages, bounds)


def gspo(tokens: TrainedTokens, bounds: Bounds) -> PolicyTerms:
    """`clip` with the sequence ratio `s = exp(mean_t (logp - logp_old))` instead of r.

    It is computed as `sg(s) * exp(logp - sg(logp))`: for each token its value is s and its gradient is s times that of
    the token's logp, so advantages may differ between tokens. log s is at most 10; above that the gradient is 0.
    Source: GSPO-token, arXiv 2507.18071, Eq. 13 and 14; cap: verl, compute_policy_loss_gspo.
    """
    gap = (tokens.logp - tokens.logp_old).detach()
    sums = gap.new_zeros(tokens.sequences).index_add_(0, tokens.sequence, gap)
    counts = torch.bincount(tokens.sequence, minlength=tokens.sequences).clamp(min=1)
    mean = (sums / counts)[tokens.sequence]
    # The value in brackets is exactly 0. Without brackets, mean + logp would round off digits that bounds of 3e-4 need.
    log_ratio = (mean + (tokens.logp - tokens.logp.detach())).clamp(max=LOG_SEQUENCE_RATIO_LIMIT)
    return _clipped(log_ratio.exp(), tokens.advantages, bounds)


def cispo(tokens: TrainedTokens, bounds: Bounds) -> PolicyTerms:
    """Clipped importance weight; clipped tokens have a gradient too: `-sg(clip(r, 1-low, 1+high)) * A * logp`.

    Other code takes the upper bound itself; here `high` is this bound minus 1. With `low` of 1 or more there is no
    lower bound. Source: MiniMax-M1, arXiv 2506.13585, Eq. 4 and 5.
    """
    ratio = likelihood_ratio(tokens.logp, tokens.logp_old).detach()
    weight = ratio.clamp(1.0 - bounds.low, 1.0 + bounds.high)
    return PolicyTerms(-weight * tokens.advantages * tokens.logp, ratio, weight != ratio)


def sapo(tokens: TrainedTokens, bounds: Bounds) -> PolicyTerms:
    """A soft gate instead of the clip: `-A * sigmoid(tau*(r - 1)) * 4/tau`; tau depends on the sign of A.

    No token counts as clipped. Source: SAPO, arXiv 2511.20347.
    """
    ratio = likelihood_ratio(tokens.logp, tokens.logp_old)
    tau = torch.full_like(ratio, bounds.tau_negative).masked_fill(tokens.advantages > 0, bounds.tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    return PolicyTerms(-tokens.advantages * gate, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))


def reinforce(tokens: TrainedTokens, bounds: Bounds) -> PolicyTerms:
    """Policy gradient: `-A * sg(r) * logp`. r is 1 in the first step on a rollout, and keeps later steps unbiased.

    Source: R. Williams, 1992; RLOO, arXiv 2402.14740.
    """
    ratio = likelihood_ratio(tokens.logp, tokens.logp_old).detach()
    return PolicyTerms(-tokens.advantages * ratio * tokens.logp, ratio, torch.zeros_like(ratio, dtype=torch.bool))


@dataclass(frozen=True)
class LossSpec:
    """A policy loss, and its default bounds."""

    function: Callable[[TrainedTokens, Bounds], PolicyTerms]
    clip_low: float | None = None  # default bound; None: the loss has no bounds
    clip_high: float | None = None  # default bound; None: the loss has no bounds
    dual: bool = False  # whether the loss supports dual clip
    gate: bool = False  # whether the loss has SAPO's temperatures


LOSSES: dict[str, LossSpec] = {
    "clip": LossSpec(clip, 0.2, 0.2, dual=True),
    "clip-higher": LossSpec(clip, 0.2, 0.28, dual=True),
    "gspo": LossSpec(gspo, 3e-4, 4e-4, dual=True),
    "cispo": LossSpec(cispo, 10.0, 0.2),
    "sapo": LossSpec(sapo, gate=True),
    "reinforce": LossSpec(reinforce),
}


def likelihood_ratio(logp: Tensor, logp_old: Tensor) -> Tensor:
    """`exp(logp - logp_old)`, `[T]`. The difference is clamped to +-20, so that the ratio is finite."""
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
