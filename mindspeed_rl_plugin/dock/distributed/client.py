"""`Dock` for one rank: metadata from the controllers, cells straight from where they lie.

Cells of this node's warehouse are copied out of shared memory by the reader itself; those of another node come in
one reply for each column. Every rank works for itself; ranks of one consumer (tensor and pipeline peers) make
equal calls and share one lease. See `dock/api.py` for the semantics.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mindspeed_rl_plugin.dock.api import ColumnSpec, Lease, StateSpec
from mindspeed_rl_plugin.dock.checks import FORMAT, Declared, check_snapshot, named, void
from mindspeed_rl_plugin.dock.distributed import cells, reading, snapshot
from mindspeed_rl_plugin.dock.distributed.asks import ask_message
from mindspeed_rl_plugin.dock.distributed.cells import Buffers
from mindspeed_rl_plugin.dock.distributed.channel import Silent
from mindspeed_rl_plugin.dock.distributed.connections import (
    MOVING_SECONDS,
    Connections,
    WarehouseLost,
    check_ids,
    epochs_of,
    slots_by_home,
)
from mindspeed_rl_plugin.dock.distributed.frames import Message
from mindspeed_rl_plugin.dock.distributed.picking import Ask
from mindspeed_rl_plugin.dock.distributed.records import Shape
from mindspeed_rl_plugin.dock.distributed.writing import Writer
from mindspeed_rl_plugin.dock.epoch import DONE
from mindspeed_rl_plugin.dock.report import listed
from mindspeed_rl_plugin.dock.traffic import Traffic
from mindspeed_rl_plugin.rows import Rows, SampleId

TURN_SECONDS = 60.0  # a longer wait is made of such turns, so that a controller which hangs is noticed after one


class DistributedDock(Declared):
    """One view of the dock.

    consumer, consumers: this rank's consumer of how many, for shares (None: streaming, whatever is ready); peer,
    peers: its place among the ranks of that consumer; the first acknowledges. division: name of the division of
    ranks into consumers; leader: whether this rank speaks for all in `clear`, `snapshot` and `restore`;
    deadline: seconds for what waits on others.
    """

    def __init__(
        self,
        columns: Sequence[ColumnSpec],
        states: Sequence[StateSpec],
        connections: Connections,
        *,
        consumer: int | None = None,
        consumers: int = 1,
        peer: int = 0,
        peers: int = 1,
        division: int = 0,
        leader: bool = True,
        deadline: float = 600.0,
    ) -> None:
        self.columns, self.states = {c.name: c for c in columns}, {s.name: s for s in states}
        self._net = connections
        self._share = None if consumer is None else (consumer, consumers)
        self._peer, self._peers, self._division = peer, peers, division
        self._leader, self._deadline = leader, deadline
        self._calls = itertools.count()
        self._name = f"{connections.settings.name} {secrets.token_hex(4)}"  # of this view: no other has it
        self._writer = Writer(self.columns, connections, deadline)

    @property
    def traffic(self) -> Traffic:
        """Bytes that this process moved, whichever view of the dock it used."""
        return self._net.traffic

    @property
    def served(self) -> dict[str, Any]:
        """states: whose controllers this process holds; messages, bytes: what went through it for all ranks; refused:
        connections and messages that it turned away, by reason."""
        return self._net.served()

    # ids

    def open(self, epoch: int, groups: int, members: int) -> None:
        """Know the ids of one rollout; the others hear of it with its first rows."""
        if groups < 1 or members < 1 or epoch < 0:
            raise ValueError(f"open({epoch=}, {groups=}, {members=}): the sizes must be at least 1, the epoch 0")
        shape = Shape(groups, members)
        if self._net.shapes.get(epoch) == shape:
            return
        if epoch <= self._net.last_epoch:
            raise ValueError(f"epoch {epoch} cannot be opened after epoch {self._net.last_epoch}: ids are never reused")
        self._net.shapes[epoch], self._net.last_epoch = shape, epoch

    def clear(self, epoch: int, groups: Iterable[int] | None = None) -> None:
        """Two phases: no state gives the groups out any more and live leases end; then the cells are freed."""
        if epoch not in self._net.shapes:
            if not 0 <= epoch <= self._net.last_epoch:
                raise ValueError(f"epoch {epoch} was not opened; open: {listed(sorted(self._net.shapes))}")
            return
        shape = self._net.shapes[epoch]
        chosen = np.arange(shape.groups) if groups is None else np.array(list(groups), np.int64)
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= shape.groups):
            raise ValueError(f"clear: epoch {epoch} has groups 0..{shape.groups - 1}, not {chosen.tolist()[:4]}")
        if self._leader and len(chosen):
            while not self._clear(epoch, shape, chosen):
                pass  # a controller was taken over in between, and knows nothing of the first phase
        self._net.forget(epoch, chosen)

    # cells

    def put(self, rows: Rows | None) -> None:
        """Commit cells as a producer; waits for room where the dock is full. Atomic for each group."""
        if rows is not None and len(rows):
            self._writer.write(rows, None, None)

    def read(self, ids: Sequence[SampleId], columns: Sequence[str]) -> Rows:
        """Cells without a lease. Raises ValueError naming the columns and ids that are not there."""
        self._check_known("read", columns)
        ids = named(ids)
        wanted = cells.ids_array(ids)
        check_ids(self._net.shapes, self._net.last_epoch, "read", wanted)
        parts, missing = [], []
        for epoch, index in epochs_of(wanted):
            if epoch not in self._net.shapes:
                raise ValueError(f"read: cleared, their cells are gone: {listed(ids[i] for i in index)}")
            gone = self._net.cleared.get(epoch)
            if gone is not None and gone[wanted[index, 1]].any():
                lost = index[gone[wanted[index, 1]]].tolist()
                raise ValueError(f"read: cleared, their cells are gone: {listed(ids[i] for i in lost)}")
            homes, shape = self._net.homes(epoch), self._net.shapes[epoch]
            for warehouse, where, slots in slots_by_home(homes, shape, wanted[index]):
                part = [ids[i] for i in index[where]]
                where_from = (self._net, self.columns, self._deadline, warehouse, epoch)
                parts.append(reading.read(*where_from, part, slots, columns, missing))
        if missing:
            raise ValueError(f"read: not committed: {'; '.join(missing)}")
        if not parts:
            return Rows((), {c: reading.empty(self.columns[c]) for c in columns})
        return parts[0] if len(parts) == 1 else Rows.concat(parts).select(ids)

    # work

    def lease(
        self,
        state: str,
        *,
        ids: Sequence[SampleId] | None = None,
        max_rows: int | None = None,
        min_rows: int = 1,
        deadline: float,
        columns: Sequence[str] | None = None,
        into: Buffers | None = None,
        **more: Any,
    ) -> Lease:
        """Rows of this rank's consumer. columns: those of the state's reads to fetch, all by default; into: memory to
        read into; more: further fields of `controller.Ask` (max_tokens, window, linger, balance, newest, ...)."""
        names = self._read_by(state, columns)
        self._check_stream(state, more, self._net.settings.version_column is not None)
        ids = None if ids is None else named(ids)
        if min_rows < 1 or (max_rows is not None and max_rows < min_rows):
            raise ValueError(f"lease of state {state!r}: need 1 <= min_rows <= max_rows, got {min_rows} and {max_rows}")
        call, end = next(self._calls), time.monotonic() + deadline
        share = None if ids is not None else self._share
        if ids is None and self._share is None and "near" not in more:
            more["near"] = self._net.settings.warehouse
        ask = Ask(
            ids=None if ids is None else cells.ids_array(ids),
            share=share,
            max_rows=max_rows,
            min_rows=min_rows,
            join=(self._division, (self._share or (0, 1))[0], call) if self._peers > 1 else (self._name, call),
            peers=self._peers,
            **more,
        )
        if ids is not None:
            check_ids(self._net.shapes, self._net.last_epoch, f"lease of state {state!r}", ask.ids)
            if len(set(ids)) != len(ids):
                raise ValueError(f"lease of state {state!r}: an id occurs twice among {listed(ids)}")
            if not len(ids):
                return Lease(0, state, Rows((), {c: reading.empty(self.columns[c]) for c in names}))
        take = cells.fresh if into is None else into.take
        while True:
            answer = self._ask(state, ask, names, deadline)
            try:
                found = reading.gather(self._net, self.columns, state, names, answer, take, self._deadline)
                break
            except WarehouseLost:
                # The controller takes the rows back, and gives them out again once their groups are put anew. It is the
                # same call, or its peers would be one behind.
                if not deadline:  # the controller has not heard of it
                    raise
                time.sleep(MOVING_SECONDS)
                deadline = max(end - time.monotonic(), 0.0)
            except BaseException:
                self._return(state, answer.note["token"])
                raise
        held = cells.ids_tuple(answer.arrays["ids"])
        self._net.remember(held, answer.arrays["ids"])
        token = answer.note["token"]
        if token:
            self._net.held[state, token] = answer.arrays["ids"]
        return Lease(token, state, Rows(held, found))

    def commit(self, lease: Lease, rows: Rows | None = None) -> None:
        """Write back and acknowledge. Of several peers the last one acknowledges, when all have written."""
        if not len(lease):
            return
        if rows is not None:
            self._check_writes(lease, rows)
        if (lease.state, lease.token) not in self._net.held:
            return self._check_done(lease)
        self._commit(lease, rows)
        self._net.held.pop((lease.state, lease.token), None)

    def _commit(self, lease: Lease, rows: Rows | None) -> None:
        writes = self.states[lease.state].writes
        if self._peers == 1:
            self._writer.write(rows, lease.state, lease.rows.ids, writes)
            return
        if rows is not None and len(rows):
            self._writer.write(rows, lease.state, None)
        if self._finish(lease.state, lease.token, done=True):
            self._writer.write(None, lease.state, lease.rows.ids, writes)
            self._finish(lease.state, lease.token)

    def release(self, lease: Lease) -> None:
        """Hand rows back undone; with peers, once all of them have."""
        if (lease.state, lease.token) in self._net.held:
            self._finish(lease.state, lease.token)
            self._net.held.pop((lease.state, lease.token), None)

    def remaining(self, state: str) -> int:
        """Rows of all open epochs that the state has not acknowledged."""
        self._check_state(state)
        note = {"state": state, "epochs": [[n, *s] for n, s in self._net.shapes.items()], "after": self._net.after}
        return self._net.state(state, Message("remaining", note)).note["rows"]

    def lost(self) -> list[tuple[int, int]]:
        """(epoch, group) of groups whose machine is gone: who put their prompts must put them again, on another machine
        now; all states then do them anew."""
        return [tuple(pair) for pair in self._net.health(next(iter(self.states))).tolist()]

    # checkpoint

    def snapshot(self) -> dict[str, Any]:
        """On the leader what `LocalDock.snapshot` returns, {} elsewhere. Leased rows count as undone."""
        if not self._leader:
            return {}
        return {
            "format": FORMAT,
            "last_epoch": self._net.last_epoch,
            "columns": {n: c.describe() for n, c in self.columns.items()},
            "states": list(self.states),
            "epochs": snapshot.collect(self._net, self.columns, self.states),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Become what a snapshot saw; the leader writes, all ranks call with the same state. Only into a new dock."""
        check_snapshot(state, self.columns)
        if self._net.shapes or self._net.last_epoch >= 0:
            raise ValueError(f"restore into a dock that has opened epoch {self._net.last_epoch}; start a new one")
        for saved in state["epochs"]:
            self.open(saved["number"], saved["groups"], saved["members"])
            if self._leader:
                self._restore_epoch(saved)
        self._net.last_epoch = state["last_epoch"]
        if self._leader:
            for name in self.states:  # answers when its controller knows all that was written here
                self.remaining(name)
        self._net.meet()

    def close(self) -> None:
        """Leave the dock. Its memory on a machine goes with the lowest rank there, so all of a job leave together,
        after the last call of any. Idempotent."""
        self._net.close()

    # inside

    def _check_done(self, lease: Lease) -> None:
        """A lease that is not live here may be committed again only if its rows are done or cleared."""
        self._check_state(lease.state)
        ids = cells.ids_array(lease.rows.ids)
        check_ids(self._net.shapes, self._net.last_epoch, f"commit of state {lease.state!r}", ids)
        note = {
            "state": lease.state,
            "epochs": [[n, *s] for n, s in self._net.shapes.items()],
            "after": self._net.after,
        }
        undone = self._net.state(lease.state, Message("undone", note, {"ids": ids})).arrays["ids"]
        if len(undone):
            raise void(lease, cells.ids_tuple(undone))

    def _ask(self, state: str, ask: Ask, names: Sequence[str], deadline: float) -> Message:
        begin, waited = time.monotonic(), 0.0
        while True:
            left = max(deadline - waited, 0.0)
            message = ask_message(
                state,
                ask,
                names,
                epochs=self._net.shapes,
                after=self._net.after,
                deadline=min(left, TURN_SECONDS),
                waited=waited,
                more=left > TURN_SECONDS,
                lease_seconds=self._net.settings.lease_seconds,
            )
            try:
                answer = self._net.state(state, message, min(left, TURN_SECONDS))
            except (Silent, ConnectionError) as error:
                wanted = "the next rows" if ask.ids is None else f"rows {listed(map(tuple, ask.ids.tolist()))}"
                kind = TimeoutError if isinstance(error, Silent) else ConnectionError
                raise kind(f"lease of {wanted} of state {state!r}, columns {', '.join(names)}: {error}") from error
            if answer.kind != "waiting":
                break
            waited = time.monotonic() - begin
        if "moved" in answer.arrays:
            self._net.learn(answer.arrays["moved"])
        return answer

    def _clear(self, epoch: int, shape: Shape, groups: np.ndarray) -> bool:
        note = {"epoch": epoch, "shape": list(shape), "after": self._net.after, "deadline": self._deadline}
        terms = {}
        for state in self.states:
            message = Message("close", {"state": state, **note}, {"groups": groups})
            terms[state] = self._net.state(state, message, self._deadline).note["term"]
        note = {"epoch": epoch, "shape": list(shape), "terms": terms}
        for warehouse in self._net.directory.warehouses:
            # All of them, whosever homes they are: each must know when an epoch is over.
            with contextlib.suppress(WarehouseLost):  # its cells went with it
                if self._net.warehouse(warehouse, Message("clear", note, {"groups": groups})).kind == "again":
                    return False
        return True

    def _restore_epoch(self, saved: dict[str, Any]) -> None:
        number, members = saved["number"], saved["members"]
        gone = (~saved["alive"]).nonzero().flatten()[::members] // members
        if len(gone):
            self.clear(number, gone.tolist())
        for rows in snapshot.rows_of(saved, self.columns):
            self._writer.write(rows, None, None)
        for state in self.states.keys() & saved["status"].keys():
            done = (saved["status"][state] == DONE).nonzero().flatten().tolist()
            if done:
                self._writer.write(None, state, [SampleId(number, s // members, s % members) for s in done])

    def _finish(self, state: str, token: int, done: bool = False) -> bool:
        note = {"state": state, "token": token, "after": self._net.after, "done": done}
        return self._net.state(state, Message("release", note)).note["last"]

    def _return(self, state: str, token: int) -> None:
        """Hand back what could not be read; where that fails too, its controller takes it back in time."""
        with contextlib.suppress(ValueError, OSError):
            if token:
                self._finish(state, token)
