"""What a process keeps open towards a dock: connections by thread, mapped segments, known epochs, counted bytes."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mindspeed_rl_plugin.dock.distributed.arena import Extent, Segments
from mindspeed_rl_plugin.dock.distributed.cells import FETCH_BYTES, cut, ids_array, portions
from mindspeed_rl_plugin.dock.distributed.channel import Channel, Silent
from mindspeed_rl_plugin.dock.distributed.frames import Message
from mindspeed_rl_plugin.dock.distributed.records import Shape
from mindspeed_rl_plugin.dock.distributed.service import Address, Directory
from mindspeed_rl_plugin.dock.report import listed
from mindspeed_rl_plugin.dock.traffic import Traffic
from mindspeed_rl_plugin.rows import SampleId

RECONNECT_SECONDS = 0.5
RECONNECT_WITHIN = 10.0  # seconds past a request's own, while what it asks is started again or taken over
MOVING_SECONDS = 0.05  # between questions for a controller that is being taken over

Homes = Callable[[int, int], np.ndarray]


def contiguous_homes(warehouses: int) -> Homes:
    """Group g of G lies in warehouse g * S // G, where the engines of that node draw it."""
    return lambda epoch, groups: np.arange(groups) * warehouses // groups


@dataclass
class Settings:
    """Of one process. name: unique in the job; node: machine; secret: of the job; warehouse: number of the one on this
    node, None without; directory: of its segments; homes: (epoch, groups) -> `[groups]` warehouse of each group, the
    same in every process; patience: seconds for an answer that need not wait; lease_seconds: life of a lease;
    version_column: the column with the weight version of a row.
    """

    name: str
    node: str
    secret: bytes
    warehouse: int | None
    directory: str | None
    homes: Homes
    patience: float = 60.0
    lease_seconds: float = 7200.0
    version_column: str | None = None


class Spare(NamedTuple):
    """Memory that a warehouse lent; incarnation: of the warehouse; channel: the connection that it came by."""

    extent: Extent
    incarnation: int
    channel: Channel

    @property
    def ours(self) -> bool:
        """Whether it may be filled: with its connection it goes back to the warehouse."""
        return self.channel.quiet


class WarehouseLost(ConnectionError):
    """The machine where rows lay is gone."""


