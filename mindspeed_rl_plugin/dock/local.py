"""The dock of one process: cells in its memory, blocking reads for its threads."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from mindspeed_rl_plugin.dock.api import ColumnSpec, Lease, StateSpec
from mindspeed_rl_plugin.dock.checks import FORMAT, Declared, check_declarations, check_snapshot, named, void
from mindspeed_rl_plugin.dock.epoch import DONE, FREE, LEASED, Epoch, empty
from mindspeed_rl_plugin.dock.report import explain_wait, listed
from mindspeed_rl_plugin.dock.store import check_column, take
from mindspeed_rl_plugin.dock.streaming import pick_stream
from mindspeed_rl_plugin.dock.traffic import Traffic, count
from mindspeed_rl_plugin.rows import Rows, SampleId


class LocalDock(Declared):
    """`Dock` inside one process, safe for threads. See `dock/api.py` for the semantics.

    columns, states: declarations; names are unique and states name declared columns only, or ValueError.
    version_column: the column with the weight version of a row, for streaming.
    """

    def __init__(
        self, columns: Sequence[ColumnSpec], states: Sequence[StateSpec], version_column: str | None = None
    ) -> None:
        self._version_column = version_column
        self.columns = {c.name: c for c in columns}
        self.states = {s.name: s for s in states}
        check_declarations(columns, states)
        self._epochs: dict[int, Epoch] = {}
        self._last_epoch = -1
        self._leases: dict[int, tuple[str, tuple[SampleId, ...]]] = {}
        self._next_token = 1
        self._changed = threading.Condition(threading.RLock())
        self.traffic = Traffic()
        self.served = {
            "states": sorted(self.states),
            "messages": 0,
            "bytes": 0,
            "refused": {"stranger": 0, "malformed": 0},
        }

    # ids

    def open(self, epoch: int, groups: int, members: int) -> None:
        """Declare one rollout. Raises ValueError for a reused or falling epoch and for sizes below 1."""
        if groups < 1 or members < 1 or epoch < 0:
            raise ValueError(f"open({epoch=}, {groups=}, {members=}): the sizes must be at least 1, the epoch 0")
        with self._changed:
            known = self._epochs.get(epoch)
            if known is not None and (known.groups, known.members) == (groups, members):
                return
            if epoch <= self._last_epoch:
                raise ValueError(f"epoch {epoch} cannot be opened after epoch {self._last_epoch}: ids are never reused")
            self._epochs[epoch] = Epoch(epoch, groups, members, self.columns, self.states)
            self._last_epoch = epoch
            self._changed.notify_all()

    def clear(self, epoch: int, groups: Iterable[int] | None = None) -> None:
        """Forget groups (None: the epoch). Repeats change nothing; ValueError for an epoch or group never opened."""
        with self._changed:
            found = self._find(epoch)
            if found is None:
                return
            chosen = range(found.groups) if groups is None else list(groups)
            wrong = [g for g in chosen if not 0 <= g < found.groups]
            if wrong:
                raise ValueError(f"clear: epoch {epoch} has groups 0..{found.groups - 1}, not {wrong[:4]}")
            found.drop(chosen)
            if not bool(found.alive.any()):
                del self._epochs[epoch]
            self._changed.notify_all()

    # cells

    def put(self, rows: Rows | None) -> None:
        """Commit cells; all or, on a ValueError, none."""
        if rows is None or not len(rows):
            return
        with self._changed:
            self._write(rows)
            count(self.traffic.written, "put", rows)

    def lost(self) -> list[tuple[int, int]]:
        """None: there is no other machine."""
        return []

    def read(self, ids: Sequence[SampleId], columns: Sequence[str]) -> Rows:
        """Cells of `ids`. Raises ValueError naming the columns and ids that are not there."""
        ids = named(ids)
        with self._changed:
            self._check_known("read", columns)
            self._check_live("read", ids)
            missing = {c: m for c in columns if (m := self._missing(c, ids))}
            if missing:
                cells = "; ".join(f"column {c!r} of {listed(m)}" for c, m in missing.items())
                raise ValueError(f"read: not committed: {cells}")
            found = self._gather(ids, columns)
            count(self.traffic.read, "read", found)
            return found

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
        **stream: Any,
    ) -> Lease:
        """Wait at most `deadline` seconds for rows of `state`, and take them; stream: see `Dock.lease`."""
        names = self._read_by(state, columns)
        with self._changed:
            chosen = self.pick(state, ids=ids, max_rows=max_rows, min_rows=min_rows, deadline=deadline, **stream)
            rows = self._gather(chosen, names)
            count(self.traffic.read, state, rows)
            if not chosen:
                return Lease(0, state, rows)
            token, self._next_token = self._next_token, self._next_token + 1
            self._mark(state, chosen, LEASED)
            self._leases[token] = (state, tuple(chosen))
            return Lease(token, state, rows)

    def pick(
        self,
        state: str,
        *,
        ids: Sequence[SampleId] | None = None,
        max_rows: int | None = None,
        min_rows: int = 1,
        deadline: float,
        **stream: Any,
    ) -> list[SampleId]:
        """The ids that `lease` would take, after the same wait, without taking them."""
        begin = time.monotonic()
        ids = None if ids is None else named(ids)
        self._check_stream(state, stream, self._version_column is not None)
        with self._changed:
            self._check_request(state, ids, max_rows, min_rows)
            while True:
                waited = time.monotonic() - begin
                if ids is not None:
                    chosen = self._ready_ids(state, ids)
                elif stream:
                    ask = {"max_rows": max_rows, "min_rows": min_rows, **stream}
                    chosen = pick_stream(self._epochs, state, self._version_column, ask, waited, deadline)
                else:
                    chosen = self._ready(state, max_rows, min_rows)
                if chosen is not None:
                    return chosen
                if waited >= deadline:
                    raise TimeoutError(self._explain(state, ids, min_rows, max(deadline, 0.0)))
                self._changed.wait(min(deadline - waited, stream.get("linger") or deadline))

    def commit(self, lease: Lease, rows: Rows | None = None) -> None:
        """Write back and acknowledge, once; ValueError for foreign cells, missing ones, or a lease handed back."""
        with self._changed:
            if self._is_live(lease):
                self._check_complete(lease, rows)
            self.write_back(lease, rows)
            if not self._is_live(lease):
                self._check_done(lease)
                return
            state, ids = lease.state, lease.rows.ids
            self._mark(state, ids, DONE)
            del self._leases[lease.token]
            self._changed.notify_all()

    def write_back(self, lease: Lease, rows: Rows | None) -> None:
        """The first half of `commit`: write without acknowledging. Only live leases write."""
        with self._changed:
            if rows is not None:
                self._check_writes(lease, rows)
                if self._is_live(lease) and len(rows):
                    self._write(rows)
                    count(self.traffic.written, lease.state, rows)

    def release(self, lease: Lease) -> None:
        """Hand rows back undone. A lease that is no longer live changes nothing."""
        with self._changed:
            if self._is_live(lease):
                del self._leases[lease.token]
                self._mark(lease.state, lease.rows.ids, FREE)
                self._changed.notify_all()

    def remaining(self, state: str) -> int:
        """Rows not yet acknowledged by `state`."""
        with self._changed:
            self._check_state(state)
            return sum(e.count(state, FREE, LEASED) for e in self._epochs.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all cells held."""
        with self._changed:
            return sum(c.nbytes for e in self._epochs.values() for c in e.cells.values())

    # checkpoint

    def snapshot(self) -> dict[str, Any]:
        """Plain tensors, ints and strings; loads with `torch.load(weights_only=True)`."""
        with self._changed:
            return {
                "format": FORMAT,
                "last_epoch": self._last_epoch,
                "columns": {n: c.describe() for n, c in self.columns.items()},
                "states": list(self.states),
                "epochs": [self._epochs[n].snapshot() for n in sorted(self._epochs)],
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a snapshot. Columns and states that are not declared here are left behind: nobody reads them.

        Raises ValueError where the snapshot holds rows with a column that is declared otherwise here.
        """
        check_snapshot(state, self.columns)
        epochs = {}
        for packed in state["epochs"]:
            epoch = Epoch(packed["number"], packed["groups"], packed["members"], self.columns, self.states)
            epoch.fill(packed)
            epochs[epoch.number] = epoch
        with self._changed:
            self._epochs, self._last_epoch, self._leases = epochs, state["last_epoch"], {}
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing to leave."""

    # inside; the lock is held

    def _is_live(self, lease: Lease) -> bool:
        """Whether rows are out under this lease; tokens start anew after a restore, so they alone do not tell."""
        return self._leases.get(lease.token) == (lease.state, tuple(lease.rows.ids))

    def _find(self, number: int) -> Epoch | None:
        """The epoch, or None when it was cleared. Raises ValueError when it was never opened."""
        if number not in self._epochs and not 0 <= number <= self._last_epoch:
            raise ValueError(f"epoch {number} was not opened; open: {listed(sorted(self._epochs))}")
        return self._epochs.get(number)

    def _locate(self, ids: Sequence[SampleId]) -> list[tuple[Epoch, list[int], list[int]]]:
        """By epoch: indices into `ids` and row numbers, without the cleared ones. ValueError for ids never opened."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        alive: dict[int, list[bool]] = {}
        for i, sample in enumerate(ids):
            epoch = self._find(sample.epoch)
            if epoch is None:
                continue
            slot = epoch.slot(sample)
            if epoch.number not in alive:
                alive[epoch.number] = epoch.alive.tolist()
            if alive[epoch.number][slot]:
                index, slots = found.setdefault(epoch.number, ([], []))
                index.append(i)
                slots.append(slot)
        return [(self._epochs[number], index, slots) for number, (index, slots) in found.items()]

    def _those(self, ids: Sequence[SampleId], mask: Callable[[Epoch], Tensor]) -> list[SampleId]:
        """The ids, cleared ones left out, whose row is set in `mask(epoch)`."""
        found = []
        for epoch, index, slots in self._locate(ids):
            hit = mask(epoch)[slots].tolist()
            found += [ids[i] for i, h in zip(index, hit, strict=True) if h]
        return found

    def _missing(self, column: str, ids: Sequence[SampleId]) -> list[SampleId]:
        return self._those(ids, lambda e: ~e.present(column))

    def _mark(self, state: str, ids: Sequence[SampleId], status: int) -> None:
        for epoch, _, slots in self._locate(ids):
            epoch.status[state][slots] = status

    def _write(self, rows: Rows) -> None:
        self._check_known("put", rows.columns)
        if len(set(rows.ids)) != len(rows.ids):
            raise ValueError(f"put: an id occurs twice among {listed(rows.ids)}")
        for name, column in rows.columns.items():
            check_column(self.columns[name], column)
        planned = []
        for epoch, index, slots in self._locate(rows.ids):
            lengths = epoch.lengths.clone()
            for name, column in rows.columns.items():
                part = column if len(index) == len(rows) else take(column, index)
                chosen, targets = epoch.plan_write(name, part, slots, lengths)
                planned.append((epoch, name, part, chosen, targets))
            planned.append((epoch, None, lengths, [], []))
        for epoch, name, part, chosen, targets in planned:
            if name is None:
                epoch.lengths = part
            else:
                epoch.cells[name].write(targets, part if len(chosen) == len(part) else take(part, chosen))
        self._changed.notify_all()

    def _gather(self, ids: Sequence[SampleId], columns: Sequence[str]) -> Rows:
        parts = []
        for epoch, index, slots in self._locate(ids):
            parts.append(Rows(tuple(ids[i] for i in index), {c: epoch.gather(c, slots) for c in columns}))
        if not parts:
            return Rows((), {c: empty(self.columns[c]) for c in columns})
        return parts[0] if len(parts) == 1 else Rows.concat(parts).select(ids)

    def _ready(self, state: str, max_rows: int | None, min_rows: int) -> list[SampleId] | None:
        """Ready rows in id order; [] when all is acknowledged; None when it is worth waiting."""
        chosen: list[SampleId] = []
        full = False
        limit = sys.maxsize if max_rows is None else max_rows
        for number in sorted(self._epochs):
            epoch = self._epochs[number]
            step = epoch.members if self.states[state].whole_groups else 1
            if limit < step:
                raise ValueError(f"lease of state {state!r}: max_rows {max_rows} is less than one group of {step}")
            slots = epoch.available(state).nonzero().flatten().tolist()
            room = min(len(slots), limit - len(chosen))
            chosen += epoch.ids(slots[: room // step * step])
            full = len(chosen) + step > limit
            if full:
                break
        free = sum(e.count(state, FREE) for e in self._epochs.values())
        if chosen and (full or len(chosen) >= min(min_rows, free)):
            return chosen
        return None if self.remaining(state) else []

    def _ready_ids(self, state: str, ids: Sequence[SampleId]) -> list[SampleId] | None:
        """The ids when all are ready, None when it is worth waiting."""
        self._check_live(f"lease of state {state!r}", ids)
        done = self._those(ids, lambda e: e.status[state] == DONE)
        if done:
            raise ValueError(
                f"lease of state {state!r}: already acknowledged: {listed(done)}; each row is delivered once"
            )
        return None if self._those(ids, lambda e: ~e.available(state)) else list(ids)

    def _check_request(self, state: str, ids: Sequence[SampleId] | None, max_rows: int | None, min_rows: int) -> None:
        self._check_state(state)
        if min_rows < 1 or (max_rows is not None and max_rows < min_rows):
            raise ValueError(f"lease of state {state!r}: need 1 <= min_rows <= max_rows, got {min_rows} and {max_rows}")
        if ids is None:
            return
        asked = set(ids)
        if len(asked) != len(ids):
            raise ValueError(f"lease of state {state!r}: an id occurs twice among {listed(ids)}")
        if self.states[state].whole_groups:
            self._check_live(f"lease of state {state!r}", ids)
            for sample in ids:
                members = self._epochs[sample.epoch].members
                lacking = [m for m in range(members) if SampleId(sample.epoch, sample.group, m) not in asked]
                if lacking:
                    raise ValueError(
                        f"state {state!r} takes whole groups: group {sample.group} of epoch {sample.epoch} "
                        f"is asked without members {lacking}"
                    )

    def _check_live(self, call: str, ids: Sequence[SampleId]) -> None:
        live = {i for _, index, _ in self._locate(ids) for i in index}
        gone = [sample for i, sample in enumerate(ids) if i not in live]
        if gone:
            raise ValueError(f"{call}: cleared, their cells are gone: {listed(gone)}")

    def _check_complete(self, lease: Lease, rows: Rows | None) -> None:
        """Raise ValueError where a column that the state writes would be missing after `rows`."""
        if rows is not None:
            self._check_writes(lease, rows)
        for column in self.states[lease.state].writes:
            size = 2 if self.columns[column].level == "group" else 3  # of what tells its cells apart
            brought = {i[:size] for i in rows.ids} if rows is not None and column in rows.columns else ()
            missing = [i for i in self._missing(column, lease.rows.ids) if i[:size] not in brought]
            if missing:
                raise ValueError(
                    f"commit: state {lease.state!r} must write column {column!r}; it is missing for {listed(missing)}"
                )

    def _check_done(self, lease: Lease) -> None:
        """A lease that is not live may be committed again only if its rows are done or cleared."""
        self._check_state(lease.state)
        undone = self._those(lease.rows.ids, lambda e: e.status[lease.state] != DONE)
        if undone:
            raise void(lease, undone)

    def _explain(self, state: str, ids: Sequence[SampleId] | None, min_rows: int, deadline: float) -> str:
        asked = f"{len(ids)} rows asked by id" if ids is not None else f"at least {min_rows} rows"
        if ids is None:
            undone = [(e, (e.alive & (e.status[state] != DONE)).nonzero()) for _, e in sorted(self._epochs.items())]
            ids = [i for e, slots in undone for i in e.ids(slots.flatten().tolist())]
        missing = {c: self._missing(c, ids) for c in self.states[state].reads}
        wanted = set(ids)
        held = {t: [i for i in h if i in wanted] for t, (owner, h) in self._leases.items() if owner == state}
        ready = sum(int(e.available(state).sum()) for e in self._epochs.values())
        return explain_wait(self.states, state, asked, deadline, missing, held, ready)
