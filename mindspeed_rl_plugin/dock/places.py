"""Tables of where cells lie, as a warehouse and the controllers keep them for one epoch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mindspeed_rl_plugin.dock.messages import Cells

Index = slice | np.ndarray | list[int]
EVERY = slice(None)  # numpy takes all of them much faster than a list of them


def indexed(slots: np.ndarray) -> Index:
    """`slots` as an index: a slice where they follow each other, which numpy takes ten times faster."""
    if len(slots) and int(slots[-1]) - int(slots[0]) == len(slots) - 1 and (slots[1:] > slots[:-1]).all():
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots


def rows_of_groups(groups: np.ndarray, members: int) -> np.ndarray:
    """Row numbers of whole groups, in order."""
    return (np.asarray(groups, np.int64)[:, None] * members + np.arange(members)).reshape(-1).astype(np.int32)


class Places:
    """Where the cells of some columns lie that are numbered alike, by row or by group.

    segment, offset, length: `[columns, cells]`, segment -1 for none.
    """

    def __init__(self, names: Iterable[str], cells: int) -> None:
        self.row = {name: i for i, name in enumerate(names)}
        self.segment = np.full((len(self.row), cells), -1, np.int32)
        self.offset = np.zeros((len(self.row), cells), np.int64)
        self.length = np.zeros((len(self.row), cells), np.int32)
        self._known: dict[tuple[str, ...], tuple[Index, Index] | None] = {}

    def among(self, names: tuple[str, ...]) -> tuple[Index, Index] | None:
        """Rows of these tables for those of `names` that are here, and which of `names` they are; None for none."""
        if names not in self._known:
            theirs: Index = [i for i, name in enumerate(names) if name in self.row]
            mine: Index = [self.row[names[i]] for i in theirs]
            every = mine == list(range(len(self.row)))
            found = EVERY if every else mine, EVERY if len(theirs) == len(names) else theirs
            self._known[names] = found if theirs else None
        return self._known[names]

    def absent(self, names: tuple[str, ...], at: Index) -> np.ndarray:
        """`[C, n]` bool: which cells are not there."""
        mine, _ = self.among(names)
        return self.segment[grid(mine, at)] < 0

    def enter(self, cells: Cells, at: Index, live: np.ndarray | None = None) -> np.ndarray | None:
        """Take in those of some cells that are there and are not known yet; `[n]` int: how many of each row's columns,
        None where none of the columns is kept here. at: their slots as an index; live: `[n]` bool, the others are
        left out."""
        among = self.among(cells.names)
        if among is None:
            return None
        mine, theirs = among
        where = grid(mine, at)
        parts = [cells.segment, cells.offset, cells.length]
        if not isinstance(theirs, slice):
            parts = [part if i == 0 and len(part) == 1 else part[theirs] for i, part in enumerate(parts)]
        new = self.segment[where] < 0
        if cells.segment.size > 1:
            new &= parts[0] >= 0
        if live is not None:
            new &= live
        tables = (self.segment, self.offset, self.length)
        if new.all():
            for table, part in zip(tables, parts, strict=True):
                table[where] = part
        else:
            for table, part in zip(tables, parts, strict=True):
                table[where] = np.where(new, part, table[where])
        return new.sum(0)

    def cells(self, names: tuple[str, ...], slots: np.ndarray) -> list[np.ndarray]:
        """Segment, offset and length `[C, n]` of cells."""
        if not names:
            return [np.empty((0, len(slots)), t.dtype) for t in (self.segment, self.offset, self.length)]
        where = grid(self.among(names)[0], slots)
        return [table[where] for table in (self.segment, self.offset, self.length)]

    def forget(self, slots: np.ndarray) -> None:
        """These cells are gone."""
        self.segment[:, slots] = -1


def grid(mine: Index, at: Index) -> tuple[Index, Index]:
    """Index of rows `mine` and columns `at` of a table."""
    return (mine, at) if isinstance(mine, slice) or isinstance(at, slice) else np.ix_(mine, at)
