"""Makes the dock of a job: one warehouse per machine, one controller per worker state, and a view for each division of
the ranks into consumers."""

from __future__ import annotations

import atexit
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

from mindspeed_rl_plugin.dock.api import ColumnSpec, Declared, StateSpec
from mindspeed_rl_plugin.dock.calls import Calls, Owners
from mindspeed_rl_plugin.dock.controller import Controller
from mindspeed_rl_plugin.dock.core import Core
from mindspeed_rl_plugin.dock.dock import Dock
from mindspeed_rl_plugin.dock.machines import check_addresses, own_address
from mindspeed_rl_plugin.dock.memory import DockLimits
from mindspeed_rl_plugin.dock.messages import Address, Bye, Directory, Message, Record, Stopped
from mindspeed_rl_plugin.dock.peers import GroupPeers, Peers, make_peers
from mindspeed_rl_plugin.dock.rpc import Process
from mindspeed_rl_plugin.dock.server import DockServer
from mindspeed_rl_plugin.dock.storage import Warehouse
from mindspeed_rl_plugin.dock.watch import HEARTBEAT, Watch, heartbeat_of
from mindspeed_rl_plugin.processes import machine

SECRET_BYTES = 32


def make_docks(
    columns: Sequence[ColumnSpec],
    states: Sequence[StateSpec],
    divisions: Sequence[tuple[int, int] | None],
    *,
    group: dist.ProcessGroup | None = None,
    deadline: float = 600.0,
    limits: DockLimits | None = None,
    owners: Owners | None = None,
) -> list[Dock]:
    """Make one dock, and return a view of it (`Dock`) for each division of the ranks. Collective over `group`.

    divisions: (consumer of this rank, number of consumers), for example (data parallel rank, size); the ranks of one
    consumer make equal calls and get equal rows. None: each rank is a consumer.
    group: all ranks, with host memory (gloo); None for a job of one process.
    deadline: seconds that the ranks wait for each other. If a rank sends nothing for a tenth of this time (at least
    30 s), it counts as lost and the job ends.
    owners: (epoch, groups) -> `[groups]` machine of each group; machines are numbered in order of their lowest ranks.
    Raises ValueError, on every rank, if one of several machines has no address that the others can reach.
    """
    job, host = Peers() if group is None else GroupPeers(group), own_address()
    check_addresses(job.gather((machine(), host)))
    how = {"limits": limits, "owners": owners, "heartbeat": heartbeat_of(deadline)}
    member = Member(columns, states, job, host=host, **how)
    every = [make_peers(job, division, group, deadline) for division in divisions]
    return [member.dock(peers=peers, deadline=deadline) for peers in every]


