"""Requests that a process outside of the job may make: leases and commits of the states that are open to it, and any
read. The warehouse that receives committed rows checks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from mindspeed_rl_plugin.dock import messages as m
from mindspeed_rl_plugin.dock.api import VersionBound, listed, refuse
from mindspeed_rl_plugin.dock.memory import entry_bytes
from mindspeed_rl_plugin.dock.places import ids_tuple, row_ids
from mindspeed_rl_plugin.dock.storage import EpochTables, Warehouse, as_column, layout
from mindspeed_rl_plugin.rows import Column, Rows

MOST_BYTES = 128 << 20  # of cells in one commit: while they are checked, the warehouse serves no other request


class Opening(NamedTuple):
    """A state that is open to processes outside of the job."""

    check: Callable[[Rows, VersionBound], None]  # raises ValueError for rows that may not be committed
    more: Sequence[str] = ()  # further columns, of the same rows, that `check` needs


class Gate:
    """open: states of which processes outside of the job may lease and commit rows; most_bytes: most bytes of cells in
    one commit."""

    def __init__(self, open: Mapping[str, Opening]) -> None:
        self.open, self.most_bytes = open, MOST_BYTES

    def check(self, message: m.Message, bulk: np.ndarray | None, house: Warehouse | None) -> None:
        """Raise ValueError for a request that only the job itself may make, and for rows that are not valid. Then
        nothing has changed."""
        kind = type(message).__name__.lower()
        if isinstance(message, (m.Clear, m.Retire, m.Reclaim)) or (isinstance(message, m.Query) and message.epochs):
            raise ValueError(f"{kind}: only the job itself may open, clear and take back rows")
        if isinstance(message, (m.Ask, m.Release, m.Put)) and message.state not in self.open:
            raise ValueError(
                f"{kind}: state {message.state!r} is not open to processes outside of the job; they may lease and "
                f"commit rows of {listed(self.open)}"
            )
        if isinstance(message, m.Put):
            self._check_put(message, bulk, house)

    def _check_put(self, put: m.Put, bulk: np.ndarray | None, house: Warehouse) -> None:
        if put.producer or put.reserve or put.extent is not None or len(put.parts) > 1:
            raise ValueError("put: outside of the job, commit only leased rows, and send the cells in the same message")
        put.checked = True
        if (tables := house.opened(put.epoch, put.shape)) is None:
            return  # a late repeat is harmless
        rows = rows_of(put, np.empty(0, np.uint8) if bulk is None else bulk, house, tables)
        if len(rows):
            opening, slots = self.open[put.state], np.array([i.group * put.shape.members + i.member for i in rows.ids])
            more = {name: _column(house, tables, name, slots) for name in opening.more}
            opening.check(rows.with_columns(**more), put.shape.bound)


def rows_of(put: m.Put, bulk: np.ndarray, house: Warehouse, tables: EpochTables) -> Rows:
    """The rows of a put that are not cleared. Raises ValueError if the put does not match the declaration of its state
    and columns."""
    every = len(tables.alive) * tables.shape.members
    if len(put.rows) and not 0 <= put.rows.min() <= put.rows.max() < every:
        raise ValueError(f"put: epoch {put.epoch} has rows 0 to {every - 1}, not {put.rows.min()} to {put.rows.max()}")
    if not put.parts:
        return Rows(())
    (part,) = put.parts
    wanted = house.states[put.state].writes
    refuse(f"put: state {put.state!r} does not write", part.names, wanted)
    if sorted(part.names) != sorted(wanted):
        raise ValueError(f"put: state {put.state!r} writes {listed(wanted)}, each once; got {listed(part.names)}")
    slots, ragged = part.slots, np.array([house.columns[name].ragged for name in part.names])[:, None]
    sound = {put.rows.dtype, slots.dtype, part.length.dtype} == {np.dtype(np.int32)} and part.length.min(initial=0) >= 0
    sound &= len(np.unique(slots)) == len(slots) and 0 <= slots.min(initial=0) <= slots.max(initial=0) < every
    if not sound or ((part.length != 1) & ~ragged).any():
        raise ValueError(f"put: row numbers or cell lengths that are not valid in epoch {put.epoch}")
    places, total = layout(house.columns, put.parts)
    if len(bulk) != total:
        raise ValueError(f"put: the message has {len(bulk)} bytes of cells, but cells of these lengths have {total}")
    columns, packed = {}, dict[bytes, Tensor]()
    for name, length, begin, nbytes in zip(part.names, part.length, *places[0], strict=True):
        columns[name] = as_column(house.columns[name], bulk[begin : begin + nbytes], length, packed)
    rows = Rows(ids_tuple(row_ids(put.epoch, tables.shape.members, slots)), columns)
    alive = tables.alive[slots // tables.shape.members]
    return rows if alive.all() else rows.take(alive.nonzero()[0].tolist())


def _column(house: Warehouse, tables: EpochTables, name: str, rows: np.ndarray) -> Column:
    """A committed column of some rows. Raises ValueError if a row does not have it."""
    segment, offset, length = (table[0] for table in tables.cells((name,), rows))
    if (segment < 0).any():
        raise ValueError(f"put: a row has no {name!r} yet, so nobody can have leased it")
    sizes = (length * entry_bytes(house.columns[name])).tolist()
    cells = zip(segment.tolist(), offset.tolist(), sizes, strict=True)
    data = np.concatenate([np.empty(0, np.uint8), *(house.slabs.view(*cell) for cell in cells)])
    return as_column(house.columns[name], data, length, {})
