"""Tables of one epoch: where its cells lie, as warehouses and controllers know it, and what a state has done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from mindspeed_rl_plugin.dock.api import ColumnSpec, StateSpec
from mindspeed_rl_plugin.dock.messages import Cells, Part, Record, Shape
from mindspeed_rl_plugin.rows import SampleId

Index = slice | np.ndarray | list[int]
FREE, LEASED, DONE = 0, 1, 2
EVERY = slice(None)  # numpy takes all of them much faster than a list of them


class Places:
    """Of the columns `names`, among all that are declared.

    segment, offset, length: `[columns, rows]`, segment -1 where there is no cell; the cell of a group is that of all
    its rows. Rows are numbered group * members + member. alive: `[groups]` bool, those that are not cleared.
    """

    def __init__(self, shape: Shape, names: Iterable[str], columns: Mapping[str, ColumnSpec]) -> None:
        self.shape, rows = shape, shape.groups * shape.members
        self.row = {name: i for i, name in enumerate(names)}
        self.segment = np.full((len(self.row), rows), -1, np.int32)
        self.offset = np.zeros((len(self.row), rows), np.int64)
        self.length = np.zeros((len(self.row), rows), np.int32)
        self.alive = np.ones(shape.groups, bool)
        self._grouped = frozenset(name for name, c in columns.items() if c.level == "group")
        self._known: dict[tuple[str, ...], tuple[Index, Index]] = {}

    def repeat(self, names: tuple[str, ...]) -> int:
        """Rows of one cell of these columns, which are all of groups or all of rows."""
        return self.shape.members if names[0] in self._grouped else 1

    def groups_of(self, cells: Cells | Part) -> np.ndarray:
        """`[n]` group of each slot."""
        return cells.slots // (self.shape.members // self.repeat(cells.names))

    def absent(self, names: tuple[str, ...], at: Index) -> np.ndarray:
        """`[C, n]` bool: which cells are not there."""
        return self.segment[_grid(self._among(names)[0], at)] < 0

    def enter(self, cells: Cells) -> tuple[Index, np.ndarray]:
        """Take in what is there, not known yet and not cleared. Returns the rows as an index, and `[C, rows]` bool:
        what was new, of the columns that are kept here."""
        rows, repeat = cells.slots, self.repeat(cells.names)
        if repeat > 1:
            rows = rows_of_groups(rows, repeat)
        at, (mine, theirs) = indexed(rows), self._among(cells.names)
        segment = cells.segment if len(cells.segment) == 1 else cells.segment[theirs]
        parts = segment, cells.offset[theirs], cells.length[theirs]
        if repeat > 1:
            parts = [part if part.shape[1] == 1 else np.repeat(part, repeat, 1) for part in parts]
        where = _grid(mine, at)
        new = (self.segment[where] < 0) & (parts[0] >= 0)
        if not self.alive.all():
            new &= self.alive[rows // self.shape.members]
        every = bool(new.all())
        for table, part in zip((self.segment, self.offset, self.length), parts, strict=True):
            table[where] = part if every else np.where(new, part, table[where])
        return at, new

    def cells(self, names: tuple[str, ...], rows: np.ndarray) -> list[np.ndarray]:
        """Segment, offset and length `[C, n]` of cells."""
        where = _grid(self._among(names)[0], rows)
        return [table[where] for table in (self.segment, self.offset, self.length)]

    def ids(self, epoch: int, rows: np.ndarray) -> np.ndarray:
        """`[n, 3]` int64 sample ids."""
        out = np.empty((len(rows), 3), np.int64)
        out[:, 0] = epoch
        np.divmod(rows, self.shape.members, out=(out[:, 1], out[:, 2]))
        return out

    def _among(self, names: tuple[str, ...]) -> tuple[Index, Index]:
        """Rows of these tables for those of `names` that are here, and which of `names` they are."""
        if names not in self._known:
            theirs = [i for i, name in enumerate(names) if name in self.row]
            mine = [self.row[names[i]] for i in theirs]
            every = EVERY if mine == list(range(len(self.row))) else mine
            self._known[names] = every, EVERY if len(theirs) == len(names) else theirs
        return self._known[names]


class EpochView(Places):
    """What a controller knows: what is ready, leased, done. spec: the state; columns: all that are declared."""

    def __init__(self, shape: Shape, spec: StateSpec, columns: Mapping[str, ColumnSpec]) -> None:
        super().__init__(shape, spec.reads, columns)
        rows = shape.groups * shape.members
        self.spec = spec
        self.status = np.zeros(rows, np.uint8)
        self.retired = np.zeros(shape.groups, bool)  # given out no more, about to be cleared
        self.owner = np.full(shape.groups, -1, np.int32)  # warehouse that holds the group's cells
        self.lacking = np.full(rows, len(spec.reads), np.int16)  # columns that a row has not got yet
        self.unit = shape.members if spec.whole_groups else 1  # rows that are only given out together
        self._tokens = next((i for i, n in enumerate(spec.reads) if columns[n].level == "token"), None)

    def learn(self, record: Record) -> None:
        """Take in new cells and acknowledgements; cleared groups stay cleared."""
        for cells in record.cells:
            self.owner[self.groups_of(cells)] = record.warehouse
            at, new = self.enter(cells)
            self.lacking[at] -= new.sum(0).astype(np.int16)
        if record.state == self.spec.name:
            self.status[record.rows] = DONE
            self.owner[record.rows // self.shape.members] = record.warehouse
        if record.cleared is not None:
            self.alive[record.cleared] = False

    def available(self) -> np.ndarray:
        """`[rows]` bool: can be given out now."""
        mask = (self.status == FREE) & (self.lacking == 0) & self._open()
        return np.repeat(mask.reshape(self.shape).all(1), self.shape.members) if self.spec.whole_groups else mask

    def undone(self) -> np.ndarray:
        """`[rows]` bool: still to be acknowledged."""
        return (self.status < DONE) & self._open()

    def lengths(self, units: np.ndarray) -> np.ndarray:
        """`[units]` tokens of `[units, rows of a unit]`; zeros for a state that reads no tokens."""
        return np.zeros(len(units), np.int64) if self._tokens is None else self.length[self._tokens][units].sum(1)

    def _open(self) -> np.ndarray | bool:
        if self.alive.all() and not self.retired.any():
            return True
        return np.repeat(self.alive & ~self.retired, self.shape.members)


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


def runs(nbytes: np.ndarray, same: np.ndarray, *begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours in each row of `[C, n]` that can be copied together: the flat index of the first of each, and the
    bytes of all. same: must be equal; begins: of each copy's ends, must follow each other."""
    breaks = np.ones(nbytes.shape, bool)
    breaks[:, 1:] = same[:, 1:] != same[:, :-1]
    for begin in begins:
        breaks[:, 1:] |= begin[:, 1:] != begin[:, :-1] + nbytes[:, :-1]
    flat = breaks.reshape(-1).nonzero()[0]
    return flat, np.add.reduceat(nbytes.reshape(-1), flat) if len(flat) else flat


def ids_array(ids: Sequence[SampleId] | Tensor) -> np.ndarray:
    """`[B, 3]` int64 of ids, plain triples, or a `[B, 3]` tensor."""
    return np.array(ids, np.int64).reshape(-1, 3)


def ids_tuple(ids: np.ndarray) -> tuple[SampleId, ...]:
    """Inverse of `ids_array`."""
    return tuple(map(SampleId._make, ids.tolist()))
