"""The loop's dock, from Megatron's layout and the flags: who consumes what, where rows live, how much it may hold."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.distributed as dist

from mindspeed_rl_plugin import columns
from mindspeed_rl_plugin.algorithms import Algorithm, resolve
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.dock import Dock, Limits, machine, make_docks
from mindspeed_rl_plugin.environment import launch_env
from mindspeed_rl_plugin.placement import Placement
from mindspeed_rl_plugin.startup.arithmetic import derive_from_args
from mindspeed_rl_plugin.startup.topology import Topology


def place(topology: Topology, group: dist.ProcessGroup) -> Placement:
    """Where each rank runs and whose rows it reads. Collective over `group`."""
    places: list[Any] = [None] * topology.world
    dist.all_gather_object(places, (machine(), topology.dp_rank, topology.engine), group=group)
    machines = list(dict.fromkeys(name for name, _, _ in places))
    node = tuple(machines.index(name) for name, _, _ in places)
    return Placement(node, tuple(d for _, d, _ in places), tuple(e for _, _, e in places))


def make_consumers(
    config: RLConfig,
    graders: int,
    topology: Topology,
    group: dist.ProcessGroup,
    algorithm: Algorithm,
    homes: Callable[[int], np.ndarray],
) -> list[Dock]:
    """One dock under three divisions of the ranks into consumers: data parallel, engines, single ranks. Collective.

    graders: number of reward columns; homes: machine of each group of an epoch.
    """
    divisions = [
        (topology.dp_rank, topology.dp_size),
        (topology.engine, topology.engines),
        (topology.rank, topology.world),
    ]
    dump = config.monitor.dump_dir is not None
    return make_docks(
        columns.grpo_columns(graders),
        columns.grpo_states(algorithm, dump),
        divisions,
        medium=None if config.dock.dock == "auto" else config.dock.dock,
        group=group,
        deadline=config.monitor.wait_timeout,
        homes=lambda epoch, groups: homes(epoch),
        limits=_limits(config),
    )


def _limits(config: RLConfig) -> Limits:
    return Limits(
        capacity=int(config.dock.dock_gb * 2**30) or None,
        rows=config.dock.dock_rows or None,
        max_tokens=config.data.max_prompt_length + config.rollout.max_response_length,
        version_column="version",
    )


def check_dock(args: argparse.Namespace, config: RLConfig, graders: int) -> None:
    """A dock that is too small for one rollout is refused before the model is built."""
    env, sizes = launch_env(), derive_from_args(args)
    machines = max(env["world_size"] // env["local_world_size"], 1) if config.dock.dock != "local" else 1
    algorithm = resolve(config.algorithm)
    declared = columns.grpo_columns(graders), columns.grpo_states(algorithm)
    # Dynamic sampling draws a whole round beside groups that wait, all but one of a rollout at most.
    groups = sizes.prompts * (2 if algorithm.dynamic_sampling else 1)
    _limits(config).check(*declared, -(-groups // machines), sizes.members)
