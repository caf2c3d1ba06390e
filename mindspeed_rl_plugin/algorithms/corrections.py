"""Off-policy corrections: loss factors of tokens sampled by an older policy, or by an engine that rounds differently.

The rollout engine sampled tokens under `logp_rollout`. The trainer computed `logp_old` with the weights at the start of
the update. The policy loss is multiplied by an importance weight (level "token": `exp(logp_old - logp_rollout)`),
bounded and without gradient. A token of weight 0 still counts in the divisors, which are
fixed beforehand (see `aggregate`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_WEIGHT_LIMIT = 20.0
CORRECTION_LEVELS = ("token", "sequence", "geometric")


def importance_weights(logp_old: Tensor, logp_rollout: Tensor, sequence: Tensor, sequences: int, level: str) -> Tensor:
    """Probability under the trainer's policy / probability under the engine's, of a token or a complete response.

    logp_old, logp_rollout: `[T]`; tokens of one response may come from several versions of the engine's weights.
    sequence: `[T]` int64, row of each token, below `sequences`. level: "token", `exp(logp_old - logp_rollout)`;
    "sequence", each token gets the product of these ratios over its response; "geometric", each token gets the
    geometric mean of these ratios, which does not grow with the length. Logarithms are clamped to +-20. Returns
    `[T]`, detached. Sources:
    token level: F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025;
    sequence level: ordinary importance sampling, R. Sutton, A. Barto, "Reinforcement learning", 2018, section 5.5;
    geometric: verl's rollout correction (`seq_mean_k1`), AReaL's behaviour weight at its level "sequence".
    """
    gap = (logp_old - logp_rollout).detach()
    if level != "token":
        sums = gap.new_zeros(sequences).index_add_(0, sequence, gap)
        if level == "geometric":
            sums = sums / torch.bincount(sequence, minlength=sequences).clamp(min=1)
        gap = sums[sequence]
    return gap.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp()


def truncate(weights: Tensor, low: float, high: float) -> Tensor:
    """`clamp(w, low, high)`. Source: truncated importance sampling, F. Yao et al., 2025 (low 0, high 2)."""
    return weights.clamp(low, high)


def mask(weights: Tensor, low: float, high: float) -> Tensor:
    """`w` within the bounds, else 0. With level "geometric" this drops complete responses (bounds 0.999 and 1.001).

    Source: IcePop, arXiv 2510.18855; geometric: Liu, Li et al., "When speed kills stability", 2025, bounds: verl.
    """
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


def decoupled(weights: Tensor, low: float, high: float) -> Tensor:
    """Decoupled PPO: the importance weight, or 0 if it is outside the bounds; it multiplies PPO's loss.

    PPO's ratio and clip use `logp_old`, of the proximal policy (the policy when the update starts). Source: J. Hilton
    et al., arXiv 2110.00641; AReaL, arXiv 2505.24298, mode `token_mask` with its default cap of 5.
    """
    return mask(weights, low, high)


def decoupled_clip(weights: Tensor, low: float, high: float) -> Tensor:
    """As `decoupled`, but a weight outside the bounds is set to the nearer bound, so that each token is trained.

    Source: AReaL, arXiv 2505.24298, mode `token_truncate`, cap 5.
    """
    return truncate(weights, low, high)


@dataclass(frozen=True)
class CorrectionSpec:
    """A correction of the mismatch between sampling and training, and its default bounds."""

    # (weights, low, high) -> factors; None: weights are only measured
    function: Callable[[Tensor, float, float], Tensor] | None
    low: float  # least weight
    high: float  # largest weight
    geometric: tuple[float, float] | None = None  # (low, high) at the level "geometric"; None: the same bounds

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
