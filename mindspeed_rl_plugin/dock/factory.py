"""Which medium carries a dock."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from mindspeed_rl_plugin.dock.api import ColumnSpec, Dock, StateSpec
from mindspeed_rl_plugin.dock.distributed.client import DistributedDock
from mindspeed_rl_plugin.dock.distributed.connections import Homes
from mindspeed_rl_plugin.dock.distributed.fleet import HEARTBEAT, Limits, Member, alone, machine
from mindspeed_rl_plugin.dock.local import LocalDock
from mindspeed_rl_plugin.environment import master_address, ray_address

HEARTBEATS = 10  # of which ranks wait for each other
MEDIA = ("local", "shm", "ray")


def make_dock(
    columns: Sequence[ColumnSpec],
    states: Sequence[StateSpec],
    *,
    medium: str | None = None,
    group: dist.ProcessGroup | None = None,
    consumer: int | None = 0,
    consumers: int = 1,
    deadline: float = 600.0,
    limits: Limits | None = None,
) -> Dock:
    """A dock with these columns and states, seen by one division of the ranks (consumer None: as a stream); see
    `make_docks`."""
    division = None if consumer is None else (consumer, consumers)
    return make_docks(columns, states, [division], medium=medium, group=group, deadline=deadline, limits=limits)[0]


def make_docks(
    columns: Sequence[ColumnSpec],
    states: Sequence[StateSpec],
    divisions: Sequence[tuple[int, int] | None],
    *,
    medium: str | None = None,
    group: dist.ProcessGroup | None = None,
    deadline: float = 600.0,
    limits: Limits | None = None,
    homes: Homes | None = None,
    node: str = "",
    heartbeat: float | None = None,
) -> list[Dock]:
    """One dock, seen by several divisions of the ranks into consumers: a `Dock` for each. Collective over `group`.

    divisions: (consumer that this rank belongs to, number of consumers), such as its data parallel rank or its
    rollout engine; None where each rank takes what is ready, as from a stream. medium: "local" (everything in the first
    rank's process; plain tensors for a lone rank without limits), "shm" (a warehouse in each machine's shared memory,
    controllers spread over the ranks, sockets between machines) or "ray" (the same with the warehouse in a process that
    Ray places and restarts); None takes "local" for one rank, "ray" for several machines where RAY_ADDRESS is set,
    "shm" else. deadline: seconds that the
    ranks wait for each other; limits: of a warehouse; homes: (epoch, groups) -> `[groups]` machine of each group,
    numbered by lowest rank; node: another name for this machine, in tests; heartbeat: seconds after
    which a machine without a sign of life counts as lost until it answers again; by default a tenth of the deadline and
    30 s at least, so that one that is only busy is not given up. Raises ValueError for
    an unknown medium, for "ray" where Ray is missing or cannot be joined, and, on every rank, for a machine of several
    that has no address that the others can reach.
    """
    many = group is not None and dist.get_world_size(group) > 1
    medium = medium or usual_medium(group)
    if medium not in MEDIA:
        raise ValueError(f"dock medium {medium!r} is unknown; known: {', '.join(MEDIA)}")
    if not many and medium == "local" and not (limits and limits.bounded):
        return [LocalDock(columns, states, limits.version_column if limits else None)] * len(divisions)
    return _distributed(columns, states, divisions, group, deadline, limits, homes, medium, node, heartbeat)


def _distributed(
    columns: Sequence[ColumnSpec],
    states: Sequence[StateSpec],
    divisions: Sequence[tuple[int, int] | None],
    group: dist.ProcessGroup | None,
    deadline: float,
    limits: Limits | None,
    homes: Homes | None,
    medium: str,
    node: str,
    heartbeat: float | None,
) -> list[Dock]:
    central = medium == "local"
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def exchange(value: Any) -> list[Any]:
        if world == 1:
            return alone(value)
        found: list[Any] = [None] * world
        dist.all_gather_object(found, value, group=group)
        return found

    host = _own_address()
    if not node:
        _check_addresses(exchange([machine(), host]))
    member = Member(
        columns,
        states,
        rank=rank,
        world=world,
        exchange=exchange,
        node=node,
        host=host,
        limits=limits,
        homes=None if central else homes,
        central=central,
        ray=medium == "ray",
        patience=deadline,
        heartbeat=max(HEARTBEAT, deadline / HEARTBEATS) if heartbeat is None else heartbeat,
    )
    docks: list[Dock] = []
    everybody = exchange([None if d is None else list(d) for d in divisions])
    for number, division in enumerate(divisions):
        consumer, consumers = division or (None, 1)
        same = [r for r, theirs in enumerate(everybody) if division is not None and theirs[number] == list(division)]
        peers = same or [rank]
        docks.append(
            DistributedDock(
                columns,
                states,
                member.connections,
                consumer=consumer,
                consumers=consumers,
                peer=peers.index(rank),
                peers=len(peers),
                division=number,
                leader=rank == 0,
                deadline=deadline,
            )
        )
    return docks


def usual_medium(group: dist.ProcessGroup | None) -> str:
    """What suits a job: "local" for one rank; Ray only where the user runs it and there is more than one machine, "shm"
    else. Collective."""
    if group is None or dist.get_world_size(group) == 1:
        return "local"
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (machine(), ray_address()), group=group)
    return "ray" if found[0][1] and len({name for name, _ in found}) > 1 else "shm"


def _own_address() -> str:
    """This machine's address on the job's interface: the one from which it reaches the job's master."""
    host, port = master_address()
    if not host:
        return ""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # chooses the route, sends nothing
        return probe.getsockname()[0]


def _check_addresses(places: Sequence[tuple[str, str]]) -> None:
    """Raise ValueError where the ranks of several machines, by (machine, own address), cannot reach each other."""
    if len({name for name, _ in places}) == 1:
        return
    named = master_address()[0]
    for rank, (name, host) in enumerate(places):
        if not host:
            raise ValueError(
                f"rank {rank} on {name} has no MASTER_ADDR: the dock of several machines takes the interface of the "
                "job from it; give the network address of the first machine"
            )
        if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            raise ValueError(
                f"MASTER_ADDR {named} resolves to {host} on {name} (rank {rank}), where no other machine reaches it; "
                "give the network address of the first machine, or correct /etc/hosts there"
            )
