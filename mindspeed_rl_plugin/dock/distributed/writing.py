"""The writing half of a rank's dock: rows to the warehouses that are their homes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mindspeed_rl_plugin.dock.api import ColumnSpec
from mindspeed_rl_plugin.dock.distributed import cells, reservations
from mindspeed_rl_plugin.dock.distributed.arena import rounded
from mindspeed_rl_plugin.dock.distributed.connections import (
    Connections,
    WarehouseLost,
    check_ids,
    epochs_of,
    first_of_each,
    slots_by_home,
)
from mindspeed_rl_plugin.dock.distributed.frames import Message
from mindspeed_rl_plugin.dock.distributed.records import Shape
from mindspeed_rl_plugin.dock.report import listed
from mindspeed_rl_plugin.dock.store import check_column
from mindspeed_rl_plugin.rows import Column, Rows, SampleId

INLINE = 128 << 10  # bytes; a smaller put travels with its message, a larger one is written into reserved memory


class Part(NamedTuple):
    """What a write brings of one column. pick: rows of `column`, None for all; slots, lengths: of its n cells."""

    name: str
    column: Column
    pick: np.ndarray | None
    slots: np.ndarray
    lengths: np.ndarray
    nbytes: int


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
            if self._net.dead:  # they may live again
                rows, acked = self._without_lost(state, rows, acked)
            try:
                return self._write(rows, state, acked, needs)
            except WarehouseLost:
                continue
        return self._write(rows, state, acked, needs)

    def _without_lost(
        self, state: str | None, rows: Rows | None, acked: Sequence[SampleId] | None
    ) -> tuple[Rows | None, Sequence[SampleId] | None]:
        if state is None:
            self._net.health(next(iter(self._net.directory.controllers)))
            return rows, acked
        lost = set(map(tuple, self._net.health(state).tolist()))
        if rows is not None:
            rows = rows.take([i for i, sample in enumerate(rows.ids) if sample[:2] not in lost])
        return rows, None if acked is None else [i for i in acked if i[:2] not in lost]

    def _check(self, call: str, rows: Rows | None, acked: Sequence[SampleId]) -> None:
        wanted = () if rows is None else rows.ids
        for ids in (wanted, acked) if acked is not wanted else (wanted,):
            if len(ids):
                check_ids(self._net.shapes, self._net.last_epoch, call, self._net.numbers(ids))
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
        if rows is None:
            return self._acknowledge(state, acked or (), needs)
        wanted, done = self._net.numbers(rows.ids), self._net.numbers(acked or ())
        for epoch in sorted({e for e, _ in epochs_of(wanted)} | {e for e, _ in epochs_of(done)}):
            shape = self._net.shapes.get(epoch)
            if shape is None:
                continue  # cleared: a late repeat is harmless
            homes = self._net.homes(epoch)
            mine = (wanted[:, 0] == epoch).nonzero()[0]
            acks = done if done is wanted and len(mine) == len(done) else done[done[:, 0] == epoch]
            home, home_of_acks = homes[wanted[mine, 1]], homes[acks[:, 1]]
            for warehouse in sorted(set(home.tolist()) | set(home_of_acks.tolist())):
                index, of_home = mine[home == warehouse], acks[home_of_acks == warehouse]
                slots = of_home[:, 1] * shape.members + of_home[:, 2] if acked is not None else None
                self._write_to(warehouse, epoch, shape, rows, wanted, index, state, slots, needs)

    def _acknowledge(self, state: str | None, acked: Sequence[SampleId], needs: Sequence[str]) -> None:
        ids = self._net.numbers(acked)
        for epoch, index in epochs_of(ids):
            shape = self._net.shapes.get(epoch)
            if shape is not None:  # else cleared: a late repeat is harmless
                for warehouse, _, slots in slots_by_home(self._net.homes(epoch), shape, ids[index]):
                    self._write_to(warehouse, epoch, shape, None, ids, ids, state, slots, needs)

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
        local = warehouse == self._net.settings.warehouse
        parts = self._parts(shape, rows, ids, index) if rows is not None and len(index) else []
        if not local and sum(part.nbytes for part in parts) > cells.FETCH_BYTES:
            groups = np.unique(ids[index, 1])
            if len(groups) > 1:  # in halves, whole groups each; the last one acknowledges
                first = np.isin(ids[index, 1], groups[: len(groups) // 2])
                self._write_to(warehouse, epoch, shape, rows, ids, index[first], state, None, ())
                return self._write_to(warehouse, epoch, shape, rows, ids, index[~first], state, acked, needs)
        arrays: dict[str, Any] = {}
        forms = [_form(arrays, part.slots, part.lengths) for part in parts]
        kind = "local" if local else "remote"
        for part in parts:
            self._net.traffic.written[state or "put", part.name, kind] += part.nbytes
        note = {
            "epoch": epoch,
            "shape": list(shape),
            "columns": [part.name for part in parts],
            "forms": forms,
            "sizes": [part.nbytes for part in parts],
            "producer": state is None,
            "deadline": self._deadline,
        }
        if acked is not None:
            note["ack"], note["needs"] = state, list(needs)
            arrays["ack"] = acked.astype(np.int32)
        if local and sum(note["sizes"]) > INLINE:
            while not self._write_here(note, arrays, parts):
                pass  # the warehouse was restarted in between, or the connection lost
            return
        arrays["data"] = data = np.empty(sum(note["sizes"]), np.uint8)
        at = 0
        for part in parts:
            cells.copy_rows(part.column, part.pick, data[at : at + part.nbytes])
            at += part.nbytes
        self._net.warehouse(warehouse, Message("put", note, arrays), self._deadline)

    def _parts(self, shape: Shape, rows: Rows, ids: np.ndarray, index: np.ndarray) -> list[Part]:
        """What rows `index` of `rows` bring of each column; columns of equal form share its arrays."""
        slots = (ids[index, 1] * shape.members + ids[index, 2]).astype(np.int32)
        groups = None  # (rows that bring a group's cell, numbers of their groups)
        parts, lengths = [], {}
        for name, column in rows.columns.items():
            spec, pick, numbers = self.columns[name], index, slots
            if spec.level == "group":
                if groups is None:
                    first = index[first_of_each(ids[index, 1])]
                    groups = first, ids[first, 1].astype(np.int32)
                pick, numbers = groups
            found = cells.lengths_of(column)
            whole = len(pick) == len(found)
            found = found if whole else found[pick]
            form = spec.level, spec.ragged
            known = lengths.setdefault(form, found)
            found = known if known is found or (known == found).all() else found
            nbytes = int(found.sum()) * cells.entry_bytes(spec)
            parts.append(Part(name, column, None if whole else pick, numbers, found, nbytes))
        return parts

    def _write_here(self, note: dict[str, Any], arrays: dict[str, Any], parts: Sequence[Part]) -> bool:
        """Copy into memory that this node's warehouse has lent or reserves, and commit. False: to be repeated."""
        net, warehouse = self._net, self._net.settings.warehouse
        rooms = [rounded(max(part.nbytes, 1)) for part in parts]
        want = sum(rooms)
        spare = net.spare() if want <= reservations.MOST else None
        if spare is not None and want <= spare.extent.nbytes and spare.ours:
            (segment, offset, _), incarnation, _ = spare
            begins = itertools.accumulate(rooms[:-1], initial=offset)
            extents = [[segment, begin, room] for begin, room in zip(begins, rooms, strict=True)]
        else:
            slots = {k: a for k, a in arrays.items() if k.startswith("slots.")}
            place = net.warehouse(warehouse, Message("reserve", note, slots), self._deadline).note
            extents, incarnation = place["extents"], place["incarnation"]
        try:
            for part, (segment, offset, _) in zip(parts, extents, strict=True):
                cells.copy_rows(part.column, part.pick, net.segments.view(segment, offset, part.nbytes))
        except FileNotFoundError:
            return False  # restarted, and what nobody had filled is removed
        note = {**note, "extents": extents, "incarnation": incarnation}
        if want <= reservations.MOST:
            note["want"], note["spare"] = want, None if spare is None else spare.extent
        answer = net.warehouse(warehouse, Message("put", note, arrays), self._deadline)
        net.lent(answer)
        return answer.kind == "committed"


def _form(arrays: dict[str, Any], slots: np.ndarray, lengths: np.ndarray) -> int:
    """Number under which a message has these slots and lengths; what several columns share is sent once."""
    number = 0
    while f"slots.{number}" in arrays:
        if arrays[f"slots.{number}"] is slots and arrays[f"lengths.{number}"] is lengths:
            return number
        number += 1
    arrays[f"slots.{number}"], arrays[f"lengths.{number}"] = slots, lengths
    return number
