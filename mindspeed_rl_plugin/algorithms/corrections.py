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
CORRECTION_LEVELS = ("token", "sequence", "geometric")


def importance_weights(logp_old: Tensor, logp_rollout: Tensor, sequence: Tensor, sequences: int, level: str) -> Tensor:
    """Probability under the trainer's policy / probability under the engine's, of a token or a whole response.

    logp_old, logp_rollout: `[T]`, the latter under the weights that sampled each token, which may differ within a
    response; sequence: `[T]` int64, row of each token among `sequences`; level: "token", `exp(logp_old -
    logp_rollout)`, "sequence", the product over the response's trained tokens on each of them, or "geometric", their
    geometric mean, which does not grow with the length. The logarithm is kept within +-20. Returns `[T]`, detached.
    Source: token level: F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025;
    sequence level: ordinary importance sampling, R. Sutton, A. Barto, "Reinforcement learning", 2018, section 5.5;
    geometric: verl's rollout correction (`seq_mean_k1`), AReaL's behaviour weight at its level "sequence".
    """
    gap = (logp_old - logp_rollout).detach()
    if level != "token":
        whole = gap.new_zeros(sequences).index_add_(0, sequence, gap)
        if level == "geometric":
            whole = whole / torch.bincount(sequence, minlength=sequences).clamp(min=1)
        gap = whole[sequence]
    return gap.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp()


def truncate(weights: Tensor, low: float, high: float) -> Tensor:
    """`clamp(w, low, high)`. Source: truncated importance sampling, F. Yao et al., 2025 (low 0, high 2)."""
    return weights.clamp(low, high)


def mask(weights: Tensor, low: float, high: float) -> Tensor:
    """`w` within the bounds, 0 outside them; at level geometric whole responses, low 0.999, high 1.001.

    Source: IcePop, arXiv 2510.18855; geometric: Liu, Li et al., "When speed kills stability", 2025, bounds: verl.
    """
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


def decoupled(weights: Tensor, low: float, high: float) -> Tensor:
    """Decoupled PPO: the weight of the behaviour policy, 0 above its cap, times PPO's ratio.

    PPO's ratio and clip are taken against `logp_old`, the proximal policy of the update's start. Source: J. Hilton et
    al., arXiv 2110.00641; AReaL, arXiv 2505.24298, its default cap 5 and mode `token_mask`.
    """
    return mask(weights, low, high)


def decoupled_clip(weights: Tensor, low: float, high: float) -> Tensor:
    """Decoupled PPO with the behaviour policy's weight clipped at its cap, so that each token is still trained.

    Otherwise as `decoupled`. Source: AReaL, arXiv 2505.24298, its mode `token_truncate`, cap 5.
    """
    return truncate(weights, low, high)


@dataclass(frozen=True)
class CorrectionSpec:
    """A correction of the mismatch between sampling and training, and its default bounds."""

    # (weights, low, high) -> factors; None: weights are only measured
    function: Callable[[Tensor, float, float], Tensor] | None
    low: float  # least weight
    high: float  # largest weight
    geometric: tuple[float, float] | None = None  # (low, high) at the geometric level, None: the same

    def bounds(self, level: str) -> tuple[float, float]:
        """Default bounds at a level."""
        return self.geometric if self.geometric and level == "geometric" else (self.low, self.high)


CORRECTIONS: dict[str, CorrectionSpec] = {
    "off": CorrectionSpec(None, 0.5, 2.0),
    "truncate": CorrectionSpec(truncate, 0.0, 2.0),
    "mask": CorrectionSpec(mask, 0.5, 2.0, geometric=(0.999, 1.001)),
    "decoupled": CorrectionSpec(decoupled, 0.0, 5.0),
    "decoupled-clip": CorrectionSpec(decoupled_clip, 0.0, 5.0),
}
