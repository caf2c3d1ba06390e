"""Engines that share experts run their steps together, since an expert layer sends tokens to all their ranks."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

# Steps from one agreement of the ranks to the next: an agreement is a collective, too expensive for every step. So when
# all engines have finished, each of them runs dummy steps until the next agreement.
AGREE_EVERY = 16


class ExpertGroup:
    """The consecutive ranks over which the experts of this rank's engine are spread.

    size: number of ranks; deadline: seconds that a rank waits for the others at an agreement. The constructor is
    collective over the world; `size` must divide the number of its ranks.
    """

    def __init__(self, size: int, deadline: float) -> None:
        self.deadline, self._steps = deadline, 0
        limit, rank = datetime.timedelta(seconds=deadline), dist.get_rank()
        groups = [range(first, first + size) for first in range(0, dist.get_world_size(), size)]
        handles = [dist.new_group(ranks, timeout=limit, backend="gloo") for ranks in groups]
        self.ranks, self._handle = groups[rank // size], handles[rank // size]

    def any_works(self, works: bool) -> bool:
        """Whether an engine of the group had unfinished responses at the last agreement, which may be in this call.

        Every rank calls this before every step. works: whether this engine has unfinished responses. If it is true on
        any rank at an agreement, all engines run AGREE_EVERY steps. Raises TimeoutError if a rank is late or lost.
        """
        agreed = self._steps % AGREE_EVERY != 0 or self._agree(works)
        self._steps = self._steps + 1 if agreed else 0
        return agreed

    def _agree(self, works: bool) -> bool:
        flag = torch.tensor([works], dtype=torch.int64)
        try:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._handle)
        except RuntimeError as error:
            raise TimeoutError(
                f"rank {dist.get_rank()} waited at step {self._steps + 1} of the engines for ranks {self.ranks[0]} to"
                f" {self.ranks[-1]}, over which --rl-generate-ep spreads the experts. The limit is {self.deadline:g} s"
                " (--rl-wait-timeout). One of these ranks is lost, or did not start this step:"
                f" {str(error).splitlines()[0][:300]}"
            ) from error
        return bool(flag)
