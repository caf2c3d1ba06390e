"""The ranks of one engine: the first decides, the others do the same."""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property

import torch.distributed as dist

from mindspeed_rl_plugin.dock.joining import machine
from mindspeed_rl_plugin.dock.peers import GroupPeers, Peers, make_peers
from mindspeed_rl_plugin.engine.protocol import Engine


class Team(GroupPeers):
    """The ranks of the default group, which are those of one engine, or of engines that share experts.

    Its collectives run over gloo. Making it is one. deadline: seconds of any wait, the job's.
    """

    def __init__(self, deadline: float) -> None:
        super().__init__(dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline)))

    @cached_property
    def here(self) -> list[int]:
        """The ranks on this machine. Collective, the first time."""
        machines = self.gather(machine())
        return [rank for rank, name in enumerate(machines) if name == machines[self.rank]]

    def of_replica(self, engine: Engine, deadline: float) -> Peers:
        """The ranks of one of the engines that share experts. Collective. deadline: seconds of a wait."""
        return self if engine.replicas == 1 else make_peers(self, (engine.replica,), self._group, deadline)

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self.rank == 0
