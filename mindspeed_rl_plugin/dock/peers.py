"""The ranks of a consumer, which get equal rows: the first rank leases the rows, and acknowledges them when all ranks
have written."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class Peers:
    """The ranks of one consumer, which make the same calls in the same order. This class: a consumer of one rank.
    rank: of this process among them; size: their number."""

    rank, size = 0, 1

    def share(self, value: Any) -> Any:
        """The value of the first rank."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        return [value]


class GroupPeers(Peers):
    """Several ranks, which share values through a process group of torch with host memory (gloo)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def share(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, dist.get_global_rank(self._group, 0), self._group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, self._group)
        return values


def make_peers(job: Peers, division: Any, group: dist.ProcessGroup | None, seconds: float) -> Peers:
    """The consumer of this rank: the ranks of `job` with an equal `division` (a tuple that names the consumer); None:
    only this rank. Collective over `group`, the job's group. seconds: the longest wait of a lease."""
    every: Sequence[Any] = job.gather(None if division is None else tuple(division))
    limit, mine = timedelta(seconds=2 * seconds + 60), Peers()
    # Every rank makes every group, since torch numbers the groups and the numbers must be equal on all ranks.
    for one in dict.fromkeys(d for d in every if d is not None):
        same = [r for r, theirs in enumerate(every) if theirs == one]
        if len(same) > 1:
            made = dist.new_group([dist.get_global_rank(group, r) for r in same], timeout=limit, backend="gloo")
            mine = GroupPeers(made) if job.rank in same else mine
    return mine
