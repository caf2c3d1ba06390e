"""A copy of a model's weights on the host, which changes places with the live ones: the frozen reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch.nn import Module

from mindspeed_rl_plugin.device import Device, get_device
from mindspeed_rl_plugin.reshard.host_memory import HostMemoryBudget, HostPieces, Place, beside
from mindspeed_rl_plugin.reshard.storages import keep_wide, labelled

_SCRATCH = 64 << 20  # bytes of device memory that an exchange of weights uses


class HostWeights:
    """The copy. Made by `capture`."""

    def __init__(self, labels: tuple[tuple[str, int], ...], host: list[Place], device: Device) -> None:
        self._labels, self._host, self._device = labels, host, device
        self._swapped = False

    @classmethod
    @torch.no_grad()
    def capture(
        cls, model_chunks: Sequence[Module], device: Device | None = None, budget: HostMemoryBudget | None = None
    ) -> HostWeights:
        """Copy all parameters, buffers and parameter buffers of the chunks to host memory.

        budget: of the machine; then collective over its ranks. Raises MemoryError where it has too little for the copy.
        """
        device = device or get_device()
        keep_wide(model_chunks)
        labels, storages = labelled(model_chunks)
        memory, sizes = HostPieces(device), [s.nbytes() for s in storages]
        lacking = memory.lacking(sizes)
        (budget or HostMemoryBudget(device)).reserve(sum(lacking), "the host copy of the reference's weights")
        memory.take(lacking)
        host = memory.places(sizes)
        for place, storage in zip(host, storages, strict=True):
            for mine, live in beside(place, storage):
                mine.copy_(live, non_blocking=True)
        device.synchronize()
        return cls(labels, host, device)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(part.numel() for place in self._host for part in place)

    @contextlib.contextmanager
    def swapped_into(self, model_chunks: Sequence[Module]) -> Iterator[None]:
        """Inside the context the live model has these weights; after it, bitwise its own again.

        The weights change places, so that no second host copy is needed. Do not step the optimizer
        inside. Raises ValueError when the chunks do not have the captured storages, or are offloaded.
        """
        if self._swapped:
            raise ValueError("these weights are in a model already; leave that context first")
        self._exchange(model_chunks)
        self._swapped = True
        try:
            yield
        finally:
            self._exchange(model_chunks)
            self._swapped = False

    @torch.no_grad()
    def _exchange(self, model_chunks: Sequence[Module]) -> None:
        labels, storages = labelled(model_chunks)
        if labels != self._labels:
            changed = [f"{a} -> {b}" for a, b in zip(self._labels, labels, strict=False) if a != b]
            raise ValueError(
                "the model's storages are not those that were captured (offloaded, or another model): "
                + "; ".join(changed[:5] or [f"{len(self._labels)} -> {len(labels)} storages"])
            )
        if not storages:
            return
        largest = max(s.nbytes() for s in storages)
        scratch = torch.empty(min(_SCRATCH, largest), dtype=torch.uint8, device=storages[0].device)
        for place, storage in zip(self._host, storages, strict=True):
            for host, inside in beside(place, storage):
                for mine, live in zip(host.split(_SCRATCH), inside.split(_SCRATCH), strict=True):
                    spare = scratch[: live.numel()]
                    spare.copy_(live)
                    live.copy_(mine, non_blocking=True)
                    mine.copy_(spare, non_blocking=True)
        self._device.synchronize_stream()
