"""Canonical tensors from what ranks store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mindspeed_rl_plugin.reshard.layout import Canonical, Layout


class Assembled:
    """Canonical tensors out of the stored ones of all ranks, one by one.

    held: (who, layout, tensors) of every rank. Raises ValueError naming tensor and range that nobody holds.
    """

    def __init__(
        self, tensors: Mapping[str, Canonical], held: Sequence[tuple[str, Layout, Mapping[str, Tensor]]]
    ) -> None:
        self._tensors = tensors
        self._parts: dict[str, dict[tuple[int, int], list[tuple[str, Tensor]]]] = {name: {} for name in tensors}
        for who, layout, stored in held:
            for param, segments in layout.items():
                for s in segments:
                    values = s.view(stored[param], s.start, s.size)
                    self._parts[s.name].setdefault((s.start, s.stop), []).append((who, values))
        for name, parts in self._parts.items():
            at = 0
            for low, high in sorted(parts):
                if low != at:
                    break
                at = high
            if at != tensors[name].slices:
                raise ValueError(f"{name}: slices from {at} on are not there, or twice, in ranges {sorted(parts)}")

    def dtype(self, name: str) -> torch.dtype:
        """Dtype in which a tensor is stored."""
        return next(iter(self._parts[name].values()))[0][1].dtype

    def make(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor, in the stored dtype or in `dtype`.

        Raises ValueError when ranks that store the same range differ.
        """
        tensor = self._tensors[name]
        out = torch.empty(tensor.shape, dtype=dtype or self.dtype(name))
        for (low, high), copies in self._parts[name].items():
            who, values = copies[0]
            for other, again in copies[1:]:
                if not torch.equal(values, again):
                    raise ValueError(f"{name} [{low}, {high}): {who} and {other} store different values")
            out.narrow(tensor.axis, low, high - low).copy_(values)
        return out
