"""Bring the cells of a grant into the reader's own memory: copied here, fetched from elsewhere in one reply."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mindspeed_rl_plugin.dock.api import ColumnSpec
from mindspeed_rl_plugin.dock.distributed import cells
from mindspeed_rl_plugin.dock.distributed.connections import Connections
from mindspeed_rl_plugin.dock.distributed.frames import Message
from mindspeed_rl_plugin.dock.report import listed
from mindspeed_rl_plugin.rows import Column, Rows, SampleId


class Part(NamedTuple):
    """Cells of one column, B each, and the `[sum of nbytes]` uint8 that they go to."""

    name: str
    segment: np.ndarray
    offset: np.ndarray
    nbytes: np.ndarray
    out: np.ndarray


def gather(
    net: Connections,
    specs: Mapping[str, ColumnSpec],
    state: str,
    names: Sequence[str],
    answer: Message,
    take: Callable[[str, int], np.ndarray],
    deadline: float,
) -> dict[str, Column]:
    """Columns of a grant, packed in the order of its ids. take: (column, bytes) -> memory for it."""
    home, mine = answer.arrays["home"], net.settings.warehouse
    segments, offsets, lengths = (answer.arrays[k] for k in ("segment", "offset", "length"))
    if not len(home):
        return {name: empty(specs[name]) for name in names}
    if len(home) == 1 and home[0] == mine:
        return _one(net, specs, state, names, (segments, offsets, lengths), take)
    sizes = lengths * np.array([cells.entry_bytes(specs[name]) for name in names], np.int64)[:, None]
    totals = sizes.sum(1).tolist()
    packed: dict[bytes, Tensor] = {}  # token columns share their offsets
    columns: dict[str, Column] = {}
    parts = []
    for i, name in enumerate(names):
        data = take(name, totals[i])
        parts.append(Part(name, segments[i], offsets[i], sizes[i], data))
        columns[name] = cells.as_column(specs[name], data, lengths[i], packed)
    moved = totals
    for warehouse in [int(home[0])] if (home == home[0]).all() else np.unique(home).tolist():
        index = (home == warehouse).nonzero()[0]
        if warehouse != mine:
            moved = _fetch(net, warehouse, parts, index, specs, deadline)
        elif len(index) == len(home):
            _copy_all(net, segments, offsets, sizes, [part.out for part in parts])
        else:
            moved = _copy(net, parts, index)
        for name, nbytes in zip(names, moved, strict=True):
            net.traffic.read[state, name, "local" if warehouse == mine else "remote"] += nbytes
    return columns


def _one(
    net: Connections,
    specs: Mapping[str, ColumnSpec],
    state: str,
    names: Sequence[str],
    places: Sequence[np.ndarray],
    take: Callable[[str, int], np.ndarray],
) -> dict[str, Column]:
    """The columns of one row of this node: not worth an array operation. places: segment, offset, length `[C, 1]`."""
    columns: dict[str, Column] = {}
    packed: dict[int, Tensor] = {}
    cells_of = zip(names, *(x.reshape(-1).tolist() for x in places), strict=True)
    for name, segment, offset, length in cells_of:
        spec = specs[name]
        nbytes = length * cells.entry_bytes(spec)
        data = take(name, nbytes)
        data[:] = net.segments.view(segment, offset, nbytes)
        if spec.ragged and length not in packed:
            packed[length] = torch.tensor([0, length])
        columns[name] = cells.column_of(spec, data, packed.get(length) if spec.ragged else None)
        net.traffic.read[state, name, "local"] += nbytes
    return columns


def _copy_all(
    net: Connections, segment: np.ndarray, offset: np.ndarray, nbytes: np.ndarray, outs: Sequence[np.ndarray]
) -> None:
    """Copy `[C, B]` cells out of this node's memory, those of each column one after the other into its `outs`."""
    breaks = np.ones(segment.shape, bool)
    breaks[:, 1:] = (segment[:, 1:] != segment[:, :-1]) | (offset[:, 1:] != offset[:, :-1] + nbytes[:, :-1])
    flat = breaks.reshape(-1).nonzero()[0]
    sizes = np.add.reduceat(nbytes.reshape(-1), flat).tolist()
    places = zip(segment.reshape(-1)[flat].tolist(), offset.reshape(-1)[flat].tolist(), sizes, strict=True)
    for out, count in zip(outs, breaks.sum(1).tolist(), strict=True):
        at = 0
        for run in itertools.islice(places, count):
            out[at : at + run[2]] = net.segments.view(*run)
            at += run[2]


