"""Makes the loop's dock from Megatron's layout and the flags: consumers, machines of the rows, and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.dock import Dock, DockLimits, make_docks
from mindspeed_rl_plugin.environment import launch_env
from mindspeed_rl_plugin.loop.arithmetic import Arithmetic
from mindspeed_rl_plugin.loop.placement import Placement
from mindspeed_rl_plugin.loop.rollout_plan import RolloutPlan
from mindspeed_rl_plugin.loop.topology import Topology
from mindspeed_rl_plugin.processes import machine
from mindspeed_rl_plugin.stages.stage import StageSpec, columns_of, states_of
from mindspeed_rl_plugin.status.status_file import also


def place(topology: Topology, group: dist.ProcessGroup) -> Placement:
    """Machine, data parallel rank and engine of each rank. Collective over `group`."""
    places: list[Any] = [None] * topology.world
    dist.all_gather_object(places, (machine(), topology.dp_rank, topology.engine), group=group)
    machines = list(dict.fromkeys(name for name, _, _ in places))
    node = tuple(machines.index(name) for name, _, _ in places)
    return Placement(node, tuple(d for _, d, _ in places), tuple(e for _, _, e in places))


@dataclass(frozen=True)
class Docks:
    """One dock with views for three kinds of consumers: data parallel ranks, rollout engines, single ranks."""

    trainers: Dock
    engines: Dock
    ranks: Dock

    def of(self, resource: str) -> Dock:
        """The view for a stage that uses `resource`. The ranks of a trainer or of an engine share leases."""
        return {"trainer": self.trainers, "engine": self.engines}.get(resource, self.ranks)

    @classmethod
    def make(
        cls,
        table: Sequence[StageSpec],
        config: RLConfig,
        topology: Topology,
        group: dist.ProcessGroup,
        plan: RolloutPlan,
    ) -> Docks:
        """Make the dock, with columns and worker states of the stage table. Collective over `group`."""
        divisions = [
            (topology.dp_rank, topology.dp_size),
            (topology.engine, topology.engines),
            (topology.rank, topology.world),
        ]
        docks = make_docks(
            columns_of(table),
            states_of(table),
            divisions,
            group=group,
            deadline=config.monitor.wait_timeout,
            owners=lambda epoch, groups: plan.owners_of_round(groups),
            limits=limits(config),
        )
        also("groups", partial(docks[0].member.core.open_groups, ("generate", "reward")))
        return cls(*docks)


def limits(config: RLConfig) -> DockLimits:
    """Limits of the part of the dock on each machine."""
    return DockLimits(
        capacity=int(config.dock.dock_gb * 2**30) or None,
        rows=config.dock.dock_rows or None,
        max_tokens=config.most_paths * (config.data.max_prompt_length + config.rollout.max_response_length),
    )


class DockSize:
    """Refuses a dock that is too small, before a stage would wait for space in it. rounds: most rounds of dynamic
    sampling, 0 without it; ahead: (number of rollouts sampled ahead, number of groups of an evaluation)."""

    def __init__(
        self,
        config: RLConfig,
        table: Sequence[StageSpec],
        sizes: Arithmetic,
        rounds: int,
        ahead: tuple[int, int] = (0, 0),
    ) -> None:
        self.sizes, self.rounds, self.ahead = sizes, rounds, ahead
        self._fits = partial(limits(config).check, columns_of(table), states_of(table), members=sizes.members)

    def check_early(self) -> None:
        """Check before the model is built. Raises ValueError if the dock is too small even for a rollout that is spread
        evenly over the machines."""
        env = launch_env()
        machines = max(env["world_size"] // env["local_world_size"], 1)
        self._check_round(-(-self.sizes.prompts // machines))

    def check_placed(self, owners: np.ndarray) -> None:
        """Once the machines are known, check before the engine is built. owners: machine of each group of a round."""
        self._check_round(int(np.bincount(owners).max()))

    def check_resumed(self, used: np.ndarray, deferred: np.ndarray, owners: np.ndarray) -> None:
        """Check that each machine can hold its groups of the checkpoint, and that a machine could hold the most
        deferred groups of any machine plus the most groups of a round on any machine. used, deferred, owners: machine
        of each group in use, each deferred group, each group of a round."""
        machines = 1 + max((int(part.max()) for part in (used, deferred, owners) if len(part)), default=0)
        used, deferred, round_ = (np.bincount(part, minlength=machines) for part in (used, deferred, owners))
        self._fits(groups=int(max((used + deferred).max(), deferred.max() + round_.max())))

    def _check_round(self, most: int) -> None:
        """most: groups of a round on one machine. With dynamic sampling the machine may also hold groups of earlier
        rounds: at most `most` of each round, and fewer in all than a rollout has."""
        rollouts, groups = self.ahead
        self._fits(groups=most * (1 + rollouts) + groups + min(self.sizes.prompts - 1, self.rounds * most))
