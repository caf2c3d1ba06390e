"""What a controller knows of one epoch: where cells lie, what is ready, whose share is whose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mindspeed_rl_plugin.dock.api import ColumnSpec, StateSpec
from mindspeed_rl_plugin.dock.distributed.records import Record, Shape, Sheet, slots_of_groups

FREE, LEASED, DONE, STALE = 0, 1, 2, 3  # from DONE on there is nothing left to do


class Places:
    """Where the cells of some columns lie that are numbered alike: `[columns, cells]` arrays, segment -1 for none."""

    def __init__(self, names: Sequence[str], cells: int) -> None:
        self.row = {name: i for i, name in enumerate(names)}
        self.segment = np.full((len(names), cells), -1, np.int32)
        self.offset = np.zeros((len(names), cells), np.int64)
        self.length = np.zeros((len(names), cells), np.int32)
        self._known: dict[tuple[str, ...], tuple[slice | list[int], slice | list[int]] | None] = {}

    def among(self, names: tuple[str, ...]) -> tuple[slice | list[int], slice | list[int]] | None:
        """Rows of these arrays for those of `names` that are here, and which of `names` they are; None for none."""
        if names not in self._known:
            self._known[names] = self._among(names)
        return self._known[names]

    def _among(self, names: tuple[str, ...]) -> tuple[slice | list[int], slice | list[int]] | None:
        theirs = [i for i, name in enumerate(names) if name in self.row]
        mine = [self.row[names[i]] for i in theirs]
        every = slice(None)  # numpy takes all of them much faster than a list of them
        found = (every if mine == list(range(len(self.row))) else mine, every if len(theirs) == len(names) else theirs)
        return found if theirs else None

    def enter(self, mine: slice | list[int], at: slice | np.ndarray, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Lay down `[rows of mine, n]` segments, offsets and lengths of cells `at`; `[n]` int: how many were absent."""
        where = (mine, at) if isinstance(mine, slice) or isinstance(at, slice) else np.ix_(mine, at)
        new = (self.segment[where] < 0).sum(0)
        self.segment[where], self.offset[where], self.length[where] = parts
        return new


