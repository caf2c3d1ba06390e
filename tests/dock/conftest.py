"""Docks on every medium, made inside one process: members of a distributed dock are threads here."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mindspeed_rl_plugin.dock import DistributedDock, LocalDock
from mindspeed_rl_plugin.dock.distributed.fleet import Limits, Member, alone

MEDIA = ("local", "shm", "sockets")


class Exchange:
    """All-gather between threads."""

    def __init__(self, world: int) -> None:
        self.world, self.values, self.barrier = world, [None] * world, threading.Barrier(world)

    def of(self, rank: int) -> Callable:
        def exchange(value: object) -> list:
            self.values[rank] = value
            self.barrier.wait(20)
            found = list(self.values)
            self.barrier.wait(20)
            return found

        return exchange


def members(columns, states, nodes: Sequence[str], **more) -> list[Member]:
    """One member for each rank; `nodes`: machine of each."""
    if len(nodes) == 1:
        return [Member(columns, states, rank=0, world=1, exchange=alone, node=nodes[0], patience=10, **more)]
    exchange = Exchange(len(nodes))

    def join(rank: int) -> Member:
        return Member(
            columns,
            states,
            rank=rank,
            world=len(nodes),
            exchange=exchange.of(rank),
            node=nodes[rank],
            host="127.0.0.1",
            patience=10,
            **more,
        )

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(join, range(len(nodes))))


class Maker:
    """Makes docks of one medium and ends them. sockets: two warehouses, seen from a third node that has none."""

    def __init__(self, medium: str) -> None:
        self.medium, self.members = medium, []

    def __call__(self, columns, states, *, deadline: float = 5.0, limits: Limits | None = None, **more):
        if self.medium == "local":
            return LocalDock(columns, states)
        nodes = ["one node"] if self.medium == "shm" else ["first", "second"]
        made = members(columns, states, nodes, limits=limits)
        self.members += made
        net = made[-1].connections
        net.meet = lambda: None
        if self.medium == "sockets":
            net.settings.node, net.settings.warehouse, net.segments = "third", None, None
        return DistributedDock(columns, states, net, deadline=deadline, **more)

    def bytes_held(self, dock) -> int:
        """Bytes of all cells."""
        if self.medium == "local":
            return dock.nbytes
        return sum(m.host.warehouse.used for m in self.members if m.host.warehouse is not None)

    def end(self) -> None:
        for member in self.members:
            member.connections.close()
        self.members = []


@pytest.fixture(params=MEDIA)
def maker(request: pytest.FixtureRequest) -> Iterator[Maker]:
    """Of every medium in turn."""
    made = Maker(request.param)
    yield made
    made.end()


@pytest.fixture(name="members")
def members_fixture() -> Iterator[Callable[..., list[Member]]]:
    """`members(columns, states, nodes)`, closed at the end."""
    made: list[Member] = []

    def make(*args, **more) -> list[Member]:
        found = members(*args, **more)
        made.extend(found)
        return found

    yield make
    for member in made:
        member.connections.close()


def all_in(warehouse: int):
    """Homes: every group in one warehouse."""
    return lambda epoch, groups: np.full(groups, warehouse)
