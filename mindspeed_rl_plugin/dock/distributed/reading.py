"""Bring the cells of a grant into the reader's own memory: copied here, fetched from elsewhere in one reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mindspeed_rl_plugin.dock.api import ColumnSpec
from mindspeed_rl_plugin.dock.distributed import cells
from mindspeed_rl_plugin.dock.distributed.asks import places
from mindspeed_rl_plugin.dock.distributed.connections import Connections
from mindspeed_rl_plugin.dock.distributed.frames import Message
from mindspeed_rl_plugin.dock.report import listed
from mindspeed_rl_plugin.types import Column, Rows, SampleId


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
    take: Callable[[str, int], Tensor],
    deadline: float,
) -> dict[str, Column]:
    """Columns of a grant, packed in the order of its ids. take: (column, bytes) -> memory for it."""
    home, mine = answer.arrays["home"], net.settings.warehouse
    near = not len(home) or bool((home == mine).all())
    columns: dict[str, Column] = {}
    parts = []
    for name in names:
        segment, offset, length = places(answer, name)
        nbytes = length.astype(np.int64) * cells.entry_bytes(specs[name])
        data = take(name, int(nbytes.sum()))
        parts.append(Part(name, segment, offset, nbytes, data.numpy()))
        columns[name] = cells.as_column(specs[name], data, length)
    for warehouse in [mine] if near else np.unique(home).tolist():
        index = None if near else (home == warehouse).nonzero()[0]
        read = _copy if warehouse == mine else _fetch
        for name, moved in read(net, warehouse, parts, index, specs, deadline).items():
            net.traffic.read[state, name, "local" if warehouse == mine else "remote"] += moved
    return columns


def _copy(
    net: Connections,
    warehouse: int,
    parts: Sequence[Part],
    index: np.ndarray | None,
    specs: Mapping[str, ColumnSpec],
    deadline: float,
) -> dict[str, int]:
    """Copy cells `index` (None: all) out of this node's memory; bytes of each column."""
    moved = {}
    for part in parts:
        if index is None:
            at = 0
            for run in cells.runs(part.segment, part.offset, part.nbytes):
                part.out[at : at + run[2]] = net.segments.view(*run)
                at += run[2]
        else:
            begins, nbytes = _begins(part.nbytes)[index], part.nbytes[index]
            for segment, offset, begin, size in moves(part.segment[index], part.offset[index], begins, nbytes):
                part.out[begin : begin + size] = net.segments.view(segment, offset, size)
            at = int(nbytes.sum())
        moved[part.name] = at
    return moved


def _fetch(
    net: Connections,
    warehouse: int,
    parts: Sequence[Part],
    index: np.ndarray,
    specs: Mapping[str, ColumnSpec],
    deadline: float,
) -> dict[str, int]:
    """Cells `index` from another node, each once; bytes of each column that crossed the wire."""
    asked, backs, moved = [], [], {}
    for part in parts:
        at, back = index, None
        if specs[part.name].level == "group":  # the same cell for every member
            triples = np.stack([part.segment[index].astype(np.int64), part.offset[index], part.nbytes[index]], 1)
            _, first, back = np.unique(triples, axis=0, return_index=True, return_inverse=True)
            at, back = index[first], back.reshape(-1)
        asked.append((part.segment[at], part.offset[at], part.nbytes[at]))
        backs.append(back)
        moved[part.name] = int(part.nbytes[at].sum())
    spans = cells.runs(*(np.concatenate(x) for x in zip(*asked, strict=True)))
    got = net.fetch(warehouse, spans, deadline)
    base = 0
    for part, (_, _, nbytes), back in zip(parts, asked, backs, strict=True):
        source = base + _begins(nbytes)
        source = source if back is None else source[back]
        begins = _begins(part.nbytes)[index]
        for _, offset, begin, size in moves(np.zeros(len(index), np.int32), source, begins, part.nbytes[index]):
            part.out[begin : begin + size] = got[offset : offset + size]
        base += moved[part.name]
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
    kind = "local" if warehouse == net.settings.warehouse else "remote"
    out: dict[str, Column] = {}
    for i, name in enumerate(names):
        lengths, data = answer.arrays[f"lengths.{i}"], answer.arrays[f"data.{i}"]
        if (lengths < 0).any():
            missing.append(f"column {name!r} of {listed(ids[j] for j in (lengths < 0).nonzero()[0])}")
            continue
        net.traffic.read["read", name, kind] += data.nbytes
        out[name] = cells.as_column(specs[name], torch.from_numpy(data), lengths)
    return Rows(tuple(ids), {} if len(out) < len(names) else out)


def empty(spec: ColumnSpec) -> Column:
    """A column without rows."""
    return cells.as_column(spec, torch.empty(0, dtype=torch.uint8), np.empty(0, np.int32))