def _copy(net: Connections, parts: Sequence[Part], index: np.ndarray) -> list[int]:
    """Copy cells `index` out of this node's memory to their places among the others; bytes of each column."""
    moved = []
    for part in parts:
        begins, nbytes = _begins(part.nbytes)[index], part.nbytes[index]
        for segment, offset, begin, size in moves(part.segment[index], part.offset[index], begins, nbytes):
            part.out[begin : begin + size] = net.segments.view(segment, offset, size)
        moved.append(int(nbytes.sum()))
    return moved


def _fetch(
    net: Connections,
    warehouse: int,
    parts: Sequence[Part],
    index: np.ndarray,
    specs: Mapping[str, ColumnSpec],
    deadline: float,
) -> list[int]:
    """Cells `index` from another node, each once; bytes of each column that crossed the wire."""
    asked, backs, moved = [], [], []
    for part in parts:
        at, back = index, None
        if specs[part.name].level == "group":  # the same cell for every member
            triples = np.stack([part.segment[index].astype(np.int64), part.offset[index], part.nbytes[index]], 1)
            _, first, back = np.unique(triples, axis=0, return_index=True, return_inverse=True)
            at, back = index[first], back.reshape(-1)
        asked.append((part.segment[at], part.offset[at], part.nbytes[at]))
        backs.append(back)
        moved.append(int(part.nbytes[at].sum()))
    spans = cells.runs(*(np.concatenate(x) for x in zip(*asked, strict=True)))
    if len(index) == len(parts[0].nbytes) and all(back is None for back in backs):
        net.fetch_into(warehouse, spans, [part.out for part in parts], deadline)
        return moved
    got = net.fetch(warehouse, spans, deadline)
    base = 0
    for part, (_, _, nbytes), back, total in zip(parts, asked, backs, moved, strict=True):
        source = base + _begins(nbytes)
        source = source if back is None else source[back]
        begins = _begins(part.nbytes)[index]
        for _, offset, begin, size in moves(np.zeros(len(index), np.int32), source, begins, part.nbytes[index]):
            part.out[begin : begin + size] = got[offset : offset + size]
        base += total
    return moved


def moves(
    segment: np.ndarray, offset: np.ndarray, begin: np.ndarray, nbytes: np.ndarray
) -> list[tuple[int, int, int, int]]:
    """(segment, offset, begin, bytes) of copies that lay cells to their places; neighbours on both sides joined."""
    if not len(segment):
        return []
    breaks = (
        (segment[1:] != segment[:-1])
        | (offset[1:] != offset[:-1] + nbytes[:-1])
        | (begin[1:] != begin[:-1] + nbytes[:-1])
    )
    low = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    sizes = np.add.reduceat(nbytes, low)
    return list(zip(segment[low].tolist(), offset[low].tolist(), begin[low].tolist(), sizes.tolist(), strict=True))


def _begins(nbytes: np.ndarray) -> np.ndarray:
    return np.cumsum(nbytes) - nbytes


def read(
    net: Connections,
    specs: Mapping[str, ColumnSpec],
    deadline: float,
    warehouse: int,
    epoch: int,
    ids: Sequence[SampleId],
    slots: np.ndarray,
    names: Sequence[str],
    missing: list[str],
) -> Rows:
    """Cells of `ids`, rows `slots` of an epoch, from one warehouse, without a lease; missing: gets what is absent."""
    members = net.shapes[epoch].members
    arrays = {}
    for i, name in enumerate(names):
        arrays[f"slots.{i}"] = slots // members if specs[name].level == "group" else slots
    answer = net.warehouse(warehouse, Message("read", {"epoch": epoch, "columns": list(names)}, arrays), deadline)
    if answer.kind == "portions":  # more than fits one answer
        cuts = [ids[low:high] for low, high in answer.arrays["bounds"].tolist()]
        parts = np.split(slots, answer.arrays["bounds"][1:, 0])
        where = (net, specs, deadline, warehouse, epoch)
        found = [read(*where, i, s, names, missing) for i, s in zip(cuts, parts, strict=True)]
        return Rows(tuple(ids), {}) if missing else Rows.concat(found)
    kind = "local" if warehouse == net.settings.warehouse else "remote"
    out: dict[str, Column] = {}
    for i, name in enumerate(names):
        lengths, data = answer.arrays[f"lengths.{i}"], answer.arrays[f"data.{i}"]
        if (lengths < 0).any():
            missing.append(f"column {name!r} of {listed(ids[j] for j in (lengths < 0).nonzero()[0])}")
            continue
        net.traffic.read["read", name, kind] += data.nbytes
        out[name] = cells.as_column(specs[name], data, lengths)
    return Rows(tuple(ids), {} if len(out) < len(names) else out)


def empty(spec: ColumnSpec) -> Column:
    """A column without rows."""
    return cells.as_column(spec, np.empty(0, np.uint8), np.empty(0, np.int32))
