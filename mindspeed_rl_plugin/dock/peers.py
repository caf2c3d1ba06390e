"""The ranks of one consumer: its first rank leases and shares the grant, and acknowledges when all have written."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Peers:
    """Those of a consumer of one rank. rank, size: of this process among the ranks of its consumer, which make the same
    calls in the same order."""

    rank, size = 0, 1

    def share(self, data: bytes) -> bytes:
        """What the first rank gives."""
        return data

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gives, by rank."""
        return [data]


class GroupPeers(Peers):
    """Over a process group of torch with host memory (gloo)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._first = dist.get_global_rank(group, 0)

    def share(self, data: bytes) -> bytes:
        """Two broadcasts: the size, then the bytes."""
        size = torch.tensor([len(data)])
        dist.broadcast(size, self._first, group=self._group)
        out = torch.empty(int(size), dtype=torch.uint8) if self.rank else _tensor(data)
        dist.broadcast(out, self._first, group=self._group)
        return out.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Two all-gathers: the sizes, then the bytes, padded to the longest."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        longest = max(int(size) for size in sizes)
        mine = _tensor(data.ljust(longest, b"\0"))
        out = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(out, mine, group=self._group)
        return [part.numpy().tobytes()[: int(size)] for part, size in zip(out, sizes, strict=True)]


def make_peers(group: dist.ProcessGroup | None, divisions: list[Any], rank: int, seconds: float) -> Peers:
    """Those of `divisions`, one a rank, that are equal to this rank's make one consumer; None is a consumer of its own.
    Collective over `group`. seconds: the longest wait of a lease."""
    limit, mine = timedelta(seconds=2 * seconds + 60), None
    # Every rank makes every group: torch names one that its members make alone by how many groups each of them has.
    for division in dict.fromkeys(d for d in divisions if d is not None):
        same = [r for r, theirs in enumerate(divisions) if theirs == division]
        if len(same) > 1:
            ranks = [dist.get_global_rank(group, r) for r in same]
            made = dist.new_group(ranks, timeout=limit, backend="gloo")
            mine = made if rank in same else mine
    return Peers() if mine is None else GroupPeers(mine)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
