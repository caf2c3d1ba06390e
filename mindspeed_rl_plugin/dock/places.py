"""Tables of one epoch, for warehouses and controllers: where its cells are, and which rows a state has acknowledged."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from mindspeed_rl_plugin.dock.api import ColumnSpec, StateSpec
from mindspeed_rl_plugin.dock.memory import Range, insert
from mindspeed_rl_plugin.dock.messages import Cells, Record, Shape, Slots, no_cells
from mindspeed_rl_plugin.rows import SampleId

FREE, LEASED, DONE = 0, 1, 2


class Places:
    """Places of the cells of the columns `names`. segment (-1: no cell), offset, length: `[columns, rows]`. In a group
    column all rows of a group have the place of the group's cell. columns: all declared ones."""

    def __init__(self, shape: Shape, names: Iterable[str], columns: Mapping[str, ColumnSpec]) -> None:
        self.shape, self.row = shape, {name: i for i, name in enumerate(names)}
        self.segment, self.offset, self.length = no_cells(len(self.row), shape.groups * shape.members)
        self.alive = np.ones(shape.groups, bool)  # groups that are not cleared
        self._grouped = frozenset(name for name, c in columns.items() if c.level == "group")

    def repeat(self, names: tuple[str, ...]) -> int:
        """How many rows share a cell of these columns: either all of them are group columns, or none is."""
        return self.shape.members if names[0] in self._grouped else 1

    def groups_of(self, cells: Cells | Slots) -> np.ndarray:
        """`[n]` group of each slot."""
        return cells.slots // (self.shape.members // self.repeat(cells.names))

    def absent(self, names: tuple[str, ...], rows: np.ndarray) -> np.ndarray:
        """`[C, n]` bool: which cells are missing."""
        return self.cells(names, rows)[0] < 0

    def enter(self, cells: Cells) -> tuple[np.ndarray, np.ndarray]:
        """Enter the cells that exist, are new and are not cleared; columns that this table lacks are ignored. Returns
        the rows, and `[C, rows]` bool: which of their cells were new."""
        rows, repeat = cells.slots, self.repeat(cells.names)
        if repeat > 1:
            rows = rows_of_groups(rows, repeat)
        theirs = [i for i, name in enumerate(cells.names) if name in self.row]
        where = np.ix_([self.row[cells.names[i]] for i in theirs], rows)
        segment = cells.segment if len(cells.segment) == 1 else cells.segment[theirs]
        parts = segment, cells.offset[theirs], cells.length[theirs]
        if repeat > 1:
            parts = [part if part.shape[1] == 1 else np.repeat(part, repeat, 1) for part in parts]
        new = (self.segment[where] < 0) & (parts[0] >= 0) & self.alive[rows // self.shape.members]
        for table, part in zip((self.segment, self.offset, self.length), parts, strict=True):
            table[where] = np.where(new, part, table[where])
        return rows, new

    def cells(self, names: tuple[str, ...], rows: np.ndarray) -> list[np.ndarray]:
        """Segment, offset and length `[C, n]` of cells."""
        where = np.ix_([self.row[name] for name in names], rows)
        return [table[where] for table in (self.segment, self.offset, self.length)]


class Numbers:
    """A set of epoch numbers that grows as long as a job runs. Most are consecutive, so it stores ranges."""

    def __init__(self) -> None:
        self._runs: list[Range] = []

    def add(self, number: int) -> None:
        """Add a number that is not in the set."""
        insert(self._runs, number, number + 1)

    def __contains__(self, number: int) -> bool:
        at = bisect.bisect(self._runs, (number, math.inf)) - 1
        return at >= 0 and number < sum(self._runs[at])


class EpochView(Places):
    """A controller's knowledge of an epoch: which rows are ready, leased and acknowledged. spec: of the controller's
    state; columns: all declared ones."""

    def __init__(self, shape: Shape, spec: StateSpec, columns: Mapping[str, ColumnSpec]) -> None:
        super().__init__(shape, spec.reads, columns)
        rows = shape.groups * shape.members
        self.spec = spec
        self.status = np.zeros(rows, np.uint8)
        self.lease = np.zeros(rows, np.int64)  # token of the last lease of each row
        self.retired = np.zeros(shape.groups, bool)  # groups that are not leased any more, since they will be cleared
        self.owner = np.full(shape.groups, -1, np.int32)  # warehouse that holds the group's cells
        self.lacking = np.full(rows, len(spec.reads), np.int16)  # number of columns that a row still lacks
        self.unit = shape.members if spec.whole_groups else 1  # number of rows that are leased together or not at all

    def learn(self, record: Record) -> bool:
        """Enter new cells and acknowledgements; cleared groups stay cleared. Returns whether a row (if only complete
        groups are leased, a group) became ready."""
        ready = False
        for cells in record.cells:
            self.owner[self.groups_of(cells)] = record.warehouse
            rows, new = self.enter(cells)
            self.lacking[rows] -= new.sum(0).astype(np.int16)
            rows = rows[new.any(0)]
            units = self.lacking.reshape(-1, self.unit)[np.unique(rows // self.unit)]
            ready |= bool((units == 0).all(1).any())
        if record.state == self.spec.name:
            self.status[record.rows] = DONE
            self.owner[record.rows // self.shape.members] = record.warehouse
        if record.cleared is not None:
            self.alive[record.cleared] = False
        return ready

    def available(self) -> np.ndarray:
        """`[rows]` bool: rows that can be leased now."""
        mask = (self.status == FREE) & (self.lacking == 0) & self._open()
        members = self.shape.members
        return np.repeat(mask.reshape(-1, members).all(1), members) if self.spec.whole_groups else mask

    def done(self) -> np.ndarray:
        """`[rows]` bool: acknowledged rows of groups that are not cleared or retired."""
        return (self.status == DONE) & self._open()

    def undone(self) -> np.ndarray:
        """`[rows]` bool: rows that are not acknowledged yet, of groups that are not cleared or retired."""
        return (self.status < DONE) & self._open()

    def _open(self) -> np.ndarray | bool:
        if self.alive.all() and not self.retired.any():
            return True
        return np.repeat(self.alive & ~self.retired, self.shape.members)


def row_ids(epoch: int, members: int, rows: np.ndarray) -> np.ndarray:
    """`[n, 3]` int64 sample ids."""
    out = np.empty((len(rows), 3), np.int64)
    out[:, 0] = epoch
    np.divmod(rows, members, out=(out[:, 1], out[:, 2]))
    return out


def rows_of_groups(groups: np.ndarray, members: int) -> np.ndarray:
    """Row numbers of all members of these groups, in order."""
    return (np.asarray(groups, np.int64)[:, None] * members + np.arange(members)).reshape(-1).astype(np.int32)


def runs(nbytes: np.ndarray, same: np.ndarray, *begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Join neighbours in each row of `nbytes` `[C, n]` into runs that one copy can move. Two cells are joined if their
    `same` (such as the segment) is equal and, in each of `begins` (such as offsets at source and target), the second
    begins where the first ends. Returns the flat index of each run's first cell, and the run's bytes."""
    breaks = np.ones(nbytes.shape, bool)
    breaks[:, 1:] = same[:, 1:] != same[:, :-1]
    for begin in begins:
        breaks[:, 1:] |= begin[:, 1:] != begin[:, :-1] + nbytes[:, :-1]
    flat = breaks.reshape(-1).nonzero()[0]
    return flat, np.add.reduceat(nbytes.reshape(-1), flat) if len(flat) else flat


def ids_array(ids: Sequence[SampleId] | Tensor) -> np.ndarray:
    """Ids, plain triples, or a `[B, 3]` tensor as `[B, 3]` int64."""
    return np.array(ids, np.int64).reshape(-1, 3)


def ids_tuple(ids: np.ndarray) -> tuple[SampleId, ...]:
    """Inverse of `ids_array`."""
    return tuple(map(SampleId._make, ids.tolist()))
