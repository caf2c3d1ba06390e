"""A copy of a model's weights on the host that is swapped with the live ones: the frozen reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch.nn import Module

from mindspeed_rl_plugin.device import Device, get_device
from mindspeed_rl_plugin.weights.host_memory import HostMemoryBudget, HostPieces, Place, paired
from mindspeed_rl_plugin.weights.storages import distinct, keep_wide, weights

_SCRATCH = 64 << 20  # bytes of device memory that an exchange of weights uses


class HostWeights:
    """The copy. Made by `capture`."""

    def __init__(self, host: list[Place], device: Device) -> None:
        self._host, self._device = host, device

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
        storages = _storages(model_chunks)
        budget, sizes = budget or HostMemoryBudget(device), {"": [s.nbytes() for s in storages]}
        host = budget.places({"": HostPieces(device)}, sizes, "the host copy of the reference's weights")[""]
        for place, storage in zip(host, storages, strict=True):
            for mine, live in paired(place, storage):
                mine.copy_(live, non_blocking=True)
        device.synchronize()
        return cls(host, device)

    @contextlib.contextmanager
    def swapped_into(self, model_chunks: Sequence[Module]) -> Iterator[None]:
        """Inside the context the live model has these weights; after it, bitwise its own again.

        The weights change places, so that no second host copy is needed. Do not enter it twice, nor step the optimizer
        inside. The chunks are those that were captured, on the device.
        """
        self._exchange(model_chunks)
        try:
            yield
        finally:
            self._exchange(model_chunks)

    @torch.no_grad()
    def _exchange(self, model_chunks: Sequence[Module]) -> None:
        storages = _storages(model_chunks)
        sizes = [sum(part.numel() for part in place) for place in self._host]
        assert sizes == [s.nbytes() for s in storages], "the model's storages are not those that were captured"
        if not storages:
            return
        scratch = torch.empty(min(_SCRATCH, max(sizes)), dtype=torch.uint8, device=storages[0].device)
        for place, storage in zip(self._host, storages, strict=True):
            for host, inside in paired(place, storage):
                for mine, live in zip(host.split(_SCRATCH), inside.split(_SCRATCH), strict=True):
                    copy = scratch[: live.numel()]
                    copy.copy_(live)
                    live.copy_(mine, non_blocking=True)
                    mine.copy_(copy, non_blocking=True)
        self._device.synchronize_stream()


def _storages(model_chunks: Sequence[Module]) -> list[torch.UntypedStorage]:
    return list(distinct(tensor for _, tensor in weights(model_chunks)).values())