class Member:
    """One process of a dock: the part that it serves, and its calls to other processes.

    peers: the ranks of the job; node: name of this machine; host: its address on the job's network, used if there are
    several machines; end: ends this process, called when a rank is lost. The lowest rank of each machine holds its
    warehouse; the controllers are spread over the ranks.
    """

    def __init__(
        self,
        columns: Sequence[ColumnSpec],
        states: Sequence[StateSpec],
        peers: Peers | None = None,
        *,
        node: str = "",
        host: str = "",
        limits: DockLimits | None = None,
        owners: Owners | None = None,
        heartbeat: float = HEARTBEAT,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.declared, self.peers = Declared(columns, states), peers or Peers()
        gather, rank, many = self.peers.gather, self.peers.rank, self.peers.size > 1
        nodes = gather(node or machine())
        machines = list(dict.fromkeys(nodes))  # in the order of their lowest ranks
        secret = bytes.fromhex(gather(secrets.token_hex(SECRET_BYTES))[0])
        self.me = Process(f"rank {rank}", rank, nodes[rank], secret)
        self._leads = [nodes.index(name) for name in machines]
        self._held_by = {s.name: controller_rank(i, len(states), len(nodes)) for i, s in enumerate(states)}
        self.watch = Watch(rank, heartbeat, end)
        self.core = self._core(limits or DockLimits())
        self.server = DockServer(self.core, self.me, self.watch)
        self.directory = self.core.directory = Directory(list(columns), list(states), [], {}, [])
        here = self.server.start(host if len(machines) > 1 else "") if many else Address(nodes[rank], "", rank=rank)
        self._publish(here)
        if many:
            self._link(nodes)
            gather(None)  # no rank asks before all ranks can answer
        self.calls = Calls(
            self.directory,
            self.me,
            core=self.core,
            warehouse=machines.index(nodes[rank]),
            owners=owners if owners and len(machines) > 1 else partial(contiguous, len(machines)),
            lost=self._lost,
        )
        self._closed = False
        atexit.register(self._end)

    def dock(self, **more: Any) -> Dock:
        return Dock(self.declared, self.calls, member=self, leader=self.peers.rank == 0, **more)

    def listen(self, host: str, about: str) -> str:
        """Start to serve processes outside of the job; those on other machines connect to `host`. Returns the address
        for their first request. Collective. about: see `Directory`."""
        self.directory.about = about
        self._publish(self.server.start(host))
        first = self.directory.warehouses[0]
        return f"{first.host}:{first.port}" if first.port else f"unix:{first.unix}"

    def close(self) -> None:
        """Leave the dock. Idempotent."""
        self._close(Bye())

    def _end(self) -> None:
        """At the end of the interpreter: send `Bye` or, after an error, `Stopped`, which makes the other ranks stop. An
        interrupted rank sends `Bye`, since each rank gets the signal and prints its own line."""
        failed = isinstance(getattr(sys, "last_value", None), Exception)
        self._close(Stopped(self.me.rank, "ended by an error", self.me.node) if failed else Bye())

    def _close(self, last: Message) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._end)
        self.calls.close()
        self.server.close(last)
        self.core.close()

    def _core(self, limits: DockLimits) -> Core:
        columns, states, rank = self.declared.columns, self.declared.states, self.peers.rank
        house = Warehouse(self._leads.index(rank), self.declared, limits) if rank in self._leads else None
        here = [name for name, holder in self._held_by.items() if holder == rank]
        return Core(house, {name: Controller(states[name], columns, states) for name in here})

    def _publish(self, address: Address) -> None:
        """Tell all ranks the addresses of all ranks."""
        self._addresses = [Address(*address) for address in self.peers.gather(address)]
        self.directory.ranks[:] = self._addresses
        self.directory.warehouses[:] = [self._addresses[rank] for rank in self._leads]
        self.directory.controllers.update({name: self._addresses[rank] for name, rank in self._held_by.items()})

    def _link(self, nodes: Sequence[str]) -> None:
        """Link this rank to the lowest rank of its machine or, if it is this lowest rank, to rank 0. Link a rank with a
        warehouse to all ranks with controllers."""
        links, rank = {}, self.peers.rank
        if rank:
            lead = nodes.index(nodes[rank])
            first = self._addresses[0 if lead == rank else lead]
            links[first.rank] = self.server.link(first)
        if self.core.warehouse is None:
            return
        others = sorted(set(self._held_by.values()) - {rank})
        for other in others:
            links[other] = links.get(other) or self.server.link(self._addresses[other])

        def tell(record: Record) -> None:  # under the core's lock, so in order
            for other in others:
                links[other].note(record)

        self.core.tell = tell

    def _lost(self, address: Address, why: str) -> None:
        if not self._closed:
            self.watch.stop(address.rank, why, address.node)


def contiguous(machines: int, epoch: int, groups: int) -> np.ndarray:
    """The default `owners`: with S machines, group g of G is in warehouse g * S // G."""
    return np.arange(groups) * machines // groups


def controller_rank(index: int, controllers: int, world: int) -> int:
    """Rank that holds the controller of state `index`. If there are enough ranks, each state has a different rank,
    spread evenly. Else the states go in turn to ranks 1, 2, ..., 0, 1, ...: rank 0, which has a warehouse, is last."""
    return (index * world // controllers if world >= controllers else index + 1) % world
