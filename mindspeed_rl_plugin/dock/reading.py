"""Bring cells into the reader's own memory: copied here, fetched from elsewhere in one reply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from mindspeed_rl_plugin.dock.api import ColumnSpec
from mindspeed_rl_plugin.dock.calls import Calls, by_value
from mindspeed_rl_plugin.dock.limits import items
from mindspeed_rl_plugin.dock.messages import Fetch, Locate
from mindspeed_rl_plugin.dock.places import runs
from mindspeed_rl_plugin.rows import Column, Ragged

Take = Callable[[str, int], np.ndarray]


class Buffers:
    """Memory that a reader keeps for what it reads: a column read into it stays valid until the next read.

    Fresh pages cost several times the copy itself, so whoever reads often and drops what it read passes one.
    """

    def __init__(self) -> None:
        self._kept: dict[str, np.ndarray] = {}

    def take(self, name: str, nbytes: int) -> np.ndarray:
        """`[nbytes]` uint8."""
        kept = self._kept.get(name)
        if kept is None or len(kept) < nbytes:
            kept = self._kept[name] = np.empty(nbytes + nbytes // 4, np.uint8)
        return kept[:nbytes]


def fresh(name: str, nbytes: int) -> np.ndarray:
    """`[nbytes]` uint8 of its own."""
    return np.empty(nbytes, np.uint8)


def gather(
    calls: Calls,
    specs: Mapping[str, ColumnSpec],
    state: str | None,
    names: Sequence[str],
    owner: np.ndarray,
    places: Sequence[np.ndarray],
    take: Take,
) -> dict[str, Column]:
    """Columns of B rows, packed in their order. owner: `[B]` warehouses; places: segment, offset and length `[C, B]`;
    take: (column, bytes) -> memory for it; state: for whom the bytes count, None for nobody."""
    segment, offset, length = places
    nbytes = length * items(specs, names)
    begin = np.cumsum(nbytes, 1) - nbytes
    packed: dict[bytes, Tensor] = {}  # token columns share their offsets
    outs = [take(name, total) for name, total in zip(names, nbytes.sum(1).tolist(), strict=True)]
    columns = {name: as_column(specs[name], outs[i], length[i], packed) for i, name in enumerate(names)}
    for warehouse, index in by_value(owner) if names else ():
        whole, here = len(index) == len(owner), warehouse == calls.warehouse
        cells = [x if whole else x[:, index] for x in (segment, offset, begin, nbytes)]
        if here:
            for column, *place, to, size in _runs(*cells):
                outs[column][to : to + size] = calls.segments.view(*place, size)
        moved = cells[3].sum(1).tolist() if here else _fetch(calls, warehouse, cells, outs, whole)
        for name, size in zip(names, moved, strict=True) if state is not None else ():
            calls.traffic["read", state, name, "local" if here else "remote"] += size
    return columns


def locate(calls: Calls, columns: tuple[str, ...], ids: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """`[B]` warehouse of each of `ids` `[B, 3]`, and segment (-1 for a cell that is not there), offset and length
    `[C, B]` of their cells."""
    owner = np.empty(len(ids), np.int64)
    places = [np.full((len(columns), len(ids)), x, t) for x, t in ((-1, np.int32), (0, np.int64), (0, np.int32))]
    for number, index in by_value(ids[:, 0]):
        epoch = calls.epochs.known[number]
        owner[index] = epoch.owner[ids[index, 1]]
        for warehouse, part in by_value(owner[index]):
            at = index[part]
            rows = ids[at, 1] * epoch.shape.members + ids[at, 2]
            found = calls.ask_warehouse(warehouse, Locate(number, columns, rows))
            for table, values in zip(places, (found.segment, found.offset, found.length), strict=True):
                table[:, at] = values
    return owner, places


def _fetch(
    calls: Calls, warehouse: int, cells: Sequence[np.ndarray], outs: Sequence[np.ndarray], whole: bool
) -> list[int]:
    """Cells from another machine, neighbours that are the same one (a group's, for its members) once; bytes of each
    column that crossed the wire. whole: they fill all of `outs`."""
    segment, offset, begin, nbytes = cells
    fresh = np.ones(segment.shape, bool)
    fresh[:, 1:] = (segment[:, 1:] != segment[:, :-1]) | (offset[:, 1:] != offset[:, :-1])
    fresh[:, 1:] |= nbytes[:, 1:] != nbytes[:, :-1]
    sent = np.where(fresh, nbytes, 0)
    ends = np.cumsum(sent.reshape(-1)).reshape(sent.shape)
    spans = [run[1:3] + run[4:] for run in _runs(segment, offset, ends - sent, sent) if run[4]]
    fetch = Fetch(np.array(spans, np.int64).reshape(-1, 3))
    if whole and fresh.all():
        calls.ask_warehouse(warehouse, fetch, scatter=outs)
    else:
        got = np.empty(int(ends[-1, -1]), np.uint8)
        calls.ask_warehouse(warehouse, fetch, scatter=[got])
        for column, _, at, to, size in _runs(np.zeros_like(segment), ends - nbytes, begin, nbytes):
            outs[column][to : to + size] = got[at : at + size]
    return sent.sum(1).tolist()


def _runs(
    segment: np.ndarray, offset: np.ndarray, begin: np.ndarray, nbytes: np.ndarray
) -> Iterator[tuple[int, int, int, int, int]]:
    """(column, segment, offset, begin, bytes) of copies that lay `[C, n]` cells to `begin` in their columns."""
    flat, sizes = runs(nbytes, segment, offset, begin)
    parts = (flat // segment.shape[1], *(x.reshape(-1)[flat] for x in (segment, offset, begin)), sizes)
    return zip(*(part.tolist() for part in parts), strict=True)


def as_column(
    spec: ColumnSpec, data: np.ndarray, lengths: np.ndarray, packed: dict[bytes, Tensor] | None = None
) -> Column:
    """`[bytes]` uint8 as a column of B rows. packed: offsets by lengths, of columns that may share them."""
    values = torch.frombuffer(data, dtype=spec.dtype) if len(data) else torch.empty(0, dtype=spec.dtype)
    if spec.trailing:
        values = values.reshape(-1, *spec.trailing)
    if not spec.ragged:
        return values
    packed, key = {} if packed is None else packed, lengths.tobytes()
    if key not in packed:
        packed[key] = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
    return Ragged(values, packed[key])