class Connections:
    """Shared by all `DistributedDock` views of a process. resolve: gives the new address of a warehouse that moved;
    meet: returns once every process of the job has called it; on_close: what else ends with the connections."""

    def __init__(
        self,
        directory: Directory,
        settings: Settings,
        *,
        resolve: Callable[[int], Address] | None = None,
        meet: Callable[[], object] = lambda: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory, self.settings = directory, settings
        self.segments = None if settings.directory is None else Segments(settings.directory)
        self.traffic = Traffic()
        self.served: Callable[[], dict[str, Any]] = dict  # what else this process does for the dock
        self.shapes: dict[int, Shape] = {}
        self.cleared: dict[int, np.ndarray] = {}  # epoch -> [groups] bool
        self.last_epoch = -1
        self.after: dict[int, int] = {}  # warehouse -> number of the newest record that this process caused
        self.dead: set[int] = set()  # warehouses that controllers have given up, as this process heard last
        self._elsewhere: dict[int, dict[int, int]] = {}  # epoch -> group -> home of those that were put anew elsewhere
        self.held: dict[tuple[str, int], np.ndarray] = {}  # ids of live leases of this process, by state and token
        self.meet = meet
        self._resolve, self._on_close = resolve, on_close
        self._local = threading.local()
        self._every: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._homes: dict[int, np.ndarray] = {}
        self._numbers: tuple[tuple[tuple[SampleId, ...], np.ndarray], ...] = ()

    def homes(self, epoch: int) -> np.ndarray:
        """`[groups]` warehouse of each group of an open epoch; what belonged to a dead one is dealt to the others."""
        if epoch not in self._homes:
            found = np.array(self.settings.homes(epoch, self.shapes[epoch].groups), np.int64)
            orphans = np.isin(found, list(self.dead)).nonzero()[0]
            if len(orphans):
                living = np.array(self.living(), np.int64)
                found[orphans] = living[orphans % len(living)]
            for group, home in self._elsewhere.get(epoch, {}).items():
                found[group] = home
            self._homes[epoch] = found
        return self._homes[epoch]

    def living(self) -> list[int]:
        """Warehouses that are not given up. Raises ConnectionError when there are none."""
        found = [w for w in self.directory.warehouses if w not in self.dead]
        if not found:
            raise ConnectionError("no warehouse of this dock gives a sign of life any more")
        return found

    def health(self, state: str) -> np.ndarray:
        """`[n, 2]` (epoch, group) of groups that are lost and must be put again, as the state's controller knows.
        Learns which warehouses are dead, and where groups are that were put anew."""
        epochs = [[n, *shape] for n, shape in self.shapes.items()]
        answer = self.state(state, Message("health", {"state": state, "epochs": epochs}))
        dead = set(answer.note["dead"])
        for warehouse in dead - self.dead:
            self.after.pop(warehouse, None)
        if dead != self.dead:
            self.dead = dead
            self._homes.clear()
        self.learn(answer.arrays["moved"])
        return answer.arrays["lost"]

    def learn(self, moved: np.ndarray) -> None:
        """`[n, 3]` (epoch, group, home) of groups that were put anew elsewhere: so that all write where the rest is."""
        for epoch, group, home in moved.tolist():
            if epoch in self.shapes and self._elsewhere.setdefault(epoch, {}).get(group) != home:
                self._elsewhere[epoch][group] = home
                self._homes.pop(epoch, None)

    def older(self, epoch: int, warehouse: int) -> np.ndarray | None:
        """`[groups]` bool: of which a warehouse holds an older copy; None for none."""
        moved = [g for g, home in self._elsewhere.get(epoch, {}).items() if home != warehouse]
        if not moved:
            return None
        found = np.zeros(self.shapes[epoch].groups, bool)
        found[moved] = True
        return found

    def forget(self, epoch: int, groups: np.ndarray) -> None:
        """Groups of an open epoch are cleared."""
        gone = self.cleared.setdefault(epoch, np.zeros(self.shapes[epoch].groups, bool))
        gone[groups] = True
        if gone.all():
            for known in (self.shapes, self.cleared, self._homes, self._elsewhere):
                known.pop(epoch, None)
            for lease, ids in list(self.held.items()):
                if not np.isin(ids[:, 0], list(self.shapes)).any():
                    self.held.pop(lease, None)

    def state(self, state: str, message: Message, seconds: float = 0.0) -> Message:
        """Ask the controller of a state, wherever it is now. Raises TimeoutError when it cannot be found, or neither it
        nor who takes it over answers."""
        end = time.monotonic() + seconds + self.settings.patience
        while True:
            answer = self._ask(("state", state), lambda: self.directory.controllers[state], message, seconds)
            if answer.kind != "elsewhere":
                return answer
            if time.monotonic() >= end:
                raise TimeoutError(f"{message.kind} of state {state!r}: no process knows where its controller is")
            self._moved(state, answer)
            time.sleep(MOVING_SECONDS)

    def warehouse(self, index: int, message: Message, seconds: float = 0.0) -> Message:
        """Ask a warehouse; one that was restarted answers at its new address. Its numbers are remembered."""
        answer = self._ask(("warehouse", index), lambda: self._address(index), message, seconds)
        if "seq" in answer.note and answer.kind in ("committed", "cleared"):
            self.after[index] = max(self.after.get(index, 0), answer.note["seq"])
        return answer

    def numbers(self, ids: Sequence[SampleId]) -> np.ndarray:
        """`[B, 3]` int64. What a lease gave is what its commit brings: the last ones are remembered."""
        for known, array in self._numbers:
            if known is ids:
                return array
        array = ids_array(ids)
        if isinstance(ids, tuple) and len(ids):
            self.remember(ids, array)
        return array

    def remember(self, ids: tuple[SampleId, ...], array: np.ndarray) -> None:
        """`array` is what `numbers` would make of `ids`."""
        self._numbers = (*self._numbers[-3:], (ids, array))

    def spare(self) -> Spare | None:
        """Take the memory that this node's warehouse lent this thread with its last answer. Whoever takes it names it
        in its next commit, and gives `lent` the answer."""
        return self._local.__dict__.pop("spare", None)

    def lent(self, answer: Message) -> None:
        """Keep the spare that a warehouse's answer to this thread brings."""
        if "spare" in answer.note:
            channel = self._channels()["warehouse", self.settings.warehouse]
            self._local.spare = Spare(Extent(*answer.note["spare"]), answer.note["incarnation"], channel)

    def fetch(self, index: int, spans: Sequence[tuple[int, int, int]], seconds: float) -> np.ndarray:
        """Bytes of another warehouse, (segment, offset, bytes) one after the other; valid until the next fetch."""
        table = np.array(cut(spans), np.int64).reshape(-1, 3)
        parts = []
        for low, high in portions(table[:, 2]):
            data = self._fetched(index, table[low:high], seconds).arrays["data"]
            parts.append(data if high == len(table) and not low else data.copy())
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])

    def fetch_into(
        self, index: int, spans: Sequence[tuple[int, int, int]], outs: Sequence[np.ndarray], seconds: float
    ) -> None:
        """As `fetch`, but straight into `outs`, uint8 arrays that are filled one after the other."""
        table = np.array(spans, np.int64).reshape(-1, 3)
        if table[:, 2].sum() <= FETCH_BYTES and not self._fetched(index, table, seconds, outs).arrays:
            return
        got, at = self.fetch(index, spans, seconds), 0
        for out in outs:
            out[:] = got[at : at + len(out)]
            at += len(out)

    def _fetched(
        self, index: int, table: np.ndarray, seconds: float, scatter: Sequence[np.ndarray] | None = None
    ) -> Message:
        message, key = Message("fetch", {}, {"spans": table}), ("warehouse", index)
        return self._ask(key, lambda: self._address(index), message, seconds, recycle=True, scatter=scatter)

    def close(self) -> None:
        """End all connections."""
        for channel in list(self._every):
            channel.close()
        self._on_close()

    def _address(self, index: int) -> Address:
        return self.directory.warehouses[index]

    def _ask(
        self,
        key: tuple[str, object],
        where: Callable[[], Address],
        message: Message,
        seconds: float,
        **how: Any,
    ) -> Message:
        """One request; a lost connection is made anew until the patience ends. Every request may be repeated: whoever
        is silent though it is connected is asked once more, a controller where it is after that."""
        patience = min(self.settings.patience, seconds + RECONNECT_WITHIN) if seconds else self.settings.patience
        end, silent = time.monotonic() + patience, False
        while True:
            try:
                return self._channel(key, where()).ask(message, seconds, **how)
            except Silent as error:
                if silent or key[0] != "state":
                    raise Silent(f"{key[0]} {key[1]!r}: {error}") from error
                silent, end = True, time.monotonic() + self.settings.patience
                self._succeed(key[1])
            except ConnectionError as error:
                if self.segments is not None and not self.segments.directory.is_dir():
                    raise ConnectionError(
                        f"{key[0]} {key[1]!r}: the rank that held this machine's part of the dock has ended, or left "
                        "it; its rows went with it"
                    ) from error
                if key[0] == "warehouse" and self._given_up(key[1]):
                    raise WarehouseLost(f"warehouse {key[1]} at {where()} gives no sign of life: {error}") from error
                if time.monotonic() >= end:
                    if silent:
                        raise Silent(f"{key[0]} {key[1]!r}: {error}") from error
                    raise
                time.sleep(RECONNECT_SECONDS)
                if key[0] == "state":
                    self._succeed(key[1])
                if key[0] == "warehouse" and self._resolve is not None:
                    self.directory.warehouses[key[1]] = self._resolve(key[1])

    def _succeed(self, state: str) -> None:
        """Have a controller that is gone taken over by one of the processes that follow its own."""
        lost, hosts, s = self.directory.controllers[state], self.directory.hosts, self.settings
        at = hosts.index(lost) + 1 if lost in hosts else 0
        note = {"state": state, "term": self.directory.terms.get(state, 0)}
        for address in (a for a in (*hosts[at:], *hosts[:at]) if a != lost):
            try:
                channel = Channel(address, s.secret, s.node, f"{s.name} succession", s.patience)
                with contextlib.closing(channel):
                    return self._moved(state, channel.ask(Message("succeed", note)))
            except (ConnectionError, TimeoutError):
                continue  # it is gone too; the next one

    def _moved(self, state: str, answer: Message) -> None:
        self.directory.move(state, Address(**answer.note["address"]), answer.note["term"])

    def _given_up(self, warehouse: int) -> bool:
        self.health(next(iter(self.directory.controllers)))
        return warehouse in self.dead

    def _channel(self, key: tuple[str, object], address: Address) -> Channel:
        channels = self._channels()
        for lost in [k for k, c in channels.items() if c.closed]:
            del channels[lost]
        if key in channels and channels[key].address != address:  # a controller that has moved
            del channels[key]
        if key not in channels:
            s = self.settings
            # Several states of one process share a connection.
            same = [c for c in channels.values() if c.address == address]
            channels[key] = same[0] if same else Channel(address, s.secret, s.node, s.name, s.patience)
            if not same:
                self._every.add(channels[key])
        return channels[key]

    def _channels(self) -> dict[tuple[str, object], Channel]:
        if not hasattr(self._local, "channels"):
            self._local.channels = {}
        return self._local.channels


