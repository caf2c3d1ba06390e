"""Moves cells into and out of the dock: rows to the warehouses that own their groups, columns into the reader's memory.

Cells of this machine are copied through shared memory (a put that is small, or from outside of the job, is sent in its
message); cells of another machine are sent in one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from mindspeed_rl_plugin.dock.api import ColumnSpec, Declared
from mindspeed_rl_plugin.dock.calls import Calls, by_value
from mindspeed_rl_plugin.dock.memory import items
from mindspeed_rl_plugin.dock.messages import Fetch, Locate, Put, Slots, no_cells
from mindspeed_rl_plugin.dock.places import ids_array, runs
from mindspeed_rl_plugin.dock.storage import as_column, layout
from mindspeed_rl_plugin.rows import Column, Ragged, Rows

INLINE = 128 << 10  # bytes; cells of a larger put of this machine go into the warehouse's memory, not into a message
NO_ROWS = np.empty(0, np.int64)

Picked = list[tuple[Column, np.ndarray | None]]  # (column, indices of its rows; None: all rows)


class Writer:
    """Writes rows of declared columns; deadline: seconds that a full dock may make a producer wait."""

    def __init__(self, declared: Declared, calls: Calls, deadline: float) -> None:
        self._declared, self._calls, self._deadline = declared, calls, deadline

    def write(
        self, rows: Rows | None, state: str | None, acked: np.ndarray | None = None, *, checked: bool = True
    ) -> None:
        """Send rows to the warehouses that own them, and acknowledge rows there. state: the state that writes, None: a
        producer; acked: `[n, 3]` ids to acknowledge, None: nothing; checked: whether acknowledged rows must have all
        columns that the state writes."""
        call, epochs = "put" if state is None else f"commit of state {state!r}", self._calls.epochs
        wanted = ids_array(() if rows is None else rows.ids)
        done = wanted[:0] if acked is None else acked
        epochs.cleared(call, wanted)
        if rows is not None:
            self._declared.check_rows(call, rows)
        of_rows, of_acks = (epochs.owned(call, x, leased=acked is not None) for x in (wanted, done))
        for number, warehouse in sorted({*of_rows, *of_acks}):
            shape, index = epochs.shape(number), of_rows.get((number, warehouse), NO_ROWS)
            parts = [] if rows is None else list(self._parts(shape.members, rows, wanted, index))
            put = Put(number, shape, [part for part, _ in parts], state is None, self._deadline)
            if acked is not None:
                _, group, member = done[of_acks.get((number, warehouse), NO_ROWS)].T
                put.state, put.rows, put.checked = state, (group * shape.members + member).astype(np.int32), checked
            self._send(warehouse, put, state or "put", [cell for _, picked in parts for cell in picked])

    def _parts(self, members: int, rows: Rows, ids: np.ndarray, index: np.ndarray) -> Iterator[tuple[Slots, Picked]]:
        """The rows `index` of `rows` as at most two parts: columns with a cell per row, and columns with a cell per
        group."""
        for grouped in (False, True):
            names = tuple(n for n in rows.columns if (self._declared.columns[n].level == "group") == grouped)
            if not names or not len(index):
                continue
            pick, slots = index, ids[index, 1] * members + ids[index, 2]
            if grouped:
                pick = index[np.sort(np.unique(ids[index, 1], return_index=True)[1])]
                slots = ids[pick, 1]
            whole = None if len(pick) == len(rows) else pick
            columns = [rows.columns[name] for name in names]
            length = np.stack([lengths_of(column)[pick] for column in columns])
            yield Slots(names, slots.astype(np.int32), length), [(column, whole) for column in columns]

    def _send(self, warehouse: int, put: Put, state: str, cells: Picked) -> None:
        """Send the cells: write them into memory that this machine's warehouse lends, or add them to the message."""
        calls, (places, total) = self._calls, layout(self._declared.columns, put.parts)
        here = warehouse == calls.warehouse
        names = [name for part in put.parts for name in part.names]
        spans = [span for begins, sizes in places for span in zip(begins.tolist(), sizes.tolist(), strict=True)]
        lent = here and total > INLINE and calls.me.rank >= 0
        if lent:
            wish = Put(put.epoch, put.shape, put.parts, put.producer, put.deadline, reserve=True)
            put.extent = calls.ask_warehouse(warehouse, wish).extent
            data = calls.segments.view(put.extent.segment, put.extent.offset, total)
        else:
            data = np.empty(total, np.uint8)
        for name, (column, pick), (begin, nbytes) in zip(names, cells, spans, strict=True):
            copy_rows(column, pick, data[begin : begin + nbytes])
            calls.traffic.add("written", state, name, "local" if here else "remote", nbytes)
        calls.ask_warehouse(warehouse, put, None if lent or not put.parts else data)


def pieces(rows: Rows, most: int | None) -> Iterator[Rows]:
    """Divide rows, in order, into pieces of at most `most` bytes of cells (None: no limit), each of one row or more."""
    nbytes, first = np.zeros(len(rows), np.int64), 0  # nbytes: of the cells of each row
    for column in rows.columns.values():
        values = column.values if isinstance(column, Ragged) else column
        nbytes += lengths_of(column).astype(np.int64) * (values.dtype.itemsize * prod(values.shape[1:]))
    if most is None or nbytes.sum() <= most:
        yield rows
        return
    while first < len(rows):
        count = max(1, int(np.searchsorted(nbytes[first:].cumsum(), most, "right")))
        yield rows.take([*range(first, min(first + count, len(rows)))])
        first += count


