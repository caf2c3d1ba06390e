"""The loop's dock, from Megatron's layout and the flags: who consumes what, where rows live, how much it may hold."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from mindspeed_rl_plugin.algorithms import Algorithm, resolve
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.dock import Dock, Limits, machine, make_docks, usual_medium
from mindspeed_rl_plugin.environment import launch_env
from mindspeed_rl_plugin.forward import Step
from mindspeed_rl_plugin.loop.arithmetic import Arithmetic, derive_from_args
from mindspeed_rl_plugin.loop.placement import Placement
from mindspeed_rl_plugin.loop.topology import Topology
from mindspeed_rl_plugin.stages import columns
from mindspeed_rl_plugin.stages import select as drawing


def place(topology: Topology, group: dist.ProcessGroup) -> Placement:
    """Where each rank runs and whose rows it reads. Collective over `group`."""
    places: list[Any] = [None] * topology.world
    dist.all_gather_object(places, (machine(), topology.dp_rank, topology.engine), group=group)
    machines = list(dict.fromkeys(name for name, _, _ in places))
    node = tuple(machines.index(name) for name, _, _ in places)
    return Placement(node, tuple(d for _, d, _ in places), tuple(e for _, _, e in places))


def make_homes(
    placement: Placement, prompts: int, plan: Callable[[Sequence[drawing.Group]], list[Step]]
) -> Callable[[int], np.ndarray]:
    """Groups of an epoch -> `[groups]` machine of each. prompts: groups of a rollout by these flags, which are trained
    by `plan`; an epoch of another size, of a former start, lies in proportion."""

    @functools.cache
    def homes(groups: int) -> np.ndarray:
        if groups != prompts:
            return np.sort(homes(prompts))[np.arange(groups) * prompts // groups]
        return placement.homes(plan(drawing.of_epoch(0, prompts)), prompts)

    return homes


def make_consumers(
    config: RLConfig,
    graders: int,
    topology: Topology,
    group: dist.ProcessGroup,
    algorithm: Algorithm,
    homes: Callable[[int], np.ndarray],
) -> list[Dock]:
    """One dock under three divisions of the ranks into consumers: data parallel, engines, single ranks. Collective.

    graders: number of reward columns; homes: groups of an epoch -> machine of each.
    """
    divisions = [
        (topology.dp_rank, topology.dp_size),
        (topology.engine, topology.engines),
        (topology.rank, topology.world),
    ]
    dump = config.monitor.dump_dir is not None
    medium = usual_medium(group) if config.dock.dock == "auto" else config.dock.dock
    if topology.rank == 0:
        print(f"[rl] the dock is {medium} (--rl-dock {config.dock.dock})", flush=True)
    return make_docks(
        columns.grpo_columns(graders),
        columns.grpo_states(algorithm, dump),
        divisions,
        medium=medium,
        group=group,
        deadline=config.monitor.wait_timeout,
        homes=lambda epoch, groups: homes(groups),
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
    """A dock that is too small for one rollout however well it spreads is refused before the model is built."""
    env, sizes = launch_env(), derive_from_args(args)
    machines = max(env["world_size"] // env["local_world_size"], 1) if config.dock.dock != "local" else 1
    check_round(config, graders, sizes, -(-sizes.prompts // machines))


def check_homes(config: RLConfig, graders: int, sizes: Arithmetic, homes: np.ndarray) -> None:
    """The same where the machines are known, before the engine is built. homes: of the groups of a round."""
    central = config.dock.dock == "local"
    check_round(config, graders, sizes, sizes.prompts if central else int(np.bincount(homes).max()))


def check_round(config: RLConfig, graders: int, sizes: Arithmetic, most: int) -> None:
    """Refuse a dock that may not hold a round beside what waits on the same machine. most: groups of a round on one
    machine. Raises ValueError."""
    # With dynamic sampling all but one group of a rollout may wait, drawn in rounds that put `most` on a machine each.
    dynamic = resolve(config.algorithm).dynamic_sampling
    rounds = config.algorithm.dynamic_sampling_rounds if dynamic else 0
    check_groups(config, graders, sizes.members, most + min(sizes.prompts - 1, rounds * most))


def check_groups(config: RLConfig, graders: int, members: int, groups: int) -> None:
    """Refuse a dock that does not hold so many groups on one machine. Raises ValueError."""
    declared = columns.grpo_columns(graders), columns.grpo_states(resolve(config.algorithm))
    _limits(config).check(*declared, groups, members)
