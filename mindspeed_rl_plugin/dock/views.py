"""What a controller knows of one epoch: where the cells that its state reads lie, what is ready, leased, done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mindspeed_rl_plugin.dock.api import ColumnSpec, StateSpec
from mindspeed_rl_plugin.dock.messages import Cells, Record, Shape
from mindspeed_rl_plugin.dock.places import Places, indexed, rows_of_groups

FREE, LEASED, DONE = 0, 1, 2


class EpochView:
    """Rows are numbered group * members + member; a group column is kept by group."""

    def __init__(self, shape: Shape, spec: StateSpec, columns: Mapping[str, ColumnSpec]) -> None:
        rows = shape.groups * shape.members
        self.shape, self.spec = shape, spec
        self.grouped = {name for name, c in columns.items() if c.level == "group"}
        self.tokens = next((n for n in spec.reads if columns[n].level == "token"), None)
        self.status = np.zeros(rows, np.uint8)
        self.alive = np.ones(shape.groups, bool)
        self.retired = np.zeros(shape.groups, bool)  # given out no more, about to be cleared
        self.owner = np.full(shape.groups, -1, np.int32)  # warehouse that holds the group's cells
        by_row = tuple(n for n in spec.reads if n not in self.grouped)
        by_group = tuple(n for n in spec.reads if n in self.grouped)
        self.places = {False: Places(by_row, rows), True: Places(by_group, shape.groups)}
        self.lacking = np.full(rows, len(spec.reads), np.int16)  # columns that a row has not got yet

    def enter(self, record: Record) -> None:
        """Take in new cells and acknowledgements; cleared groups stay cleared."""
        for cells in record.cells:
            self._enter(cells, record.warehouse)
        if record.state == self.spec.name:
            self.status[record.rows] = DONE
            self.owner[record.rows // self.shape.members] = record.warehouse
        if record.cleared is not None and len(record.cleared):
            self.alive[record.cleared] = False

    def _enter(self, cells: Cells, warehouse: int) -> None:
        members, at, grouped = self.shape.members, indexed(cells.slots), cells.names[0] in self.grouped
        if grouped:
            groups = at
        elif isinstance(at, slice):
            groups = slice(at.start // members, -(-at.stop // members))
        else:
            groups = at // members
        self.owner[groups] = warehouse
        live = None if self.alive.all() else self.alive[cells.slots if grouped else cells.slots // members]
        new = self.places[grouped].enter(cells, at, live)
        if new is None:
            return
        if not grouped:
            self.lacking[at] -= new.astype(np.int16)
        elif new.any():
            self.lacking.reshape(self.shape)[at] -= new.astype(np.int16)[:, None]

    def locations(self, rows: np.ndarray, columns: tuple[str, ...]) -> list[np.ndarray]:
        """Segment, offset and length `[C, B]` of cells of rows."""
        groups = rows // self.shape.members
        if not any(name in self.grouped for name in columns):
            return self.places[False].cells(columns, rows)
        found = [self._cells(name, groups if name in self.grouped else rows) for name in columns]
        return [np.concatenate(parts) for parts in zip(*found, strict=True)]

    def _cells(self, name: str, at: np.ndarray) -> list[np.ndarray]:
        return self.places[name in self.grouped].cells((name,), at)

    def has(self, name: str, rows: np.ndarray) -> np.ndarray:
        """`[B]` bool: which rows have a column that the state reads."""
        return self._cells(name, rows // self.shape.members if name in self.grouped else rows)[0][0] >= 0

    def available(self) -> np.ndarray:
        """`[rows]` bool: can be given out now."""
        mask = (self.status == FREE) & (self.lacking == 0)
        if not self.alive.all() or self.retired.any():
            mask &= self._by_row(self.alive & ~self.retired)
        if self.spec.whole_groups:
            mask = self._by_row(mask.reshape(self.shape).all(1))
        return mask

    def undone(self) -> np.ndarray:
        """`[rows]` bool: still to be acknowledged."""
        mask = self.status < DONE
        if not self.alive.all() or self.retired.any():
            mask &= self._by_row(self.alive & ~self.retired)
        return mask

    def settled(self, rows: np.ndarray) -> bool:
        """Whether nothing is left to be done with these rows."""
        return bool(((self.status[rows] == DONE) | ~self.alive[rows // self.shape.members]).all())

    def retire(self, groups: np.ndarray) -> np.ndarray:
        """Give groups out no more; their row numbers."""
        self.retired[groups] = True
        return rows_of_groups(groups, self.shape.members)

    @property
    def unit(self) -> int:
        """Rows that are only given out together."""
        return self.shape.members if self.spec.whole_groups else 1

    def lengths(self, units: np.ndarray) -> np.ndarray:
        """`[units]` tokens of `[units, rows of a unit]`; zeros for a state that reads no tokens."""
        if self.tokens is None:
            return np.zeros(len(units), np.int64)
        places = self.places[False]
        return places.length[places.row[self.tokens]][units].sum(1)

    def ids(self, epoch: int, rows: np.ndarray) -> np.ndarray:
        """`[B, 3]` int64 sample ids."""
        out = np.empty((len(rows), 3), np.int64)
        out[:, 0] = epoch
        np.divmod(rows, self.shape.members, out=(out[:, 1], out[:, 2]))
        return out

    def _by_row(self, groups: np.ndarray) -> np.ndarray:
        return np.repeat(groups, self.shape.members)


def concatenated(parts: Sequence[np.ndarray], empty: np.ndarray, axis: int = 0) -> np.ndarray:
    """Arrays one after the other; `empty` for none."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts, axis) if parts else empty
