"""Weights that are no numbers: found before they reach the engine, where they would show as nonsense."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class BrokenWeights(RuntimeError):
    """The trainer's weights hold NaN or infinity."""


@torch.no_grad()
def first_broken(tensors: Iterable[Tensor]) -> int:
    """Place of the first tensor that holds NaN or infinity, counted from 1; 0 without.

    Reads everything once and takes no memory beside (minimum and maximum carry NaN); one wait for the device.
    """
    ends = [torch.stack(torch.aminmax(t)).float() if t.numel() else torch.zeros(2, device=t.device) for t in tensors]
    if not ends:
        return 0
    bad = ~torch.stack(ends).isfinite().all(1)
    return int(bad.nonzero()[0]) + 1 if bad.any() else 0
