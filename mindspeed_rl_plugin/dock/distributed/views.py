"""What a controller knows of one epoch: where cells lie, what is ready, whose share is whose."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mindspeed_rl_plugin.dock.api import ColumnSpec, StateSpec
from mindspeed_rl_plugin.dock.distributed.records import Record, Shape, slots_of_groups

FREE, LEASED, DONE, STALE = 0, 1, 2, 3


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
        self.segment: dict[str, np.ndarray] = {}
        self.offset: dict[str, np.ndarray] = {}
        self.length: dict[str, np.ndarray] = {}
        for name in spec.reads:
            n = shape.groups if name in self.grouped else rows
            self.segment[name] = np.full(n, -1, np.int32)
            self.offset[name] = np.zeros(n, np.int64)
            self.length[name] = np.zeros(n, np.int32)

    def enter(self, record: Record) -> None:
        """Take in new cells and acknowledgements; cleared groups stay cleared."""
        members, whole = self.shape.members, bool(self.alive.all())
        any_lost = bool(self.lost.any())
        for name, cells in record.columns.items():
            at, grouped = record.at[name], name in self.grouped
            if isinstance(at, slice) and whole:
                groups = at if grouped else slice(at.start // members, -(-at.stop // members))
                self.home[groups] = record.warehouse
                live: slice | np.ndarray = slice(None)
            else:
                groups = cells.slots if grouped else cells.slots // members
                self.home[groups] = record.warehouse
                live = self.alive[groups]
                at = cells.slots[live]
            if any_lost:
                self.lost[groups] = False
            if name in self.segment:
                self.segment[name][at] = cells.segment[live]
                self.offset[name][at], self.length[name][at] = cells.offset[live], cells.length[live]
        if record.versions is not None:
            self.version[record.versions[0]] = record.versions[1]
        rows = record.acks.get(self.spec.name)
        if rows is not None:
            self.status[rows] = DONE
            self.home[rows // members] = record.warehouse

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
        mask = (self.status == FREE) & self._by_row(self.alive & ~self.closing)
        for name, segment in self.segment.items():
            present = segment >= 0
            mask &= self._by_row(present) if name in self.grouped else present
        if self.spec.whole_groups:
            mask = self._by_row(mask.reshape(self.shape).all(1))
        return mask

    def undone(self) -> np.ndarray:
        """`[rows]` bool: still to be acknowledged."""
        return self._by_row(self.alive & ~self.closing) & (self.status != DONE) & (self.status != STALE)

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

    def _by_row(self, groups: np.ndarray) -> np.ndarray:
        return np.repeat(groups, self.shape.members)

    def _absent(self, groups: np.ndarray) -> None:
        slots = slots_of_groups(groups, self.shape.members)
        for name, segment in self.segment.items():
            segment[groups if name in self.grouped else slots] = -1


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
