"""Start what a process runs of a dock, and find the rest of it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_rl_plugin.dock.api import ColumnSpec, StateSpec
from mindspeed_rl_plugin.dock.distributed.arena import Arena
from mindspeed_rl_plugin.dock.distributed.cells import entry_bytes
from mindspeed_rl_plugin.dock.distributed.connections import Connections, Homes, Settings, contiguous_homes
from mindspeed_rl_plugin.dock.distributed.controller import Controller
from mindspeed_rl_plugin.dock.distributed.credits import put_bytes, row_reserve
from mindspeed_rl_plugin.dock.distributed.hosting import Host
from mindspeed_rl_plugin.dock.distributed.memory import PrivateDirectory, machine
from mindspeed_rl_plugin.dock.distributed.ray_nodes import RayNodes, warehouse_spec
from mindspeed_rl_plugin.dock.distributed.service import Address, Directory, Service
from mindspeed_rl_plugin.dock.distributed.warehouse import Warehouse
from mindspeed_rl_plugin.dock.local import check_declarations

SEGMENT_BYTES = 64 << 20
HEARTBEAT = 30.0  # seconds; a machine is given up after so long without a sign of life
ANSWER = 120.0  # seconds; nothing that need not wait takes so long, on the busiest machine

Exchange = Callable[[Any], list[Any]]  # every member's value, in rank order


@dataclass(frozen=True)
class Limits:
    """capacity, rows: bytes of cells and rows of groups that a warehouse may hold (None: no limit); max_tokens: longest
    sample, needed with a capacity, for room that write-backs are promised; version_column: column with the weight
    version of a row."""

    capacity: int | None = None
    max_tokens: int | None = None
    version_column: str | None = None
    segment_bytes: int = SEGMENT_BYTES
    rows: int | None = None

    @property
    def bounded(self) -> bool:
        """Whether producers may have to wait."""
        return self.capacity is not None or self.rows is not None

    def write_backs(self, columns: Sequence[ColumnSpec], states: Sequence[StateSpec]) -> dict[str, int]:
        """Most bytes that states write into one row, by column. Raises ValueError for a capacity without max_tokens."""
        if self.capacity is None:
            return {}
        if self.max_tokens is None:
            raise ValueError(f"a dock of {self.capacity} bytes must know the longest sample; give max_tokens too")
        written = {name for s in states for name in s.writes}
        return {c.name: self._cell_bytes(c) for c in columns if c.name in written}

    def check(self, columns: Sequence[ColumnSpec], states: Sequence[StateSpec], groups: int, members: int) -> None:
        """Raise ValueError where a warehouse cannot admit `groups` of `members` samples, the longest there may be.

        A ragged column that declares no `longest` counts with max_tokens entries. Where its cells can be longer (text
        and record of a prompt), a put of such cells still says by itself what it lacks.
        """
        if self.rows is not None and groups * members > self.rows:
            raise ValueError(
                f"--rl-dock-rows {self.rows}: {groups} groups of {members} samples on one machine are "
                f"{groups * members} rows; raise it, or lower --rl-rollout-prompts"
            )
        if self.capacity is None:
            return
        written = self.write_backs(columns, states)
        read = {name for s in states for name in s.reads}
        produced = [c for c in columns if c.name in read and c.name not in written]
        row = row_reserve(written) + put_bytes(self._cell_bytes(c) for c in produced if c.level != "group")
        need = groups * (members * row + put_bytes(self._cell_bytes(c) for c in produced if c.level == "group"))
        if need > self.capacity:
            raise ValueError(
                f"--rl-dock-gb {self.capacity / 2**30:g}: {groups} groups of {members} samples on one machine may need "
                f"{need} bytes ({need / 2**30:.3g} GiB){self._uncounted(produced)}; raise it, or lower "
                "--rl-rollout-prompts or the length limits"
            )

    def _uncounted(self, produced: Sequence[ColumnSpec]) -> str:
        open_ended = [c.name for c in produced if c.ragged and c.level != "token" and c.longest is None]
        return f", with {self.max_tokens} entries a cell of {', '.join(open_ended)}" if open_ended else ""

    def _cell_bytes(self, column: ColumnSpec) -> int:
        return entry_bytes(column) * ((column.longest or self.max_tokens) if column.ragged else 1)


class Member:
    """One process of a dock: its service, and the connections to the others.

    rank, world: of the job; exchange: all-gather of a small JSON value over the job; node: this machine; host: address
    on the job's interface, "" where all ranks share one machine. The lowest rank of each machine holds its warehouse;
    the controllers are spread over the ranks. central: rank 0 holds everything instead, and nobody maps its memory.
    ray: the warehouse is in a process of Ray's instead, over the same memory. heartbeat: seconds within which
    controllers give up a warehouse on another machine that gives no sign of life.
    """

    def __init__(
        self,
        columns: Sequence[ColumnSpec],
        states: Sequence[StateSpec],
        *,
        rank: int,
        world: int,
        exchange: Exchange,
        node: str = "",
        host: str = "",
        limits: Limits | None = None,
        homes: Homes | None = None,
        central: bool = False,
        ray: bool = False,
        patience: float = 60.0,
        heartbeat: float = HEARTBEAT,
    ) -> None:
        check_declarations(columns, states)
        limits = limits or Limits()
        node = node or machine()
        secret = bytes.fromhex(exchange(secrets.token_hex(32) if rank == 0 else None)[0])
        nodes = exchange(node)
        order = list(dict.fromkeys(nodes))[: 1 if central else None]  # machines by their lowest rank
        near = node in order and (rank == 0 or not central)
        leads = near and nodes.index(node) == rank
        warehouse = order.index(node) if near else None
        self._private = PrivateDirectory() if leads else None
        shared = exchange(self._private.path if self._private else None)[nodes.index(node)]
        by_state = {s.name: 0 if central else controller_rank(i, len(states), world) for i, s in enumerate(states)}
        columns_by_name, states_by_name = {c.name: c for c in columns}, {s.name: s for s in states}
        many = len(set(nodes)) > 1
        bound = host if many else ""
        shape = {
            "capacity": limits.capacity,
            "max_rows": limits.rows,
            "write_backs": limits.write_backs(columns, states),
            "version_column": limits.version_column,
        }
        house = self._ray = None
        if ray:
            self._ray = RayNodes(
                exchange, rank=rank, leads=leads, secret=secret, node=node, host=bound, patience=patience
            )
        elif leads:
            house = Warehouse(warehouse, columns_by_name, Arena(shared, limits.segment_bytes), **shape)
        mine = [states_by_name[n] for n, r in by_state.items() if r == rank]
        here = {s.name: Controller(s, columns_by_name, states_by_name) for s in mine}
        directory = Directory()
        homes = homes or contiguous_homes(len(order))
        self.host = Host(
            f"rank {rank}",
            node,
            secret,
            directory,
            warehouse=house,
            controllers=here,
            homes=homes,
            build=lambda state: Controller(states_by_name[state], columns_by_name, states_by_name),
            heartbeat=heartbeat,
        )
        self.service = None
        if house is not None or here:
            path = os.path.join(shared, f"rank-{rank}.sock")
            self.service = Service(self.host, secret, node=node, unix=path, host=bound, on_end=self.host.end)
        own = None
        if self.service is not None:
            self.host.refused = self.service.refused
            own = vars(self.service.start())
        addresses = [None if a is None else Address(**a) for a in exchange(own)]
        self.host.address = addresses[rank]
        directory.hosts += [a for a in addresses if a is not None]
        directory.controllers.update({n: addresses[r] for n, r in by_state.items()})
        if self._ray is None:
            directory.warehouses.update({i: addresses[nodes.index(n)] for i, n in enumerate(order)})
        else:
            spec = warehouse_spec(
                columns,
                directory=shared,
                node=node,
                host=bound,
                secret=secret,
                controllers=directory.controllers,
                hosts=directory.hosts,
                segment_bytes=limits.segment_bytes,
                **shape,
            )
            directory.warehouses.update(self._ray.place({warehouse: spec} if leads else {}))
        settings = Settings(
            name=f"rank {rank} client",
            node=node,
            secret=secret,
            warehouse=warehouse,
            directory=shared if near else None,
            homes=homes,
            patience=min(patience, ANSWER),
            version_column=limits.version_column,
        )
        self.connections = Connections(
            directory,
            settings,
            resolve=None if self._ray is None else self._ray.resolve,
            meet=lambda: exchange(None),
            on_close=self._close,
        )
        self.connections.served = self.host.served
        exchange(None)  # nobody asks before everybody answers
        if self.service is not None and many:
            self.service.call(self.host.watch)

    def _close(self) -> None:
        if self.service is not None:
            self.service.close()
        if self._ray is not None:
            self._ray.close()
        if self._private is not None:
            self._private.close()


def controller_rank(index: int, controllers: int, world: int) -> int:
    """Rank that holds the controller of state `index`: where there are enough ranks one of its own for each state,
    spread evenly; else as many for each rank, to one, from the second on: the first, which holds a warehouse
    already, has no more than any other."""
    return (index * world // controllers if world >= controllers else index + 1) % world


def alone(value: Any) -> list[Any]:
    """`Exchange` of a job of one process."""
    return [value]
