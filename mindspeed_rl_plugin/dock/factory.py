"""Docks of a job: a warehouse a machine, a controller a worker state, and a view for each division of the ranks."""

from __future__ import annotations

import atexit
import ipaddress
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from mindspeed_rl_plugin.dock.api import ColumnSpec, Declared, StateSpec
from mindspeed_rl_plugin.dock.calls import Calls, Directory, Owners, contiguous_owners
from mindspeed_rl_plugin.dock.client import Dock
from mindspeed_rl_plugin.dock.controller import Controller
from mindspeed_rl_plugin.dock.core import Core
from mindspeed_rl_plugin.dock.limits import Limits
from mindspeed_rl_plugin.dock.messages import Address
from mindspeed_rl_plugin.dock.outside import describe, write_secret
from mindspeed_rl_plugin.dock.peers import make_peers
from mindspeed_rl_plugin.dock.server import Server
from mindspeed_rl_plugin.dock.storage import Warehouse
from mindspeed_rl_plugin.dock.watch import Watch
from mindspeed_rl_plugin.environment import master_address

HEARTBEATS = 10  # of which ranks wait for each other
HEARTBEAT = 30.0  # seconds, at least: one that is only busy is not given up
ANSWER = 120.0  # seconds; nothing that need not wait takes so long, on the busiest machine

Exchange = Callable[[Any], list[Any]]  # every rank's value, in rank order


def make_dock(
    columns: Sequence[ColumnSpec],
    states: Sequence[StateSpec],
    division: tuple[int, int] | None = None,
    **more: Any,
) -> Dock:
    """A dock with these columns and states, seen by one division of the ranks; see `make_docks`."""
    return make_docks(columns, states, [division], **more)[0]


def make_docks(
    columns: Sequence[ColumnSpec],
    states: Sequence[StateSpec],
    divisions: Sequence[tuple[int, int] | None],
    *,
    group: dist.ProcessGroup | None = None,
    deadline: float = 600.0,
    limits: Limits | None = None,
    homes: Owners | None = None,
    node: str = "",
    heartbeat: float | None = None,
) -> list[Dock]:
    """One dock, seen by several divisions of the ranks into consumers: a `Dock` for each. Collective over `group`.

    divisions: (consumer that this rank belongs to, number of consumers), such as its data parallel rank or its
    rollout engine; the ranks of one consumer make equal calls and get equal rows. None: each rank is one. group: all
    ranks, with host memory (gloo); None for a job of one process. deadline: seconds that the ranks wait for each
    other; limits: of a warehouse; homes: (epoch, groups) -> `[groups]` machine of each group, numbered by lowest rank;
    node: another name for this machine, in tests; heartbeat: seconds without a sign of life after which a rank counts
    as gone and the job ends; by default a tenth of the deadline, 30 s at least. Raises ValueError, on every rank, for
    a machine of several that has no address that the others can reach.
    """
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def exchange(value: Any) -> list[Any]:
        if world == 1:
            return [value]
        found: list[Any] = [None] * world
        dist.all_gather_object(found, value, group=group)
        return found

    host = own_address()
    if not node:
        check_addresses(exchange((machine(), host)))
    member = Member(
        columns,
        states,
        rank=rank,
        world=world,
        exchange=exchange,
        node=node,
        host=host,
        limits=limits,
        owners=homes,
        patience=deadline,
        heartbeat=max(HEARTBEAT, deadline / HEARTBEATS) if heartbeat is None else heartbeat,
    )
    everybody = exchange([None if d is None else tuple(d) for d in divisions])
    docks = []
    for number in range(len(divisions)):
        peers = make_peers(group, [theirs[number] for theirs in everybody], rank, deadline)
        docks.append(member.dock(peers=peers, deadline=deadline))
    return docks