def lengths_of(column: Column) -> np.ndarray:
    """`[B]` int32 entries per row; a dense row is one entry."""
    if isinstance(column, Ragged):
        return np.diff(column.offsets.cpu().numpy()).astype(np.int32)
    return np.ones(len(column), np.int32)


def copy_rows(column: Column, index: np.ndarray | None, out: np.ndarray) -> None:
    """Write rows `index` (None: all) of a column into `out`, a uint8 array of their bytes, one after the other."""
    values = (column.values if isinstance(column, Ragged) else column).detach()
    target = torch.from_numpy(out).view(values.dtype) if out.nbytes else torch.empty(0, dtype=values.dtype)
    if index is not None:
        parts = [values[begin:end] for begin, end in _spans(column, index)]
        values = torch.cat(parts) if parts else values[:0]
    # copy_ instead of .numpy(), after which the caller's storage could never be resized.
    target.copy_(values.reshape(-1))


def _spans(column: Column, index: np.ndarray) -> Iterator[tuple[int, int]]:
    """Begin and end of rows in the values of a column; neighbouring rows are joined."""
    offsets = column.offsets.cpu().numpy() if isinstance(column, Ragged) else np.arange(len(column) + 1)
    begins = offsets[index]
    flat, sizes = runs((offsets[index + 1] - begins)[None], np.zeros((1, len(index))), begins[None])
    yield from zip(begins[flat].tolist(), (begins[flat] + sizes).tolist(), strict=True)


def fresh(column: str, nbytes: int) -> np.ndarray:
    """`[nbytes]` uint8 to read a column into."""
    return np.empty(nbytes, np.uint8)


def gather(
    calls: Calls,
    specs: Mapping[str, ColumnSpec],
    state: str | None,
    names: Sequence[str],
    owner: np.ndarray,
    places: Sequence[np.ndarray],
) -> dict[str, Column]:
    """Columns of B rows, packed in their order. owner: `[B]` warehouses; places: segment, offset and length `[C, B]`;
    state: the `Moved.state` of the bytes, None: they are not counted."""
    segment, offset, length = places
    nbytes = length * items(specs, names)
    begin = np.cumsum(nbytes, 1) - nbytes
    packed: dict[bytes, Tensor] = {}  # token columns share their offsets
    outs = [fresh(name, total) for name, total in zip(names, nbytes.sum(1).tolist(), strict=True)]
    columns = {name: as_column(specs[name], outs[i], length[i], packed) for i, name in enumerate(names)}
    for warehouse, index in by_value(owner) if names else ():
        whole, here = len(index) == len(owner), warehouse == calls.warehouse
        cells = [x if whole else x[:, index] for x in (segment, offset, begin, nbytes)]
        if here:
            for column, *place, to, size in _runs(*cells):
                outs[column][to : to + size] = calls.segments.view(*place, size)
        moved = cells[3].sum(1).tolist() if here else _fetch(calls, warehouse, cells, outs)
        for name, size in zip(names, moved, strict=True) if state is not None else ():
            calls.traffic.add("read", state, name, "local" if here else "remote", size)
    return columns


def locate(calls: Calls, columns: tuple[str, ...], ids: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """For `ids` `[B, 3]`: `[B]` warehouse, and segment (-1: the cell is missing), offset and length `[C, B]`."""
    owner, places = np.empty(len(ids), np.int64), no_cells(len(columns), len(ids))
    for (number, warehouse), at in calls.epochs.owned("read", ids).items():
        owner[at], rows = warehouse, ids[at, 1] * calls.epochs.shape(number).members + ids[at, 2]
        located = calls.ask_warehouse(warehouse, Locate(number, columns, rows))
        for table, values in zip(places, (located.segment, located.offset, located.length), strict=True):
            table[:, at] = values
    return owner, places


def _fetch(calls: Calls, warehouse: int, cells: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> list[int]:
    """Fetch cells from another machine. If members of a group follow each other, their common cell is sent once.
    Returns the bytes sent of each column."""
    segment, offset, begin, nbytes = cells
    fresh = np.ones(segment.shape, bool)
    fresh[:, 1:] = (segment[:, 1:] != segment[:, :-1]) | (offset[:, 1:] != offset[:, :-1])
    fresh[:, 1:] |= nbytes[:, 1:] != nbytes[:, :-1]
    sent = np.where(fresh, nbytes, 0)
    ends = np.cumsum(sent.reshape(-1)).reshape(sent.shape)
    spans = [run[1:3] + run[4:] for run in _runs(segment, offset, ends - sent, sent) if run[4]]
    if spans:
        got = calls.ask_warehouse(warehouse, Fetch(np.array(spans, np.int64)))
        for column, _, at, to, size in _runs(np.zeros_like(segment), ends - nbytes, begin, nbytes):
            outs[column][to : to + size] = got[at : at + size]
    return sent.sum(1).tolist()


def _runs(
    segment: np.ndarray, offset: np.ndarray, begin: np.ndarray, nbytes: np.ndarray
) -> Iterator[tuple[int, int, int, int, int]]:
    """(column, segment, offset, begin, bytes) of the copies that write `[C, n]` cells to `begin` in their columns."""
    flat, sizes = runs(nbytes, segment, offset, begin)
    parts = (flat // segment.shape[1], *(x.reshape(-1)[flat] for x in (segment, offset, begin)), sizes)
    return zip(*(part.tolist() for part in parts), strict=True)
