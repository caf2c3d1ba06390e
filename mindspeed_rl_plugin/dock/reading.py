"""Bring cells into the reader's own memory: copied here, fetched from elsewhere in one reply."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mindspeed_rl_plugin.dock.api import ColumnSpec
from mindspeed_rl_plugin.dock.calls import Calls, by_owner
from mindspeed_rl_plugin.dock.cells import as_column, column_of, empty, moves
from mindspeed_rl_plugin.dock.limits import entry_bytes
from mindspeed_rl_plugin.rows import Column

Take = Callable[[str, int], np.ndarray]


class Part(NamedTuple):
    """Cells of one column, B each, and the `[sum of nbytes]` uint8 that they go to."""

    name: str
    segment: np.ndarray
    offset: np.ndarray
    nbytes: np.ndarray
    out: np.ndarray


def gather(
    calls: Calls,
    specs: Mapping[str, ColumnSpec],
    state: str,
    names: Sequence[str],
    owner: np.ndarray,
    places: Sequence[np.ndarray],
    take: Take,
) -> dict[str, Column]:
    """Columns of B rows, packed in their order. owner: `[B]` warehouses; places: segment, offset and length `[C, B]`;
    take: (column, bytes) -> memory for it; state: for whom the bytes count."""
    segments, offsets, lengths = places
    if not len(owner):
        return {name: empty(specs[name]) for name in names}
    if len(owner) == 1 and owner[0] == calls.warehouse:
        return _one(calls, specs, state, names, places, take)
    sizes = lengths * np.array([entry_bytes(specs[name]) for name in names], np.int64)[:, None]
    packed: dict[bytes, Tensor] = {}  # token columns share their offsets
    columns: dict[str, Column] = {}
    parts = []
    for i, (name, total) in enumerate(zip(names, sizes.sum(1).tolist(), strict=True)):
        data = take(name, total)
        parts.append(Part(name, segments[i], offsets[i], sizes[i], data))
        columns[name] = as_column(specs[name], data, lengths[i], packed)
    for warehouse, index in by_owner(owner):
        here = warehouse == calls.warehouse
        if not here:
            moved = _fetch(calls, warehouse, parts, index, specs)
        elif len(index) == len(owner):
            moved = _copy_all(calls, segments, offsets, sizes, [part.out for part in parts])
        else:
            moved = _copy(calls, parts, index)
        for name, nbytes in zip(names, moved, strict=True):
            calls.traffic.read[state, name, "local" if here else "remote"] += nbytes
    return columns


def _one(
    calls: Calls,
    specs: Mapping[str, ColumnSpec],
    state: str,
    names: Sequence[str],
    places: Sequence[np.ndarray],
    take: Take,
) -> dict[str, Column]:
    """The columns of one row of this machine: not worth an array operation."""
    columns: dict[str, Column] = {}
    packed: dict[int, Tensor] = {}
    for name, segment, offset, length in zip(names, *(x.reshape(-1).tolist() for x in places), strict=True):
        spec = specs[name]
        nbytes = length * entry_bytes(spec)
        data = take(name, nbytes)
        data[:] = calls.segments.view(segment, offset, nbytes)
        if spec.ragged and length not in packed:
            packed[length] = torch.tensor([0, length])
        columns[name] = column_of(spec, data, packed.get(length) if spec.ragged else None)
        calls.traffic.read[state, name, "local"] += nbytes
    return columns


def _copy_all(
    calls: Calls, segment: np.ndarray, offset: np.ndarray, nbytes: np.ndarray, outs: Sequence[np.ndarray]
) -> list[int]:
    """Copy `[C, B]` cells out of this machine's memory, those of each column one after the other into its `outs`."""
    breaks = np.ones(segment.shape, bool)
    breaks[:, 1:] = (segment[:, 1:] != segment[:, :-1]) | (offset[:, 1:] != offset[:, :-1] + nbytes[:, :-1])
    flat = breaks.reshape(-1).nonzero()[0]
    sizes = np.add.reduceat(nbytes.reshape(-1), flat).tolist()
    places = zip(segment.reshape(-1)[flat].tolist(), offset.reshape(-1)[flat].tolist(), sizes, strict=True)
    for out, count in zip(outs, breaks.sum(1).tolist(), strict=True):
        at = 0
        for run in itertools.islice(places, count):
            out[at : at + run[2]] = calls.segments.view(*run)
            at += run[2]
    return [len(out) for out in outs]


def _copy(calls: Calls, parts: Sequence[Part], index: np.ndarray) -> list[int]:
    """Copy cells `index` out of this machine's memory to their places among the others; bytes of each column."""
    for part in parts:
        begins, nbytes = _begins(part.nbytes)[index], part.nbytes[index]
        for segment, offset, begin, size in moves(part.segment[index], part.offset[index], begins, nbytes):
            part.out[begin : begin + size] = calls.segments.view(segment, offset, size)
    return [int(part.nbytes[index].sum()) for part in parts]


def _fetch(
    calls: Calls, warehouse: int, parts: Sequence[Part], index: np.ndarray, specs: Mapping[str, ColumnSpec]
) -> list[int]:
    """Cells `index` from another machine, each once; bytes of each column that crossed the wire."""
    spans, backs, sizes = [], [], []
    for part in parts:
        at, back = index, None
        if specs[part.name].level == "group":  # the same cell for every member
            triples = np.stack([part.segment[index].astype(np.int64), part.offset[index], part.nbytes[index]], 1)
            _, first, back = np.unique(triples, axis=0, return_index=True, return_inverse=True)
            at, back = index[first], back.reshape(-1)
        nbytes = part.nbytes[at]
        spans += [(s, o, n) for s, o, _, n in moves(part.segment[at], part.offset[at], _begins(nbytes), nbytes)]
        backs.append(back)
        sizes.append(nbytes)
    moved = [int(nbytes.sum()) for nbytes in sizes]
    if len(index) == len(parts[0].nbytes) and all(back is None for back in backs):
        calls.fetch(warehouse, spans, [part.out for part in parts])
        return moved
    got = np.empty(sum(moved), np.uint8)
    calls.fetch(warehouse, spans, [got])
    base = 0
    for part, nbytes, back, total in zip(parts, sizes, backs, moved, strict=True):
        source = base + (_begins(nbytes) if back is None else _begins(nbytes)[back])
        begins = _begins(part.nbytes)[index]
        for _, offset, begin, size in moves(np.zeros(len(index), np.int32), source, begins, part.nbytes[index]):
            part.out[begin : begin + size] = got[offset : offset + size]
        base += total
    return moved


def _begins(nbytes: np.ndarray) -> np.ndarray:
    return np.cumsum(nbytes) - nbytes
