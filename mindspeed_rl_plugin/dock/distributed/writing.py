"""The writing half of a rank's dock: rows to the warehouses that are their homes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_rl_plugin.dock.api import ColumnSpec
from mindspeed_rl_plugin.dock.distributed import cells
from mindspeed_rl_plugin.dock.distributed.connections import (
    Connections,
    WarehouseLost,
    check_ids,
    epochs_of,
    first_of_each,
)
from mindspeed_rl_plugin.dock.distributed.frames import Message
from mindspeed_rl_plugin.dock.distributed.records import Shape
from mindspeed_rl_plugin.dock.report import listed
from mindspeed_rl_plugin.dock.store import check_column
from mindspeed_rl_plugin.types import Column, Rows, SampleId

INLINE = 128 << 10  # bytes; a smaller put travels with its message, a larger one is written into reserved memory


class Writer:
    """Writes rows of `columns`; deadline: seconds that a full dock may make a producer wait."""

    def __init__(self, columns: Mapping[str, ColumnSpec], connections: Connections, deadline: float) -> None:
        self.columns, self._net, self._deadline = columns, connections, deadline

    def write(
        self,
        rows: Rows | None,
        state: str | None,
        acked: Sequence[SampleId] | None,
        needs: Sequence[str] = (),
    ) -> None:
        """Send rows to their homes, each with the acknowledgement of what it is the home of; needs: columns that
        acknowledged rows must have then. state: who writes, None: a producer.

        Where a machine is lost meanwhile, a producer's rows go to another one; what a state did with its rows is
        dropped, for their groups are done anew.
        """
        self._check("put" if state is None else f"commit of state {state!r}", rows, acked or ())
        for _ in range(len(self._net.directory.warehouses)):
            if state is not None and self._net.dead:
                rows, acked = self._without_lost(state, rows, acked)
            try:
                return self._write(rows, state, acked, needs)
            except WarehouseLost:
                continue
        return self._write(rows, state, acked, needs)

    def _without_lost(
        self, state: str, rows: Rows | None, acked: Sequence[SampleId] | None
    ) -> tuple[Rows | None, Sequence[SampleId] | None]:
        lost = set(map(tuple, self._net.health(state).tolist()))
        if rows is not None:
            rows = rows.take([i for i, sample in enumerate(rows.ids) if sample[:2] not in lost])
        return rows, None if acked is None else [i for i in acked if i[:2] not in lost]

    def _check(self, call: str, rows: Rows | None, acked: Sequence[SampleId]) -> None:
        wanted = () if rows is None else rows.ids
        check_ids(self._net.shapes, self._net.last_epoch, call, cells.ids_array((*wanted, *acked)))
        if rows is None:
            return
        unknown = [c for c in rows.columns if c not in self.columns]
        if unknown:
            raise ValueError(f"{call}: columns {unknown} are not declared; declared: {listed(self.columns)}")
        for name, column in rows.columns.items():
            check_column(self.columns[name], column)
        if len(set(rows.ids)) != len(wanted):
            raise ValueError(f"{call}: an id occurs twice among {listed(rows.ids)}")

    def _write(
        self, rows: Rows | None, state: str | None, acked: Sequence[SampleId] | None, needs: Sequence[str]
    ) -> None:
        wanted = cells.ids_array(() if rows is None else rows.ids)
        done = cells.ids_array(acked or ())
        for epoch in sorted({e for e, _ in epochs_of(wanted)} | {e for e, _ in epochs_of(done)}):
            shape = self._net.shapes.get(epoch)
            if shape is None:
                continue  # cleared: a late repeat is harmless
            homes = self._net.homes(epoch)
            mine = (wanted[:, 0] == epoch).nonzero()[0]
            acks = done[done[:, 0] == epoch]
            touched = np.unique(homes[np.concatenate([wanted[mine, 1], acks[:, 1]])])
            for warehouse in touched.tolist():
                index = mine[homes[wanted[mine, 1]] == warehouse]
                of_home = acks[homes[acks[:, 1]] == warehouse]
                slots = of_home[:, 1] * shape.members + of_home[:, 2] if acked is not None else None
                self._write_to(warehouse, epoch, shape, rows, wanted, index, state, slots, needs)

    def _write_to(
        self,
        warehouse: int,
        epoch: int,
        shape: Shape,
        rows: Rows | None,
        ids: np.ndarray,
        index: np.ndarray,
        state: str | None,
        acked: np.ndarray | None,
        needs: Sequence[str],
    ) -> None:
        names, columns, arrays, picks, sizes = [], [], {}, [], []
        local = warehouse == self._net.settings.warehouse
        whole = index if len(index) == len(ids) else None
        for name, column in (rows.columns.items() if rows is not None and len(index) else ()):
            spec = self.columns[name]
            pick, slots = index, ids[index, 1] * shape.members + ids[index, 2]
            if spec.level == "group":
                first = first_of_each(ids[index, 1])
                pick, slots = index[first], ids[index[first], 1]
            lengths = cells.lengths_of(column)
            lengths = lengths if pick is whole else lengths[pick]
            i = len(names)
            arrays[f"slots.{i}"] = shared(arrays, "slots", slots.astype(np.int32))
            arrays[f"lengths.{i}"] = shared(arrays, "lengths", lengths)
            names.append(name)
            columns.append(column)
            picks.append(None if pick is whole or len(pick) == len(column) else pick)
            sizes.append(int(lengths.sum()) * cells.entry_bytes(spec))
            kind = "local" if local else "remote"
            self._net.traffic.written[state or "put", name, kind] += sizes[-1]
        note = {
            "epoch": epoch,
            "shape": list(shape),
            "columns": names,
            "producer": state is None,
            "deadline": self._deadline,
        }
        if acked is not None:
            note["ack"], note["needs"] = state, list(needs)
            arrays["ack"] = acked.astype(np.int32)
        if local and sum(sizes) > INLINE:
            while not self._write_here(note, arrays, list(zip(columns, picks, sizes, strict=True))):
                pass  # the warehouse was restarted in between
            return
        for i, (column, pick, size) in enumerate(zip(columns, picks, sizes, strict=True)):
            arrays[f"data.{i}"] = np.empty(size, np.uint8)
            cells.copy_rows(column, pick, arrays[f"data.{i}"])
        self._net.warehouse(warehouse, Message("put", note, arrays), self._deadline)

    def _write_here(
        self,
        note: dict[str, Any],
        arrays: Mapping[str, np.ndarray],
        parts: Sequence[tuple[Column, np.ndarray | None, int]],
    ) -> bool:
        """Copy into memory that this node's warehouse reserves; parts: column, rows, bytes. False: to be repeated."""
        warehouse = self._net.settings.warehouse
        slots = {k: a for k, a in arrays.items() if k.startswith("slots.")}
        ask = Message("reserve", {**note, "sizes": [size for *_, size in parts]}, slots)
        place = self._net.warehouse(warehouse, ask, self._deadline).note
        try:
            for (column, pick, size), (segment, offset, _) in zip(parts, place["extents"], strict=True):
                cells.copy_rows(column, pick, self._net.segments.view(segment, offset, size))
        except FileNotFoundError:
            return False  # restarted, and what nobody had filled is removed
        note = {**note, "extents": place["extents"], "incarnation": place["incarnation"]}
        answer = self._net.warehouse(warehouse, Message("put", note, arrays), self._deadline)
        return answer.kind == "committed"


def shared(arrays: Mapping[str, np.ndarray], kind: str, array: np.ndarray) -> np.ndarray:
    """The array of that kind that is there already with the same content, or this one: sent and looked at once."""
    for name, known in arrays.items():
        if name.startswith(kind) and len(known) == len(array) and (known == array).all():
            return known
    return array
