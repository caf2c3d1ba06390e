"""The ranks of one engine: the first decides, the others do the same."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch.distributed as dist

from mindspeed_rl_plugin.dock.joining import machine


class Team:
    """The ranks of the default group, which are those of one engine, or of engines that share experts.

    Its collectives run over gloo and end by the group's timeout.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = (
            dist.group.WORLD if dist.get_backend() == "gloo" or self.size == 1 else dist.new_group(backend="gloo")
        )

    @cached_property
    def here(self) -> list[int]:
        """The ranks on this machine. Collective, the first time."""
        machines = self.gather(machine())
        return [rank for rank, name in enumerate(machines) if name == machines[self.rank]]

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """The first rank's value, on all."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on all."""
        if self.size == 1:
            return [value]
        box = [None] * self.size
        dist.all_gather_object(box, value, group=self._group)
        return box