class EpochView:
    """Rows are numbered group * members + member; a group column is kept by group."""

    def __init__(self, shape: Shape, spec: StateSpec, columns: Mapping[str, ColumnSpec]) -> None:
        rows = shape.groups * shape.members
        self.shape, self.spec = shape, spec
        self.grouped = {name for name, c in columns.items() if c.level == "group"}
        self.tokens = next((n for n in spec.reads if columns[n].level == "token"), None)
        self.status = np.zeros(rows, np.uint8)
        self.alive = np.ones(shape.groups, bool)
        self.closing = np.zeros(shape.groups, bool)
        self.version = np.full(rows, -1, np.int64)
        self.home = np.full(shape.groups, -1, np.int32)  # warehouse that told of the group's cells
        self.lost = np.zeros(shape.groups, bool)  # the home is gone and nothing was written anew
        self.assigned: np.ndarray | None = None  # [groups] home of each group at first, once it is asked for
        by_row = [n for n in spec.reads if n not in self.grouped]
        by_group = [n for n in spec.reads if n in self.grouped]
        self._places = {False: Places(by_row, rows), True: Places(by_group, shape.groups)}  # of a group column?
        parts = self._places.values()
        self.segment = {n: p.segment[i] for p in parts for n, i in p.row.items()}
        self.offset = {n: p.offset[i] for p in parts for n, i in p.row.items()}
        self.length = {n: p.length[i] for p in parts for n, i in p.row.items()}
        self.lacking = np.full(rows, len(spec.reads), np.int16)  # columns that a row has not got yet

    def comes_from_elsewhere(self, record: Record) -> bool:
        """Whether a record tells of groups that another warehouse has told of, or that are another one's at first."""
        for groups in self._groups_of(record):
            home = self.home[groups]
            if (home == record.warehouse).all():
                continue
            if (home >= 0).any() or self.assigned is None or (self.assigned[groups] != record.warehouse).any():
                return True
        return False

    def touched(self, record: Record) -> np.ndarray:
        """`[groups]` bool: of which a record tells."""
        found = np.zeros(self.shape.groups, bool)
        for groups in self._groups_of(record):
            found[groups] = True
        return found

    def _groups_of(self, record: Record) -> Iterator[np.ndarray | slice]:
        members = self.shape.members
        for sheet in record.sheets:
            for grouped in {name in self.grouped for name in sheet.names}:
                at = sheet.at
                if grouped:
                    yield at
                else:
                    yield slice(at.start // members, -(-at.stop // members)) if isinstance(at, slice) else at // members
        rows = record.acks.get(self.spec.name)
        if rows is not None:
            yield rows // members

    def enter(self, record: Record, refused: np.ndarray | None = None) -> None:
        """Take in new cells and acknowledgements; cleared groups stay cleared. refused: `[groups]` bool, groups of
        which it is not believed."""
        if refused is not None:
            record = record.without(refused, self.grouped, self.shape.members)
        whole, any_lost = bool(self.alive.all()), bool(self.lost.any())
        for sheet in record.sheets:
            for grouped in {name in self.grouped for name in sheet.names}:
                self._enter(sheet, grouped, record.warehouse, whole, any_lost)
        if record.versions is not None:
            self.version[record.versions[0]] = record.versions[1]
        rows = record.acks.get(self.spec.name)
        if rows is not None:
            self.status[rows] = DONE
            self.home[rows // self.shape.members] = record.warehouse

    def _enter(self, sheet: Sheet, grouped: bool, warehouse: int, whole: bool, any_lost: bool) -> None:
        """The columns of a sheet that are numbered by group, or those that are numbered by row."""
        members, at = self.shape.members, sheet.at
        live: slice | np.ndarray = slice(None)
        if isinstance(at, slice) and whole:
            groups = at if grouped else slice(at.start // members, -(-at.stop // members))
        else:
            groups = sheet.slots if grouped else sheet.slots // members
            live = self.alive[groups]
            at = sheet.slots[live]
        self.home[groups] = warehouse
        if any_lost:
            self.lost[groups] = False
        among = self._places[grouped].among(sheet.names)
        if among is None:
            return
        mine, theirs = among
        every = isinstance(theirs, slice) and isinstance(live, slice)
        parts = sheet[3:] if every else [part[theirs][:, live] for part in sheet[3:]]
        new = self._places[grouped].enter(mine, at, parts)
        if not grouped:
            self.lacking[at] -= new.astype(np.int16)
        elif new.any():
            self.lacking.reshape(self.shape)[at] -= new.astype(np.int16)[:, None]

    def locations(self, rows: np.ndarray, columns: Sequence[str]) -> list[np.ndarray]:
        """Segment, offset and length `[C, B]` of cells of rows."""
        parts = self._places[False]
        if all(name in parts.row for name in columns):
            mine = [parts.row[name] for name in columns]
            where = (slice(None), rows) if mine == list(range(len(parts.row))) else np.ix_(mine, rows)
            return [x[where] for x in (parts.segment, parts.offset, parts.length)]
        groups = rows // self.shape.members
        at = [groups if name in self.grouped else rows for name in columns]
        kept = (self.segment, self.offset, self.length)
        return [np.stack([x[name][where] for name, where in zip(columns, at, strict=True)]) for x in kept]

    def forget(self, groups: np.ndarray) -> None:
        """The cells of groups are gone for good."""
        self.alive[groups] = False
        self._absent(groups)

    def lose(self, groups: np.ndarray) -> np.ndarray:
        """The home of groups is gone: their cells must be written again, and all work on them done again."""
        groups = groups[self.alive[groups]]
        self._absent(groups)
        self.lost[groups], self.home[groups] = True, -1
        slots = slots_of_groups(groups, self.shape.members)
        self.status[slots] = FREE
        return slots

    def retire(self, old: np.ndarray) -> None:
        """Free rows of `old` `[rows]` are never given out; where groups are whole, their whole groups are not."""
        old = old & (self.status == FREE)
        if self.spec.whole_groups:
            old = self._by_row(old.reshape(self.shape).any(1)) & (self.status == FREE)
        self.status[old] = STALE

    def available(self) -> np.ndarray:
        """`[rows]` bool: can be given out now."""
        mask = (self.status == FREE) & (self.lacking == 0)
        if not self.alive.all() or self.closing.any():
            mask &= self._by_row(self.alive & ~self.closing)
        if self.spec.whole_groups:
            mask = self._by_row(mask.reshape(self.shape).all(1))
        return mask

    def undone(self) -> np.ndarray:
        """`[rows]` bool: still to be acknowledged."""
        mask = self.status < DONE
        if not self.alive.all() or self.closing.any():
            mask &= self._by_row(self.alive & ~self.closing)
        return mask

    @property
    def unit(self) -> int:
        """Rows that are only given out together."""
        return self.shape.members if self.spec.whole_groups else 1

    def units(self, rows: np.ndarray) -> np.ndarray:
        """`[units, rows of a unit]`."""
        return rows.reshape(-1, self.unit)

    def lengths(self, units: np.ndarray) -> np.ndarray:
        """`[units]` tokens; zeros for a state that reads no tokens."""
        return np.zeros(len(units), np.int64) if self.tokens is None else self.length[self.tokens][units].sum(1)

    def share(self, share: tuple[int, int] | None, balance: bool) -> np.ndarray | None:
        """Row numbers that one of several consumers may get, in id order; None where lengths are not known yet."""
        units = self.units(slots_of_groups(self.alive.nonzero()[0], self.shape.members))
        if share is None:
            return units.reshape(-1)
        consumer, consumers = share
        if not balance or self.tokens is None:
            return even(units, consumer, consumers).reshape(-1)
        if (self.segment[self.tokens][units] < 0).any():
            return None
        return units[balanced(self.lengths(units), consumers)[consumer]].reshape(-1)

    def wanted(self, share: tuple[int, int] | None, balance: bool) -> np.ndarray:
        """Row numbers that one of several consumers waits for: what is undone of its share; before that is known, the
        rows whose lengths it needs."""
        mine = self.share(share, balance)
        if mine is None:
            return (self._by_row(self.alive) & (self.segment[self.tokens] < 0)).nonzero()[0]
        return mine[self.undone()[mine]]

    def _by_row(self, groups: np.ndarray) -> np.ndarray:
        return np.repeat(groups, self.shape.members)

    def _absent(self, groups: np.ndarray) -> None:
        slots = slots_of_groups(groups, self.shape.members)
        for grouped, places in self._places.items():
            places.segment[:, groups if grouped else slots] = -1
        self.lacking[slots] = len(self.spec.reads)


def balanced(lengths: np.ndarray, bins: int) -> list[np.ndarray]:
    """Indices of `lengths` dealt into `bins` of equal count (to one) and nearly equal sum, each in rising order.

    Longest first, each to the lightest bin that still has room; ties by index, so the result depends on lengths alone.
    """
    room = [len(part) for part in (even(np.arange(len(lengths)), i, bins) for i in range(bins))]
    sums, out = [0] * bins, [[] for _ in range(bins)]
    for i in np.argsort(-lengths, kind="stable").tolist():
        best = min((b for b in range(bins) if len(out[b]) < room[b]), key=lambda b: (sums[b], b))
        out[best].append(i)
        sums[best] += int(lengths[i])
    return [np.array(sorted(part), np.int64) for part in out]


def even(items: np.ndarray, consumer: int, consumers: int) -> np.ndarray:
    """The contiguous share of one of several consumers, the first ones larger by one where it does not divide."""
    begin = 0
    for i in range(consumer + 1):
        size = -(-(len(items) - begin) // (consumers - i))
        if i == consumer:
            return items[begin : begin + size]
        begin += size
    raise ValueError(f"consumer {consumer} is not one of 0..{consumers - 1}")
