"""The state of a process that uses a dock: connections, mapped segments, known epochs, counted bytes."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_rl_plugin.dock import messages as m
from mindspeed_rl_plugin.dock.api import Traffic, listed
from mindspeed_rl_plugin.dock.core import Core
from mindspeed_rl_plugin.dock.memory import Segments
from mindspeed_rl_plugin.dock.rpc import REPLY_TIMEOUT, Closed, Lost, Process, Stream, ask, connect

KEPT = 256  # number of epochs (in a process of the job: cleared epochs) to remember; no lease has rows of older ones
Owners = Callable[[int, int], np.ndarray]  # (epoch, groups) -> `[groups]` warehouse of each group


@dataclass
class Epoch:
    """An open epoch: the ids of one rollout or evaluation."""

    shape: m.Shape
    owner: np.ndarray  # `[groups]` warehouse of each group, -1: unknown
    alive: np.ndarray  # `[groups]` bool, not cleared


class Epochs:
    """The epochs that this process knows. first, last: lowest and highest number ever opened; owners: None outside of
    the job, where only grants (see `learn`) tell which warehouse has a group."""

    def __init__(self, owners: Owners | None) -> None:
        self.owners, self.known, self.first, self.last = owners, dict[int, Epoch](), 0, -1
        self._cleared: dict[int, Epoch] = {}

    def add(self, number: int, shape: m.Shape) -> None:
        groups = shape.groups
        owner = np.full(groups, -1) if self.owners is None else np.asarray(self.owners(number, groups))
        self.known[number] = Epoch(shape, owner, np.ones(groups, bool))
        self.first, self.last = min(self.first, number), max(self.last, number)

    def learn(self, grant: m.Grant) -> None:
        """Learn epochs from the answer to `Ask` or `Look`, in a process outside of the job. Nobody tells this process
        when epochs are cleared, so it forgets the oldest epochs."""
        for number, shape in grant.shapes:
            if number not in self.known:
                self.add(number, shape)
            mine = grant.ids[:, 0] == number
            self.known[number].owner[grant.ids[mine, 1]] = grant.owner[mine]
        new = {number for number, *_ in grant.shapes}
        for number in [number for number in list(self.known)[:-KEPT] if number not in new]:
            self.known.pop(number, None)

    def forget(self, number: int, groups: np.ndarray) -> bool:
        """Note that groups of an open epoch are cleared. Returns whether no group remains."""
        alive = self.known[number].alive
        alive[groups] = False
        if not alive.any():
            self._cleared[number] = self.known[number]  # before `del`: another thread may ask for the shape
            del self.known[number]
            for old in list(self._cleared)[:-KEPT]:
                del self._cleared[old]
        return number not in self.known

    def opened(self, call: str, number: int) -> Epoch | None:
        """An epoch; None if all its groups are cleared. Raises ValueError if it was never opened."""
        if number not in self.known and not self.first <= number <= self.last:
            raise ValueError(f"{call}: epoch {number} was not opened; open: {listed(sorted(self.known))}")
        return self.known.get(number)

    def shape(self, number: int) -> m.Shape:
        """Shape of an epoch that is open, or that another thread has just cleared."""
        return (self.known.get(number) or self._cleared[number]).shape

    def owned(self, call: str, ids: np.ndarray, leased: bool = False) -> dict[tuple[int, int], np.ndarray]:
        """(epoch, warehouse) -> indices into `ids` of the rows there. Rows of cleared epochs are left out, but not if
        they are leased: this rank may know an epoch as cleared while the leader, which clears for all ranks, waits for
        the lease. Outside of the job: raises ValueError for rows of groups that no grant has named."""
        out = {}
        for number, index in by_value(ids[:, 0]):
            epoch = self.opened(call, number) or (self._cleared.get(number) if leased else None)
            for warehouse, part in by_value(epoch.owner[ids[index, 1]]) if epoch is not None else ():
                if warehouse < 0:
                    raise ValueError(f"{call}: a process outside of the job knows only the rows of its leases")
                out[number, warehouse] = index[part]
        return out

    def cleared(self, call: str, ids: np.ndarray) -> np.ndarray:
        """`[B]` bool: which ids are cleared. Raises ValueError for ids that were never opened."""
        cleared = np.ones(len(ids), bool)
        for number, index in by_value(ids[:, 0]):
            epoch, part = self.opened(call, number), ids[index, 1:]
            if epoch is None:
                continue
            bad = ((part < 0) | (part >= epoch.shape[:2])).any(1)
            if bad.any():
                groups, members, _ = epoch.shape
                raise ValueError(
                    f"id {(number, *part[bad.argmax()].tolist())} was not opened: epoch {number} has groups "
                    f"0..{groups - 1} of members 0..{members - 1}"
                )
            cleared[index] = ~epoch.alive[part[:, 0]]
        return cleared


class Calls:
    """What all views of the dock in a process share; for several threads.

    me: this process.
    core: called directly for requests that this process serves itself; None: it serves none.
    warehouse: number of this machine's warehouse, whose memory is mapped here; None: there is none.
    owners: see `Epochs`.
    lease_seconds: how long a lease lasts outside of the job; None: a process of the job, whose leases have no limit.
    lost: called with address and reason when a connection breaks.
    ended: outside of the job: whether the job has left the dock.
    closed: whether this process has left the dock.
    """

    def __init__(
        self,
        directory: m.Directory,
        me: Process,
        *,
        core: Core | None = None,
        warehouse: int | None = None,
        owners: Owners | None = None,
        lease_seconds: float | None = None,
        lost: Callable[[m.Address, str], None] = lambda address, why: None,
    ) -> None:
        self.directory, self.me, self.core, self.warehouse = directory, me, core, warehouse
        self.lease_seconds, self._lost = lease_seconds, lost
        self.epochs, self.traffic = Epochs(owners), Traffic()
        self.after: dict[int, int] = {}  # warehouse -> number of its newest record that this process knows of
        self.held: dict[tuple[str, int], np.ndarray] = {}  # ids of live leases of this process, by state and token
        self.segments = Segments(self._find)
        self._idle: defaultdict[m.Address, list[Stream]] = defaultdict(list)
        self.closed = self.ended = False
        self._hearing = threading.Lock()

    def query(self, kind: type[m.Query], state: str, *what: Any) -> Any:
        """Ask the controller of a state. It answers once it has all records that this process knows of."""
        opened = [(n, e.shape) for n, e in list(self.epochs.known.items()) if self.epochs.owners is not None]
        message = kind(state, opened, dict(self.after), *what)  # a copy, since other threads change `after`
        return self._ask(self.directory.controllers[state], message, None)[0]

    def ask_warehouse(self, index: int, message: m.Message, bulk: np.ndarray | None = None) -> Any:
        """Ask a warehouse. Returns its answer, or the bytes of a `Fetch`. Remembers the number of its newest record."""
        answer, got = self._ask(self.directory.warehouses[index], message, bulk)
        if isinstance(answer, (m.Ok, m.Located)):
            self.hear({index: answer.seq})
        return answer if got is None else got

    def ask_rank(self, address: m.Address, message: m.Message, seconds: float) -> Any:
        """Ask the rank at an address; wait `seconds` beyond the message's deadline. Returns its answer, or bytes."""
        answer, got = self._ask(address, message, None, seconds)
        return answer if got is None else got

    def hear(self, after: Mapping[int, int]) -> None:
        """Remember the newest records that this process or a peer knows of. after: as `self.after`."""
        with self._hearing:
            for warehouse, seq in after.items():
                self.after[warehouse] = max(self.after.get(warehouse, 0), seq)

    def close(self) -> None:
        """End all connections. Idempotent."""
        self.closed = True
        for idle in list(self._idle.values()):
            while idle:
                idle.pop().close()

    def _ask(self, address: m.Address, message: m.Message, bulk: Any, patience: float = REPLY_TIMEOUT) -> Any:
        """The answer, and the bytes that came with it."""
        if self.core is not None and address.rank == self.me.rank:
            answer, got = self.core.call(self.me.name, message, bulk)[0], None
        else:
            answer, got = self._send(address, message, bulk, patience)
        if isinstance(answer, m.Failed):
            raise answer.raised()
        return answer, got

    def _send(self, address: m.Address, message: m.Message, bulk: Any, patience: float) -> Any:
        idle = self._idle[address]  # a connection serves one thread at a time
        try:
            stream = idle.pop()
        except IndexError:
            stream = connect(address, self.me, patience=patience)
        try:
            answer = ask(stream, address, message, bulk, patience)
        except BaseException as error:
            stream.close()
            if isinstance(error, Lost):
                self._lost(address, "connection broke")
            self.ended |= isinstance(error, Closed) and self.lease_seconds is not None
            raise
        idle.append(stream)
        if self.closed:
            self.close()
        return answer

    def _find(self, segment: int) -> tuple[str, int, list[int]]:
        answer = self.ask_warehouse(self.warehouse, m.Map(segment))
        return answer.path, answer.nbytes, answer.segments


def by_value(values: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(value, indices where it occurs), by rising value."""
    if len(values) and (values == values[0]).all():
        return [(int(values[0]), np.arange(len(values)))]
    return [(value, (values == value).nonzero()[0]) for value in np.unique(values).tolist()]
