"""The writing half of a dock: rows to the warehouses that own their groups."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from mindspeed_rl_plugin.dock.api import Declared
from mindspeed_rl_plugin.dock.calls import Calls, by_value
from mindspeed_rl_plugin.dock.messages import Extent, Part, Put
from mindspeed_rl_plugin.dock.places import ids_array
from mindspeed_rl_plugin.dock.storage import MOST, layout
from mindspeed_rl_plugin.rows import Column, Ragged, Rows

INLINE = 128 << 10  # bytes; a smaller put travels with its message, a larger one is written into lent memory
NONE = np.empty(0, np.int64)

Picked = list[tuple[Column, np.ndarray | None]]  # columns, and which of their rows, None for all


class Writer:
    """Writes rows of declared columns; deadline: seconds that a full dock may make a producer wait."""

    def __init__(self, declared: Declared, calls: Calls, deadline: float) -> None:
        self._declared, self._calls, self._deadline = declared, calls, deadline

    def write(
        self, rows: Rows | None, state: str | None, acked: np.ndarray | None = None, *, checked: bool = True
    ) -> None:
        """Send rows to their owners, each with the acknowledgement of what it owns. state: who writes, None: a
        producer; acked: `[n, 3]` ids that it is done with, None for not yet; checked: they must have all that it
        writes."""
        call, epochs = "put" if state is None else f"commit of state {state!r}", self._calls.epochs
        wanted = ids_array(() if rows is None else rows.ids)
        done = wanted[:0] if acked is None else acked
        epochs.cleared(call, wanted)
        if rows is not None:
            self._declared.check_rows(call, rows)
        of_rows, of_acks = self._owners(call, wanted), self._owners(call, done)
        for number, warehouse in sorted({*of_rows, *of_acks}):
            shape, index = epochs.known[number].shape, of_rows.get((number, warehouse), NONE)
            found = [] if rows is None else list(self._parts(shape.members, rows, wanted, index))
            put = Put(number, shape, [part for part, _ in found], state is None, self._deadline)
            if acked is not None:
                _, group, member = done[of_acks.get((number, warehouse), NONE)].T
                put.state, put.rows, put.checked = state, (group * shape.members + member).astype(np.int32), checked
            self._send(warehouse, put, state or "put", [cell for _, picked in found for cell in picked])

    def _owners(self, call: str, ids: np.ndarray) -> dict[tuple[int, int], np.ndarray]:
        """(epoch, warehouse) -> which of `ids` lie there. Cleared epochs are left out: a late repeat is harmless."""
        out = {}
        for number, index in by_value(ids[:, 0]):
            epoch = self._calls.epochs.opened(call, number)
            for warehouse, part in by_value(epoch.owner[ids[index, 1]]) if epoch is not None else ():
                if warehouse < 0:
                    raise ValueError(f"{call}: only rows of a lease can be written from outside of the job")
                out[number, warehouse] = index[part]
        return out

    def _parts(self, members: int, rows: Rows, ids: np.ndarray, index: np.ndarray) -> Iterator[tuple[Part, Picked]]:
        """What rows `index` of `rows` bring: a part of what is numbered by row, one of what is numbered by group."""
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
            yield Part(names, slots.astype(np.int32), length), [(column, whole) for column in columns]

    def _send(self, warehouse: int, put: Put, state: str, cells: Picked) -> None:
        """The cells as bytes, into memory that this machine's warehouse lends, or with the message."""
        calls, (places, total) = self._calls, layout(self._declared.columns, put.parts)
        here = warehouse == calls.warehouse
        spans = [span for begins, sizes in places for span in zip(begins.tolist(), sizes.tolist(), strict=True)]
        for name, (_, nbytes) in zip((n for part in put.parts for n in part.names), spans, strict=True):
            calls.traffic["written", state, name, "local" if here else "remote"] += nbytes
        lent = here and total > INLINE and calls.me.rank >= 0
        if lent:
            put.extent, put.want = self._lend(put, total), total if total <= MOST else 0
            data = calls.segments.view(put.extent.segment, put.extent.offset, total)
        else:
            data = np.empty(total, np.uint8)
        for (column, pick), (begin, nbytes) in zip(cells, spans, strict=True):
            copy_rows(column, pick, data[begin : begin + nbytes])
        answer = calls.ask_warehouse(warehouse, put, None if lent or not put.parts else data)
        if answer.extent is not None:
            calls.cached.append(answer.extent)

    def _lend(self, put: Put, total: int) -> Extent:
        """Memory that this machine's warehouse has lent ahead or lends now."""
        calls = self._calls
        try:
            extent = calls.cached.pop()
        except IndexError:
            extent = None
        if extent is not None and extent.nbytes >= total:
            return extent
        # Else it is too small, and goes back.
        wish = Put(put.epoch, put.shape, put.parts, put.producer, put.deadline, reserve=True, back=extent)
        return calls.ask_warehouse(calls.warehouse, wish).extent


def lengths_of(column: Column) -> np.ndarray:
    """`[B]` int32 entries a row; a dense row is one entry."""
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
    # copy_, not .numpy(): that would make the caller's storage unresizable for good.
    target.copy_(values.reshape(-1))


def _spans(column: Column, index: np.ndarray) -> Iterator[tuple[int, int]]:
    """Begin and end of rows in the values of a column, neighbours joined."""
    offsets = column.offsets.cpu().numpy() if isinstance(column, Ragged) else np.arange(len(column) + 1)
    if not len(index):
        return
    begins, ends = offsets[index], offsets[index + 1]
    cuts = np.flatnonzero(begins[1:] != ends[:-1]) + 1
    for low, high in zip([0, *cuts.tolist()], [*cuts.tolist(), len(index)], strict=True):
        yield int(begins[low]), int(ends[high - 1])
