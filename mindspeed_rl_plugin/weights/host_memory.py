"""Host memory for copies of a rank's state: the ranks of a machine first check together that it is free, and allocate
it in powers of two. Also a copy of a model's weights in it, which can be exchanged with the live weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from mindspeed_rl_plugin.device import Device, get_device
from mindspeed_rl_plugin.weights.p2p import P2PChannel
from mindspeed_rl_plugin.weights.storages import bytes_of, distinct, keep_wide, weights

GRANULE = 1 << 20  # bytes; requests are rounded up to a multiple of it, smaller requests to a power of two
LESS = "offload less (for example --rl-swap grads,optimizer), or run fewer ranks per machine"
_HOST_ALIGNMENT = 512  # bytes, of a copy on the host
_SCRATCH = 64 << 20  # bytes of device memory that an exchange of weights uses

HostCopy = list[Tensor]  # the bytes of a storage on the host, in one piece of memory or several


class HostMemoryBudget:
    """The host memory of this rank's machine.

    channel: of the ranks of this job on the machine, over gloo; None: this rank alone; ranks: number of these ranks.
    """

    def __init__(self, device: Device | None = None, channel: P2PChannel | None = None, ranks: int = 1) -> None:
        self._device, self._channel, self.ranks = device or get_device(), channel, ranks

    @classmethod
    def of_machine(cls, ranks: int, deadline: float) -> HostMemoryBudget:
        """The budget of each machine. Collective over the world.

        ranks: number of consecutive ranks on each machine; if it does not divide the world, each rank has its own
        budget. deadline: seconds that ranks wait for each other.
        """
        if ranks == 1 or not dist.is_initialized() or dist.get_world_size() % ranks:
            return cls()
        group, _ = dist.new_subgroups(ranks, backend="gloo")
        return cls(None, P2PChannel(dist.get_rank(), group=group, deadline=deadline), ranks)

    def reserve(self, nbytes: int, what: str, mend: str = LESS) -> None:
        """Check that there is free memory before this rank allocates `nbytes`. Collective over the machine's ranks, so
        that all read the free memory before any allocates. Raises MemoryError, on all of them, if less is free than
        they need together. what, mend: begin and end of the error."""
        total, free = nbytes, self._device.host_available()
        if self._channel is not None:
            each = self._channel.share("host memory for the offload", (nbytes, free), 2, torch.device("cpu"))
            total, free = sum(n for n, _ in each), min(f for _, f in each)
        if total > free:
            raise MemoryError(
                f"{what} needs {nbytes} more bytes of host memory on this rank, {total} on the {self.ranks} ranks of "
                f"this machine together, and {free} are free; {mend}"
            )

    def places(
        self, memories: Mapping[str, HostPieces], sizes: Mapping[str, Sequence[int]], what: str
    ) -> dict[str, list[HostCopy]]:
        """For each name, places in `memories[name]` for copies of these sizes; memory that is too small is enlarged
        first. Is collective and raises as `reserve` does."""
        lacking = {name: memories[name].lacking(each) for name, each in sizes.items()}
        self.reserve(sum(map(sum, lacking.values())), what)
        for name, pieces in lacking.items():
            memories[name].take(pieces)
        return {name: memories[name].places(each) for name, each in sizes.items()}


class HostPieces:
    """Host memory in several pieces that are used as one.

    The size of each piece is a power of two, since torch rounds every request for pinned memory up to a power of two:
    a single buffer of 65 GiB would take 128 GiB.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pieces: list[Tensor] = []

    def lacking(self, sizes: Sequence[int]) -> list[int]:
        """Sizes of the pieces to add so that copies of these sizes fit."""
        return powers_of_two(sum(map(_aligned, sizes)) - sum(piece.numel() for piece in self._pieces))

    def take(self, pieces: Sequence[int]) -> None:
        """Allocate pieces of these sizes. Raises MemoryError if one does not fit; the pieces before it are kept."""
        for nbytes in pieces:
            self._pieces.append(self._device.host_empty((nbytes,), torch.uint8))

    def places(self, sizes: Sequence[int]) -> list[HostCopy]:
        """Views of the pieces for a copy of each size, in order; a copy may be in several pieces."""
        copies = zip(accumulate(map(_aligned, sizes), initial=0), sizes, strict=False)
        pieces = list(zip(accumulate((p.numel() for p in self._pieces), initial=0), self._pieces, strict=False))
        return [
            [piece[max(at - low, 0) : at + size - low] for low, piece in pieces if low - size < at < low + len(piece)]
            for at, size in copies
        ]


class HostWeights:
    """A copy of a model's weights on the host that can be exchanged with the live ones: the frozen reference."""

    def __init__(self, host: list[HostCopy], device: Device) -> None:
        self._host, self._device = host, device

    @classmethod
    @torch.no_grad()
    def capture(
        cls, model_chunks: Sequence[Module], device: Device | None = None, budget: HostMemoryBudget | None = None
    ) -> HostWeights:
        """Copy all parameters, buffers and parameter buffers of the chunks to host memory.

        budget: of the machine; with it this is collective over the machine's ranks. Raises what its `reserve` raises.
        """
        device = device or get_device()
        keep_wide(model_chunks)
        storages = _storages(model_chunks)
        budget, sizes = budget or HostMemoryBudget(device), {"": [s.nbytes() for s in storages]}
        host = budget.places({"": HostPieces(device)}, sizes, "the host copy of the reference's weights")[""]
        for place, storage in zip(host, storages, strict=True):
            to_host(place, storage)
        device.synchronize()
        return cls(host, device)

    @contextlib.contextmanager
    def swapped_into(self, model_chunks: Sequence[Module]) -> Iterator[None]:
        """Within the context the live model has these weights; afterwards it has its own weights again, bitwise equal.

        The weights are exchanged, so that no second host copy is needed. Do not nest it, nor run the optimizer in it.
        model_chunks: those of `capture`, on the device.
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


def paired(host: HostCopy, storage: torch.UntypedStorage) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of a part of the host copy and the same part of the storage."""
    if host:
        yield from zip(host, bytes_of(storage).split([part.numel() for part in host]), strict=True)


def to_host(place: HostCopy, storage: torch.UntypedStorage) -> None:
    """Begin to copy a storage to its place on the host."""
    for mine, live in paired(place, storage):
        mine.copy_(live, non_blocking=True)


def powers_of_two(nbytes: int) -> list[int]:
    """The fewest powers of two whose sum is `nbytes`, rounded up as GRANULE says; the largest first."""
    if nbytes <= 0:
        return []
    if nbytes <= GRANULE:
        return [1 << (nbytes - 1).bit_length()]
    nbytes = -(-nbytes // GRANULE) * GRANULE
    return [1 << bit for bit in reversed(range(nbytes.bit_length())) if nbytes >> bit & 1]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _HOST_ALIGNMENT) * _HOST_ALIGNMENT
