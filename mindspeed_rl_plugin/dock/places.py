"""Tables of where cells lie, as a warehouse and the controllers keep them for one epoch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mindspeed_rl_plugin.dock.messages import Cells

Index = slice | np.ndarray | list[int]
EVERY = slice(None)  # numpy takes all of them much faster than a list of them


class Places:
    """segment, offset, length: `[columns, rows]` of one epoch, segment -1 where there is no cell. The cell of a group
    is that of all its rows."""

    def __init__(self, names: Iterable[str], rows: int) -> None:
        self.row = {name: i for i, name in enumerate(names)}
        self.segment = np.full((len(self.row), rows), -1, np.int32)
        self.offset = np.zeros((len(self.row), rows), np.int64)
        self.length = np.zeros((len(self.row), rows), np.int32)
        self._known: dict[tuple[str, ...], tuple[Index, Index]] = {}

    def absent(self, names: tuple[str, ...], at: Index) -> np.ndarray:
        """`[C, n]` bool: which cells are not there."""
        return self.segment[_grid(self._among(names)[0], at)] < 0

    def enter(self, cells: Cells, at: Index, live: np.ndarray | None = None) -> np.ndarray:
        """Take in those of some cells that are there and not known yet; `[n]` how many of each row. at: their slots as
        an index; live: `[n]` bool, the others are left out."""
        mine, theirs = self._among(cells.names)
        where = _grid(mine, at)
        segment = cells.segment if len(cells.segment) == 1 else cells.segment[theirs]
        new = (self.segment[where] < 0) & (segment >= 0)
        if live is not None:
            new &= live
        every = bool(new.all())
        parts = segment, cells.offset[theirs], cells.length[theirs]
        for table, part in zip((self.segment, self.offset, self.length), parts, strict=True):
            table[where] = part if every else np.where(new, part, table[where])
        return new.sum(0)

    def cells(self, names: tuple[str, ...], rows: np.ndarray) -> list[np.ndarray]:
        """Segment, offset and length `[C, n]` of cells."""
        where = _grid(self._among(names)[0], rows)
        return [table[where] for table in (self.segment, self.offset, self.length)]

    def _among(self, names: tuple[str, ...]) -> tuple[Index, Index]:
        """Rows of these tables for those of `names` that are here, and which of `names` they are."""
        if names not in self._known:
            theirs = [i for i, name in enumerate(names) if name in self.row]
            mine = [self.row[names[i]] for i in theirs]
            every = EVERY if mine == list(range(len(self.row))) else mine
            self._known[names] = every, EVERY if len(theirs) == len(names) else theirs
        return self._known[names]


def _grid(mine: Index, at: Index) -> tuple[Index, Index]:
    return (mine, at) if isinstance(mine, slice) or isinstance(at, slice) else np.ix_(mine, at)


def indexed(slots: np.ndarray) -> Index:
    """`slots` as an index: a slice where they follow each other, which numpy takes ten times faster."""
    if len(slots) and int(slots[-1]) - int(slots[0]) == len(slots) - 1 and (slots[1:] > slots[:-1]).all():
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots


def rows_of_groups(groups: np.ndarray, members: int) -> np.ndarray:
    """Row numbers of whole groups, in order."""
    return (np.asarray(groups, np.int64)[:, None] * members + np.arange(members)).reshape(-1).astype(np.int32)


def by_row(cells: Cells, members: int) -> Cells:
    """Cells of groups as those of all their rows."""
    segment = cells.segment if cells.segment.shape == (1, 1) else np.repeat(cells.segment, members, 1)
    parts = (np.repeat(part, members, 1) for part in (cells.offset, cells.length))
    return Cells(cells.names, rows_of_groups(cells.slots, members), segment, *parts)


def runs(nbytes: np.ndarray, same: np.ndarray, *begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours in each row of `[C, n]` that can be copied together: the flat index of the first of each, and the
    bytes of all. same: must be equal; begins: of each copy's ends, must follow each other."""
    breaks = np.ones(nbytes.shape, bool)
    breaks[:, 1:] = same[:, 1:] != same[:, :-1]
    for begin in begins:
        breaks[:, 1:] |= begin[:, 1:] != begin[:, :-1] + nbytes[:, :-1]
    flat = breaks.reshape(-1).nonzero()[0]
    return flat, np.add.reduceat(nbytes.reshape(-1), flat) if len(flat) else flat
