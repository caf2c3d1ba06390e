"""What a process keeps towards a dock: connections by thread, mapped segments, known epochs, counted bytes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindspeed_rl_plugin.dock.api import listed
from mindspeed_rl_plugin.dock.messages import Address, Committed, Extent, Failed, Fetch, Hello, Map, Message, Shape
from mindspeed_rl_plugin.dock.rpc import Channel
from mindspeed_rl_plugin.dock.server import Server
from mindspeed_rl_plugin.dock.slabs import Segments
from mindspeed_rl_plugin.dock.traffic import Traffic

Owners = Callable[[int, int], np.ndarray]  # (epoch, groups) -> `[groups]` warehouse of each group


def contiguous_owners(warehouses: int) -> Owners:
    """Group g of G lies in warehouse g * S // G."""
    return lambda epoch, groups: np.arange(groups) * warehouses // groups


@dataclass
class Directory:
    """Where everything of a dock answers: warehouses by number, controllers by state."""

    warehouses: list[Address]
    controllers: dict[str, Address]


@dataclass
class Epochs:
    """Epochs that this process knows. shapes: of the open ones; cleared: `[groups]` bool of those of which groups are
    cleared; last: highest number ever opened; owner: `[groups]` warehouse of each group."""

    owners: Owners | None
    shapes: dict[int, Shape] = field(default_factory=dict)
    cleared: dict[int, np.ndarray] = field(default_factory=dict)
    last: int = -1
    _owner: dict[int, np.ndarray] = field(default_factory=dict)

    def owner(self, epoch: int) -> np.ndarray:
        """`[groups]` warehouse of each group of an open epoch."""
        if epoch not in self._owner:
            groups = self.shapes[epoch].groups
            self._owner[epoch] = np.full(groups, -1) if self.owners is None else np.asarray(self.owners(epoch, groups))
        return self._owner[epoch]

    def learn(self, shapes: Sequence[tuple[int, int, int]], ids: np.ndarray, owner: np.ndarray) -> None:
        """What a lease says about epochs, to a process that opened none."""
        for epoch, *shape in shapes:
            self.shapes[epoch], self.last = Shape(*shape), max(self.last, epoch)
            mine = ids[:, 0] == epoch
            self.owner(epoch)[ids[mine, 1]] = owner[mine]

    def forget(self, epoch: int, groups: np.ndarray) -> None:
        """Groups of an open epoch are cleared."""
        gone = self.cleared.setdefault(epoch, np.zeros(self.shapes[epoch].groups, bool))
        gone[groups] = True
        if gone.all():
            for known in (self.shapes, self.cleared, self._owner):
                known.pop(epoch, None)

    def open_groups(self) -> int:
        """Groups that are opened and not cleared."""
        return sum(s.groups - int(self.cleared[n].sum() if n in self.cleared else 0) for n, s in self.shapes.items())

    def listed(self) -> list[tuple[int, int, int]]:
        """(epoch, groups, members) of the open ones."""
        return [(number, *shape) for number, shape in self.shapes.items()]

    def check_opened(self, call: str, epoch: int) -> None:
        """Raise ValueError for an epoch that was never opened."""
        if epoch not in self.shapes and not 0 <= epoch <= self.last:
            raise ValueError(f"{call}: epoch {epoch} was not opened; open: {listed(sorted(self.shapes))}")

    def check(self, call: str, ids: np.ndarray) -> None:
        """Raise ValueError for ids that were never opened."""
        for epoch, index in by_value(ids[:, 0]):
            self.check_opened(call, epoch)
            shape, part = self.shapes.get(epoch), ids[index]
            if shape is None:
                continue
            _, group, member = part.max(0).tolist()
            if part.min() < 0 or group >= shape.groups or member >= shape.members:
                bad = (part[:, 1:] < 0).any(1) | (part[:, 1] >= shape.groups) | (part[:, 2] >= shape.members)
                raise ValueError(
                    f"id {tuple(part[bad.argmax()].tolist())} was not opened: epoch {epoch} has groups "
                    f"0..{shape.groups - 1} of members 0..{shape.members - 1}"
                )


