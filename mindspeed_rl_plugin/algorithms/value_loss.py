"""The critic's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ValueTerms:
    """What the value loss returns for each trained token."""

    loss: Tensor  # `[T]`
    clipped: Tensor  # `[T]` bool, whether the loss comes from the bound and not from the value


def value_loss(values: Tensor, values_old: Tensor, returns: Tensor, clip: float | None) -> ValueTerms:
    """`0.5 * max((v - return)^2, (clip(v, v_old - c, v_old + c) - return)^2)` of each trained token.

    values: `[T]`, carries the gradient; values_old: `[T]`, from before the update; clip: c, None: no clipping.
    `aggregate`'s token-mean weighs the tokens. Source: PPO2 of OpenAI baselines; arXiv 2006.05990.
    """
    plain = (values - returns).square()
    if clip is None:
        return ValueTerms(0.5 * plain, torch.zeros_like(plain, dtype=torch.bool))
    bounded = (torch.maximum(torch.minimum(values, values_old + clip), values_old - clip) - returns).square()
    return ValueTerms(0.5 * torch.maximum(plain, bounded), bounded > plain)
