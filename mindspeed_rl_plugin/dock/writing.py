"""The writing half of a dock: rows to the warehouses that own their groups."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mindspeed_rl_plugin.dock.api import Declared
from mindspeed_rl_plugin.dock.calls import Calls, by_value
from mindspeed_rl_plugin.dock.cells import copy_rows, lengths_of
from mindspeed_rl_plugin.dock.messages import Extent, Part, Put
from mindspeed_rl_plugin.dock.storage import MOST, Layout
from mindspeed_rl_plugin.rows import Column, Rows

INLINE = 128 << 10  # bytes; a smaller put travels with its message, a larger one is written into lent memory


class Source(NamedTuple):
    """Where the cells of a part come from. picks: for each column which of its rows, None for all."""

    columns: list[Column]
    pick: np.ndarray | None


class Writer:
    """Writes rows of declared columns; deadline: seconds that a full dock may make a producer wait."""

    def __init__(self, declared: Declared, calls: Calls, deadline: float) -> None:
        self._declared, self._calls, self._deadline = declared, calls, deadline
        self._layout = Layout(declared)

    def write(
        self,
        rows: Rows | None,
        wanted: np.ndarray,
        state: str | None,
        acked: np.ndarray | None = None,
        checked: bool = True,
    ) -> None:
        """Send rows to their owners, each with the acknowledgement of what it owns. wanted: `[B, 3]` ids of the rows;
        state: who writes, None: a producer; acked: `[n, 3]` ids that it is done with, None for not yet; checked: they
        must have all that it writes."""
        call, epochs = "put" if state is None else f"commit of state {state!r}", self._calls.epochs
        done = wanted[:0] if acked is None else acked
        for ids in (wanted,) if done is wanted else (wanted, done):
            epochs.check(call, ids)
        if rows is not None:
            self._declared.check_rows(call, rows)
        for epoch in sorted({e for ids in (wanted, done) for e, _ in by_value(ids[:, 0])}):
            if epoch not in epochs.shapes:
                continue  # cleared: a late repeat is harmless
            owner, members = epochs.owner(epoch), epochs.shapes[epoch].members
            mine = (wanted[:, 0] == epoch).nonzero()[0]
            acks = done if done is wanted and len(mine) == len(done) else done[done[:, 0] == epoch]
            of_rows, of_acks = dict(by_value(owner[wanted[mine, 1]])), dict(by_value(owner[acks[:, 1]]))
            for warehouse in sorted({*of_rows, *of_acks}):
                if warehouse < 0:
                    raise ValueError(f"{call}: only rows of a lease can be written from outside of the job")
                index = mine[of_rows.get(warehouse, np.empty(0, np.int64))]
                held = acks[of_acks.get(warehouse, np.empty(0, np.int64))]
                slots = None if acked is None else (held[:, 1] * members + held[:, 2]).astype(np.int32)
                self._write_to(warehouse, epoch, rows, wanted, index, state, slots, checked)

    def _write_to(
        self,
        warehouse: int,
        epoch: int,
        rows: Rows | None,
        ids: np.ndarray,
        index: np.ndarray,
        state: str | None,
        acked: np.ndarray | None,
        checked: bool = True,
    ) -> None:
        calls, shape = self._calls, self._calls.epochs.shapes[epoch]
        parts, sources = self._parts(shape.members, rows, ids, index) if rows is not None and len(index) else ([], [])
        begins, total = self._layout(parts)
        here = warehouse == calls.warehouse
        for part in parts:
            for name, nbytes in zip(part.names, self._layout.sizes(part), strict=True):
                calls.traffic.written[state or "put", name, "local" if here else "remote"] += nbytes
        put = Put(epoch, shape, parts, state is None, self._deadline)
        if acked is not None:
            put.state, put.rows, put.checked = state, acked, checked
        if here and total > INLINE and calls.rank >= 0:
            return self._write_here(put, begins, sources, total)
        data = np.empty(total, np.uint8) if parts else None
        for source, begin, part in zip(sources, begins, parts, strict=True):
            self._fill(source, begin, part, data)
        calls.ask_warehouse(warehouse, put, data, self._deadline)
        return None

    def _write_here(self, put: Put, begins: list[np.ndarray], sources: list[Source], total: int) -> None:
        """Copy into memory that this machine's warehouse has lent ahead or lends now, and commit."""
        calls, extent = self._calls, self._lent(total)
        if extent is None:
            put.back = calls.cached.pop(0) if calls.cached else None  # too small
            wish = Put(put.epoch, put.shape, put.parts, put.producer, put.deadline, reserve=True)
            extent = calls.ask_warehouse(calls.warehouse, wish, seconds=self._deadline).extent
        out = calls.segments.view(extent.segment, extent.offset, total)
        for source, begin, part in zip(sources, begins, put.parts, strict=True):
            self._fill(source, begin, part, out)
        put.extent, put.want = extent, total if total <= MOST else 0
        answer = calls.ask_warehouse(calls.warehouse, put, seconds=self._deadline)
        if answer.extent is not None:
            calls.cached.append(answer.extent)

    def _lent(self, total: int) -> Extent | None:
        cached = self._calls.cached
        for extent in list(cached):
            if extent.nbytes >= total:
                try:
                    cached.remove(extent)
                except ValueError:  # another thread took it
                    continue
                return extent
        return None

    def _fill(self, source: Source, begins: np.ndarray, part: Part, out: np.ndarray) -> None:
        sizes = self._layout.sizes(part)
        for column, begin, nbytes in zip(source.columns, begins.tolist(), sizes, strict=True):
            copy_rows(column, source.pick, out[begin : begin + nbytes])

    def _parts(self, members: int, rows: Rows, ids: np.ndarray, index: np.ndarray) -> tuple[list[Part], list[Source]]:
        """What rows `index` of `rows` bring: a part of what is numbered by row, one of what is numbered by group."""
        specs, parts, sources = self._declared.columns, [], []
        for grouped in (False, True):
            names = tuple(name for name in rows.columns if (specs[name].level == "group") == grouped)
            if not names:
                continue
            pick, slots = index, ids[index, 1] * members + ids[index, 2]
            if grouped:
                pick = index[np.sort(np.unique(ids[index, 1], return_index=True)[1])]
                slots = ids[pick, 1]
            whole = len(pick) == len(rows)
            known: dict[int, np.ndarray] = {}
            lengths = []
            for name in names:
                column = rows.columns[name]
                key = id(getattr(column, "offsets", None))
                found = known[key] = known[key] if key in known else lengths_of(column)
                lengths.append(found if whole else found[pick])
            parts.append(Part(names, slots.astype(np.int32), np.array(lengths, np.int32)))
            sources.append(Source([rows.columns[name] for name in names], None if whole else pick))
        return parts, sources