def slots_by_home(homes: np.ndarray, shape: Shape, ids: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """(warehouse, indices into `ids`, row numbers) of rows of one epoch, by rising warehouse."""
    slots = ids[:, 1] * shape.members + ids[:, 2]
    home = homes[ids[:, 1]]
    first = int(home[0])
    if (home == first).all():
        return [(first, np.arange(len(ids)), slots)]
    return [(w, i := (home == w).nonzero()[0], slots[i]) for w in np.unique(home).tolist()]


def epochs_of(ids: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(epoch, indices into `ids`) by rising epoch."""
    if not len(ids) or (ids[:, 0] == ids[0, 0]).all():
        return [(int(ids[0, 0]), np.arange(len(ids)))] if len(ids) else []
    return [(e, (ids[:, 0] == e).nonzero()[0]) for e in np.unique(ids[:, 0]).tolist()]


def check_ids(shapes: Mapping[int, Shape], last: int, call: str, ids: np.ndarray) -> None:
    """Raise ValueError for ids that were never opened."""
    for epoch, index in epochs_of(ids):
        shape = shapes.get(epoch)
        if shape is None:
            if not 0 <= epoch <= last:
                raise ValueError(f"{call}: epoch {epoch} was not opened; open: {listed(sorted(shapes))}")
            continue
        part = ids[index]
        _, group, member = part.max(0).tolist()
        if part.min() < 0 or group >= shape.groups or member >= shape.members:
            bad = (part[:, 1:] < 0).any(1) | (part[:, 1] >= shape.groups) | (part[:, 2] >= shape.members)
            raise ValueError(
                f"id {tuple(part[bad.argmax()].tolist())} was not opened: epoch {epoch} has groups "
                f"0..{shape.groups - 1} of members 0..{shape.members - 1}"
            )


def first_of_each(values: Sequence[int] | np.ndarray) -> np.ndarray:
    """Indices of the first occurrence of each value, in order of occurrence."""
    return np.sort(np.unique(np.asarray(values), return_index=True)[1])
