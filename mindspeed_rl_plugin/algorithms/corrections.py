"""Off-policy corrections: weights for what an older policy, or an engine that rounds differently, has sampled.

The rollout engine sampled tokens under `logp_rollout`; the update starts from `logp_old`, which the trainer
computed. The policy loss is multiplied by the weight `exp(logp_old - logp_rollout)`, which has no gradient.
A token of weight 0 still counts in the denominators: they are fixed before the first micro-batch runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_WEIGHT_LIMIT = 20.0


def importance_weights(logp_old: Tensor, logp_rollout: Tensor, sequence: Tensor, sequences: int, level: str) -> Tensor:
    """Probability under the trainer's policy / probability under the engine's, of a token or a whole response.

    logp_old, logp_rollout: `[T]`; sequence: `[T]` int64, row of each token among `sequences`; level: "token",
    `exp(logp_old - logp_rollout)`, or "sequence", the product over the response's trained tokens on each of them.
    The logarithm is kept within +-20. Returns `[T]`, detached. Source: token level: F. Yao et al., "Your efficient RL
    framework secretly brings you off-policy RL training", 2025; sequence level: ordinary importance sampling,
    R. Sutton, A. Barto, "Reinforcement learning", 2018, section 5.5.
    """
    gap = (logp_old - logp_rollout).detach()
    if level == "sequence":
        gap = gap.new_zeros(sequences).index_add_(0, sequence, gap)[sequence]
    return gap.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp()


def truncate(weights: Tensor, low: float, high: float) -> Tensor:
    """`clamp(w, low, high)`. Source: truncated importance sampling, F. Yao et al., 2025 (low 0, high 2)."""
    return weights.clamp(low, high)


def mask(weights: Tensor, low: float, high: float) -> Tensor:
    """`w` within the bounds, 0 outside them. Source: IcePop, arXiv 2510.18855."""
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


def decoupled(weights: Tensor, low: float, high: float) -> Tensor:
    """Decoupled PPO: the weight of the behaviour policy, whole unless bounds are given, times PPO's ratio.

    PPO's ratio and clip are taken against `logp_old`, the proximal policy recomputed when the update starts; `w`
    is 0 outside the bounds. Source: AReaL, arXiv 2505.24298.
    """
    return mask(weights, low, high)


@dataclass(frozen=True)
class CorrectionSpec:
    """A correction and its default bounds. function None: weights are measured only."""

    function: Callable[[Tensor, float, float], Tensor] | None
    low: float
    high: float


CORRECTIONS: dict[str, CorrectionSpec] = {
    "off": CorrectionSpec(None, 0.5, 2.0),
    "truncate": CorrectionSpec(truncate, 0.0, 2.0),
    "mask": CorrectionSpec(mask, 0.5, 2.0),
    "decoupled": CorrectionSpec(decoupled, 0.0, float("inf")),
}
