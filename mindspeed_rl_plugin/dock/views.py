"""What a controller knows of one epoch: where the cells that its state reads lie, what is ready, leased, done."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mindspeed_rl_plugin.dock.api import ColumnSpec, StateSpec
from mindspeed_rl_plugin.dock.messages import Record, Shape
from mindspeed_rl_plugin.dock.places import Places, by_row, indexed

FREE, LEASED, DONE = 0, 1, 2


class EpochView:
    """Rows are numbered group * members + member."""

    def __init__(self, shape: Shape, spec: StateSpec, columns: Mapping[str, ColumnSpec]) -> None:
        rows = shape.groups * shape.members
        self.shape, self.spec = shape, spec
        self.places = Places(spec.reads, rows)
        self.status = np.zeros(rows, np.uint8)
        self.alive = np.ones(shape.groups, bool)
        self.retired = np.zeros(shape.groups, bool)  # given out no more, about to be cleared
        self.owner = np.full(shape.groups, -1, np.int32)  # warehouse that holds the group's cells
        self.lacking = np.full(rows, len(spec.reads), np.int16)  # columns that a row has not got yet
        self.unit = shape.members if spec.whole_groups else 1  # rows that are only given out together
        self._grouped = {name for name, c in columns.items() if c.level == "group"}
        self._tokens = next((i for i, n in enumerate(spec.reads) if columns[n].level == "token"), None)

    def enter(self, record: Record) -> None:
        """Take in new cells and acknowledgements; cleared groups stay cleared."""
        members = self.shape.members
        for cells in record.cells:
            if cells.names[0] in self._grouped:
                cells = by_row(cells, members)
            at = indexed(cells.slots)
            whole = isinstance(at, slice)
            self.owner[slice(at.start // members, -(-at.stop // members)) if whole else at // members] = (
                record.warehouse
            )
            if self.places.row.keys().isdisjoint(cells.names):
                continue
            live = None if self.alive.all() else self.alive[cells.slots // members]
            self.lacking[at] -= self.places.enter(cells, at, live).astype(np.int16)
        if record.state == self.spec.name:
            self.status[record.rows] = DONE
            self.owner[record.rows // members] = record.warehouse
        if record.cleared is not None:
            self.alive[record.cleared] = False

    def available(self) -> np.ndarray:
        """`[rows]` bool: can be given out now."""
        mask = (self.status == FREE) & (self.lacking == 0) & self._open()
        return np.repeat(mask.reshape(self.shape).all(1), self.shape.members) if self.spec.whole_groups else mask

    def undone(self) -> np.ndarray:
        """`[rows]` bool: still to be acknowledged."""
        return (self.status < DONE) & self._open()

    def settled(self, rows: np.ndarray) -> bool:
        """Whether nothing is left to be done with these rows."""
        return bool(((self.status[rows] == DONE) | ~self.alive[rows // self.shape.members]).all())

    def lengths(self, units: np.ndarray) -> np.ndarray:
        """`[units]` tokens of `[units, rows of a unit]`; zeros for a state that reads no tokens."""
        return (
            np.zeros(len(units), np.int64) if self._tokens is None else self.places.length[self._tokens][units].sum(1)
        )

    def ids(self, epoch: int, rows: np.ndarray) -> np.ndarray:
        """`[B, 3]` int64 sample ids."""
        out = np.empty((len(rows), 3), np.int64)
        out[:, 0] = epoch
        np.divmod(rows, self.shape.members, out=(out[:, 1], out[:, 2]))
        return out

    def _open(self) -> np.ndarray | bool:
        if self.alive.all() and not self.retired.any():
            return True
        return np.repeat(self.alive & ~self.retired, self.shape.members)