class Member:
    """One process of a dock: what it serves, and its calls to the others.

    rank, world: of the job; exchange: all-gather of a small value over the job; node: this machine; host: address on
    the job's interface, "" where all ranks share one machine. The lowest rank of each machine holds its warehouse; the
    controllers are spread over the ranks. end: ends this process, called where a rank is gone.
    """

    def __init__(
        self,
        columns: Sequence[ColumnSpec],
        states: Sequence[StateSpec],
        *,
        rank: int = 0,
        world: int = 1,
        exchange: Exchange = lambda value: [value],
        node: str = "",
        host: str = "",
        limits: Limits | None = None,
        owners: Owners | None = None,
        patience: float = 60.0,
        heartbeat: float = HEARTBEAT,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.declared, self._exchange, self._rank = Declared(columns, states), exchange, rank
        node = node or machine()
        nodes = exchange(node)
        self._machines = list(dict.fromkeys(nodes))  # by their lowest rank
        secret = bytes.fromhex(exchange(secrets.token_hex(32) if rank == 0 else "")[0])
        given = owners if len(self._machines) > 1 else None
        self._owners = given or contiguous_owners(len(self._machines))
        self._held_by = {s.name: controller_rank(i, len(states), world) for i, s in enumerate(states)}
        self._leads = [nodes.index(name) for name in self._machines]
        self._watch = Watch(rank, nodes, heartbeat, end) if world > 1 else None
        self.core = self._core(limits or Limits())
        self.server = Server(self.core, node, secret, self._watch, rank)
        self.directory = Directory([], {})
        bound = host if len(self._machines) > 1 else ""
        self._meet(exchange(self.server.start(bound) if world > 1 else Address(node, "", rank=rank)))
        self.core.describe = lambda: describe(self.declared, self.directory)
        if world > 1:
            self._link(nodes)
            exchange(None)  # nobody asks before everybody answers
        self.calls = Calls(
            self.directory,
            name=f"rank {rank}",
            rank=rank,
            node=node,
            secret=secret,
            server=self.server,
            warehouse=self._machines.index(node),
            owners=self._owners,
            patience=min(patience, ANSWER),
            lost=self._lost,
        )
        self._secret, self._closed = secret, False
        atexit.register(self.close)  # in order, or the others would stop for this rank

    def dock(self, **more: Any) -> Dock:
        """A view of the dock."""
        hooks = {"barrier": lambda: self._exchange(None), "invite": self.invite, "on_close": self.close}
        return Dock(self.declared, self.calls, leader=self._rank == 0, **hooks, **more)

    def invite(self, secret_file: str | os.PathLike[str], host: str = "") -> str:
        """See `Dock.invite`."""
        self._meet(self._exchange(self.server.start(host)))
        if self._rank == 0:
            write_secret(secret_file, self._secret)
        self._exchange(None)
        first = self.directory.warehouses[0]
        return f"{first.host}:{first.port}" if first.port else f"unix:{first.unix}"

    def close(self) -> None:
        """Leave the dock. Idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self.calls.close()
        self.server.close()
        if self.core.warehouse is not None:
            self.core.warehouse.slabs.close()

    def _core(self, limits: Limits) -> Core:
        columns, states = self.declared.columns, self.declared.states
        house = None
        if self._rank in self._leads:
            house = Warehouse(self._leads.index(self._rank), self.declared, limits)
        here = [states[name] for name, rank in self._held_by.items() if rank == self._rank]
        return Core(house, {spec.name: Controller(spec, columns, states) for spec in here})

    def _meet(self, addresses: Sequence[Address]) -> None:
        """Learn where every rank answers."""
        self._addresses = addresses = [Address(*address) for address in addresses]
        self.directory.warehouses[:] = [addresses[rank] for rank in self._leads]
        self.directory.controllers.update({name: addresses[rank] for name, rank in self._held_by.items()})

    def _link(self, nodes: Sequence[str]) -> None:
        """To the lowest rank of this machine, or to rank 0; from a warehouse to all controllers."""
        links = {}
        if self._rank:
            lead = nodes.index(nodes[self._rank])
            first = self._addresses[0 if lead == self._rank else lead]
            links[first.rank] = self.server.link(first)
        if self.core.warehouse is None:
            return
        told = sorted(set(self._held_by.values()) - {self._rank})
        for rank in told:
            links[rank] = links.get(rank) or self.server.link(self._addresses[rank])
        self.core.tell = lambda record: self.server.tell([links[rank] for rank in told], record)

    def _lost(self, address: Address, why: str) -> None:
        if self._watch is not None and not self._closed:
            self._watch.stop(address.rank, why)


def controller_rank(index: int, controllers: int, world: int) -> int:
    """Rank that holds the controller of state `index`: where there are enough ranks one of its own for each state,
    spread evenly; else as many for each rank, to one, from the second on: the first, which holds a warehouse
    already, has no more than any other."""
    return (index * world // controllers if world >= controllers else index + 1) % world


def machine() -> str:
    """Name of what shares memory through one /proc: containers of one machine may differ, agents do not."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    spaces = ":".join(str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("pid", "net"))
    return f"{socket.gethostname()} {boot[:8]} {spaces}"


def own_address() -> str:
    """This machine's address on the job's interface: the one from which it reaches the job's master."""
    host, port = master_address()
    if not host:
        return ""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # chooses the route, sends nothing
        return probe.getsockname()[0]


def check_addresses(places: Sequence[tuple[str, str]]) -> None:
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