class Calls:
    """Shared by all views of the dock in a process.

    name: unique in the job; rank: of it, -1 outside; node: machine; server: of this process, which is called directly;
    warehouse: number of the one whose memory is mapped here, None without; owners: where groups lie, None where only
    leases tell; patience: seconds for an answer that need not wait; lease_seconds: life of a lease, None for as long as
    the job lives; lost: called where a connection breaks.
    """

    def __init__(
        self,
        directory: Directory,
        *,
        name: str,
        rank: int,
        node: str,
        secret: bytes,
        server: Server | None = None,
        warehouse: int | None = None,
        owners: Owners | None = None,
        patience: float = 60.0,
        lease_seconds: float | None = None,
        lost: Callable[[Address, str], None] = lambda address, why: None,
    ) -> None:
        self.directory, self.name, self.rank, self.node = directory, name, rank, node
        self.server, self.warehouse, self.patience, self.lease_seconds = server, warehouse, patience, lease_seconds
        self.epochs, self.traffic = Epochs(owners), Traffic()
        self.after: dict[int, int] = {}  # warehouse -> number of the newest record that this process caused
        self.held: dict[tuple[str, int], np.ndarray] = {}  # ids of live leases of this process, by state and token
        self.segments = Segments(self._find)
        self.cached: list[Extent] = []  # memory that this machine's warehouse lent for the next puts
        self._secret, self._lost = secret, lost
        self._local = threading.local()
        self._every: weakref.WeakSet[Channel] = weakref.WeakSet()

    def ask_controller(self, state: str, message: Message, seconds: float = 0.0) -> Any:
        """Ask the controller of a state. seconds: how long it may wait."""
        return self._ask(self.directory.controllers[state], message, None, seconds)

    def ask_warehouse(self, index: int, message: Message, bulk: np.ndarray | None = None, seconds: float = 0.0) -> Any:
        """Ask a warehouse. The numbers of its records are remembered."""
        answer = self._ask(self.directory.warehouses[index], message, bulk, seconds)
        if isinstance(answer, Committed):
            self.after[index] = max(self.after.get(index, 0), answer.seq)
        return answer

    def fetch(self, index: int, spans: Sequence[tuple[int, ...]], outs: Sequence[np.ndarray]) -> None:
        """Bytes of another machine's warehouse, (segment, offset, bytes) one after the other, into uint8 arrays."""
        self._ask(self.directory.warehouses[index], Fetch(np.array(spans, np.int64).reshape(-1, 3)), None, 0.0, outs)

    def end_leases(self) -> None:
        """Leases of epochs that are over end by themselves."""
        for lease, ids in list(self.held.items()):
            if not np.isin(ids[:, 0], list(self.epochs.shapes)).any():
                self.held.pop(lease, None)

    def close(self) -> None:
        """End all connections. Idempotent."""
        for channel in list(self._every):
            channel.close()

    def _ask(
        self,
        address: Address,
        message: Message,
        bulk: np.ndarray | None,
        seconds: float,
        scatter: Sequence[np.ndarray] = (),
    ) -> Message:
        if self.server is not None and address.rank == self.rank:
            answer = self.server.call(self.name, message, bulk)[0]
            if isinstance(answer, Failed):
                raise answer.raised()
            return answer
        channels: dict[Address, Channel] = self._local.__dict__.setdefault("channels", {})
        channel = channels.get(address)
        if channel is None or channel.closed:
            hello = Hello(self.name, self.rank)
            channel = channels[address] = Channel(address, self._secret, self.node, hello, self.patience, self._lost)
            self._every.add(channel)
        return channel.ask(message, () if bulk is None else (bulk,), seconds, scatter)

    def _find(self, segment: int) -> tuple[str, int]:
        found = self.ask_warehouse(self.warehouse, Map(segment))
        return found.path, found.nbytes


def by_value(values: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(value, its indices) by rising value."""
    if len(values) and (values == values[0]).all():
        return [(int(values[0]), np.arange(len(values)))]
    return [(value, (values == value).nonzero()[0]) for value in np.unique(values).tolist()]


def merge(after: dict[int, int], other: Mapping[int, int]) -> None:
    """Take the newer numbers of `other` into `after`."""
    for warehouse, seq in other.items():
        after[warehouse] = max(after.get(warehouse, 0), seq)
