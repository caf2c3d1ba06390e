"""The controller of one worker state: knows which rows are ready, leased and done. Metadata only, no sockets, no clock.

It learns of cells from the records of the warehouses. Rows are given out under a lease. A lease ends when its holder
releases it, when its rows are acknowledged or cleared, when its time is over, when its holder has ended, or when the
job takes it back (`Reclaim`). Then rows that are not acknowledged are given out again.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from mindspeed_rl_plugin.dock.api import LISTED_ITEMS, ColumnSpec, StateSpec, VersionBound, listed
from mindspeed_rl_plugin.dock.messages import Ask, Grant, Record, Shape
from mindspeed_rl_plugin.dock.places import DONE, FREE, LEASED, EpochView, Numbers, row_ids, rows_of_groups

EMPTY = np.empty(0, np.int32)
PickedRows = list[tuple[int, np.ndarray]]  # (epoch, row numbers), in the order of delivery


@dataclass
class Held:
    """A live lease."""

    token: int
    rows: PickedRows
    holder: Hashable
    expires: float  # by the clock of `Core`


class Controller:
    """spec: of this state; columns, states: all declared ones, by name."""

    def __init__(self, spec: StateSpec, columns: Mapping[str, ColumnSpec], states: Mapping[str, StateSpec]) -> None:
        self.spec, self.columns, self.states = spec, columns, states
        self.applied: dict[int, int] = {}  # warehouse -> number of the newest record that was applied
        self._epochs: dict[int, EpochView] = {}
        self._gone = Numbers()  # epochs that are cleared
        self._leases: dict[int, Held] = {}
        self._next = 1 + (secrets.randbits(30) << 20)  # random, so that tokens of another dock are not valid here

    # learning

    def open(self, epoch: int, shape: Shape) -> None:
        """Learn the ids of an epoch; repeats change nothing. Raises ValueError for another shape."""
        known = self._epochs.get(epoch)
        if known is not None and known.shape != shape:
            raise ValueError(f"epoch {epoch} is open with {known.shape}, not {shape}")
        if known is None and epoch not in self._gone:
            self._epochs[epoch] = EpochView(shape, self.spec, self.columns)

    def apply(self, record: Record) -> bool:
        """Apply a record; the records of a warehouse come in order. Returns whether requests that wait for this state
        may continue."""
        self.applied[record.warehouse] = record.seq
        mine = record.state == self.spec.name
        if not (record.cells or mine or record.cleared is not None):
            return False
        self.open(record.epoch, record.shape)
        view = self._epochs.get(record.epoch)
        if view is None:  # all its groups are cleared
            return False
        ready = view.learn(record)
        touched = [record.rows] if mine else []
        if record.cleared is not None:
            touched.append(rows_of_groups(record.cleared, view.shape.members))
        for token in np.unique(view.lease[np.concatenate([EMPTY, *touched])]).tolist():  # these may end now
            if token in self._leases and self._settled(self._leases[token]):
                self._end(self._leases[token])
        if not view.alive.any():
            del self._epochs[record.epoch]
            self._gone.add(record.epoch)
        return ready or mine or record.cleared is not None

    # giving out

    def take(self, ask: Ask, holder: Hashable, expires: float) -> Grant | None:
        """Lease rows. The grant has token 0 if every row is acknowledged, or if the asker needs other weights. None if
        the asker must wait: until its rows are ready or, outside of the job, for new rows if every row is acknowledged.
        Raises ValueError for ids that cannot be leased."""
        for number in set() if ask.ids is None else sorted({*ask.ids[:, 0].tolist()}):
            if number in self._gone:
                raise ValueError(f"state {self.spec.name!r}: epoch {number} is cleared, its cells no longer exist")
            if number not in self._epochs:
                return None  # the epoch's first record is on its way
        rows = pick(self._epochs, ask)
        if isinstance(rows, VersionBound):
            return Grant.empty(len(self.spec.reads), rows)
        if not rows:
            more = ask.ids is None and ask.seconds is not None
            return None if rows is None or more else Grant.empty(len(self.spec.reads))
        token, self._next = self._next, self._next + 1
        self._leases[token] = Held(token, rows, holder, expires)
        for epoch, part in rows:
            self._epochs[epoch].status[part] = LEASED
            self._epochs[epoch].lease[part] = token
        return self.grant(token, rows)

    def grant(self, token: int, rows: PickedRows) -> Grant:
        """The answer to the holder: ids, and places of the cells."""
        views = [(number, self._epochs[number], part) for number, part in rows]
        places = [view.cells(self.spec.reads, part) for _, view, part in views]
        return Grant(
            token,
            self._ids(rows),
            np.concatenate([view.owner[part // view.shape.members] for _, view, part in views]),
            *(np.concatenate(tables, 1) for tables in zip(*places, strict=True)),
            [(number, view.shape) for number, view, _ in views],
        )

    def end(self, over: Callable[[Held], bool]) -> bool:
        """End the leases for which `over` is true; their rows that are not acknowledged can be leased again. Returns
        whether a lease ended."""
        ended = [held for held in self._leases.values() if over(held)]
        for held in ended:
            self._end(held)
        return bool(ended)

    def retire(self, epoch: int, groups: np.ndarray) -> list[str]:
        """First half of clearing: do not lease these groups any more. Returns the names of the processes that still
        hold leased rows of them."""
        view = self._epochs.get(epoch)
        if view is None:
            return []
        view.retired[groups] = True
        rows = rows_of_groups(groups, view.shape.members)
        rows = rows[view.status[rows] == LEASED]
        held = (h for h in self._leases.values() for n, part in h.rows if n == epoch and np.isin(part, rows).any())
        return sorted({str(h.holder) for h in held})

    # looking

    def look(self, ids: np.ndarray | None, done: bool) -> Grant:
        """Ids and owners of the acknowledged rows if `done`, else of the other rows, leased ones included; among `ids`,
        or among all rows. Rows of cleared and retired groups are left out."""
        masks = {n: view.done() if done else view.undone() for n, view in sorted(self._epochs.items())}
        if ids is None:
            rows = [(number, mask.nonzero()[0]) for number, mask in masks.items()]
        else:
            rows = [(number, part[masks[number][part]]) for number, part in rows_of(self._epochs, ids)]
        owners = [self._epochs[n].owner[part // self._epochs[n].shape.members] for n, part in rows]
        shapes = [(number, self._epochs[number].shape) for number in dict(rows)]
        return replace(Grant.empty(0), ids=self._ids(rows), owner=np.concatenate([*owners, EMPTY]), shapes=shapes)

    def at_work(self) -> tuple[np.ndarray, Counter[str]]:
        """For a person: `[groups, 2]` ids of the groups that have ready rows without an acknowledgement, and the number
        of these rows by the name of their holder. Takes no lock, so that it can be called while another thread hangs.
        """
        ready = [(number, view.undone() & (view.lacking == 0)) for number, view in sorted(self._epochs.items())]
        ids, rows = self._ids([(number, mask.nonzero()[0]) for number, mask in ready]), Counter[str]()
        for held in list(self._leases.values()):
            views = ((self._epochs[number], part) for number, part in held.rows if number in self._epochs)
            rows[str(held.holder)] += sum(int((view.status[part] == LEASED).sum()) for view, part in views)
        rows["nobody"] = len(ids) - rows.total()
        return np.unique(ids[:, :2], axis=0), +rows

    def explain(self, ask: Ask) -> str:
        """Why a request was not served within its deadline: which columns are missing, which states write them, and
        which leases hold rows; the first few of each."""
        wanted, reasons = self.look(ask.ids, done=False).ids, list[str]()
        for name in self.spec.reads:
            parts = [(n, self._epochs[n], rows) for n, rows in rows_of(self._epochs, wanted)]
            missing = self._ids([(n, rows[view.absent((name,), rows)[0]]) for n, view, rows in parts])
            writers = " or ".join(repr(s.name) for s in self.states.values() if name in s.writes)
            writer = f"state {writers}" if writers else "a producer's put"
            if len(missing):
                reasons.append(f"column {name!r} (written by {writer}) is missing for {listed(missing)}")
        asked = {number: np.zeros(len(view.status), bool) for number, view in self._epochs.items()}
        for number, rows in rows_of(self._epochs, wanted):
            asked[number][rows] = True
        holding = (
            f"lease {token} holds {listed(ids)}"
            for token, held in self._leases.items()
            if len(ids := self._ids([(n, rows[asked[n][rows]]) for n, rows in held.rows if n in asked]))
        )
        reasons += itertools.islice(holding, LISTED_ITEMS)
        rows = "rows" if ask.ids is None else f"{len(ask.ids)} rows asked by id"
        whole = " (whole groups)" if self.spec.whole_groups else ""
        ready = sum(int(view.available().sum()) for view in self._epochs.values())
        why = "; ".join(reasons) or "there are no other rows in open epochs"
        return f"state {self.spec.name!r} waited {ask.deadline:g} s for {rows}{whole}, {ready} are ready: {why}"

    # inside

    def _end(self, held: Held) -> None:
        del self._leases[held.token]
        for number, rows in held.rows:
            view = self._epochs.get(number)
            if view is not None:
                view.status[rows[view.status[rows] == LEASED]] = FREE

    def _settled(self, held: Held) -> bool:
        """Whether all rows of a lease are acknowledged or cleared."""
        views = ((self._epochs[number], rows) for number, rows in held.rows if number in self._epochs)
        return all(((v.status[rows] == DONE) | ~v.alive[rows // v.shape.members]).all() for v, rows in views)

    def _ids(self, rows: PickedRows) -> np.ndarray:
        """`[n, 3]` ids of rows, without those of cleared epochs."""
        known = [(number, self._epochs[number].shape, part) for number, part in rows if number in self._epochs]
        parts = [row_ids(number, shape.members, part) for number, shape, part in known]
        return np.concatenate([np.empty((0, 3), np.int64), *parts])


def pick(epochs: Mapping[int, EpochView], ask: Ask) -> PickedRows | VersionBound | None:
    """The rows to lease; [] if every row is acknowledged; None if the asker must wait; the bound of the next rows if it
    does not allow the asker's version. Raises ValueError for ids that are cleared or acknowledged and, if the state
    takes complete groups, for incomplete groups and for `max_rows` below one group."""
    if ask.ids is not None:
        asked = rows_of(epochs, ask.ids)
        for number, rows in asked:
            _check(epochs[number], number, rows)
        return asked if all(epochs[number].available()[rows].all() for number, rows in asked) else None
    unit = max((epoch.unit for epoch in epochs.values()), default=1)
    if ask.max_rows is not None and ask.max_rows < unit:
        name = next(iter(epochs.values())).spec.name
        raise ValueError(f"lease of state {name!r}: max_rows {ask.max_rows} is less than one group of {unit}")
    ready = _ready(epochs, ask)
    may = [ask.version is None or epochs[number].shape.bound.allows(ask.version) for number, _ in ready]
    if may and not may[0]:
        return epochs[ready[0][0]].shape.bound
    ready = ready[: may.index(False)] if False in may else ready
    batch = _first_rows(epochs, ready, ask.max_rows) if ask.share is None else ready[:1]
    if not batch and any(epoch.undone().any() for epoch in epochs.values()):
        return None  # rows that are not ready yet, or that other leases may give back
    return batch


def rows_of(epochs: Mapping[int, EpochView], ids: np.ndarray) -> PickedRows:
    """Row numbers of ids `[B, 3]`, in that order; ids of epochs that are not in `epochs` are left out."""
    parts = np.split(ids, np.flatnonzero(np.diff(ids[:, 0])) + 1)
    known = [(int(part[0, 0]), part) for part in parts if len(part) and int(part[0, 0]) in epochs]
    return [(number, part[:, 1] * epochs[number].shape.members + part[:, 2]) for number, part in known]


def _ready(epochs: Mapping[int, EpochView], ask: Ask) -> PickedRows:
    """Rows that can be leased, by epoch. With `ask.share`: rows of this part, if all its undone rows can be leased."""
    out: PickedRows = []
    for number, epoch in sorted(epochs.items()):
        rows = epoch.available().nonzero()[0]
        if ask.share is not None:
            part, parts = ask.share
            first, end = (p * len(epoch.status) // parts for p in (part, part + 1))
            rows = rows[(rows >= first) & (rows < end)]
            if len(rows) < epoch.undone()[first:end].sum():
                continue
        if ask.near is not None and (epoch.owner != ask.near).any():
            far = epoch.owner[rows // epoch.shape.members] != ask.near
            rows = np.concatenate([rows[~far], rows[far]])
        if len(rows):
            out.append((number, rows))
    return out


def _first_rows(epochs: Mapping[int, EpochView], ready: PickedRows, most: int | None) -> PickedRows:
    """The first `most` rows (None: all); if the state takes complete groups, an incomplete last group is left out."""
    out: PickedRows = []
    for number, rows in ready:
        kept = len(rows) if most is None else min(most, len(rows)) // epochs[number].unit * epochs[number].unit
        if kept:
            out.append((number, rows[:kept]))
        if kept < len(rows):
            break
        most = None if most is None else most - kept
    return out


def _check(epoch: EpochView, number: int, rows: np.ndarray) -> None:
    """Raise ValueError for rows that will never be ready."""
    name, members = epoch.spec.name, epoch.shape.members
    group, member = np.divmod(rows, members)
    gone = ~(epoch.alive & ~epoch.retired)[group]
    if gone.any():
        raise ValueError(f"state {name!r}: {_first(epoch, number, rows[gone])} is cleared, its cells no longer exist")
    done = epoch.status[rows] == DONE
    if done.any():
        asked = _first(epoch, number, rows[done])
        raise ValueError(f"state {name!r}: already acknowledged: {asked}; each row is delivered once")
    count = np.bincount(group) if epoch.spec.whole_groups else group[:0]
    for part in ((count > 0) & (count < members)).nonzero()[0].tolist():
        lacking = sorted({*range(members)} - {*member[group == part].tolist()})
        raise ValueError(
            f"state {name!r} takes complete groups: group {part} of epoch {number} was asked without members {lacking}"
        )


def _first(epoch: EpochView, number: int, rows: np.ndarray) -> tuple[int, ...]:
    return tuple(row_ids(number, epoch.shape.members, rows[:1])[0].tolist())
