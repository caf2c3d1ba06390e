"""What a controller knows of one epoch: where the cells that its state reads lie, what is ready, leased, done."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mindspeed_rl_plugin.dock.api import ColumnSpec, StateSpec
from mindspeed_rl_plugin.dock.messages import Record, Shape
from mindspeed_rl_plugin.dock.places import Places

FREE, LEASED, DONE = 0, 1, 2


class EpochView(Places):
    """spec: the state; columns: all that are declared."""

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
