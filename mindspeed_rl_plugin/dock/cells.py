"""Between `Rows` and bytes: columns to write, and packed columns to fill from cells wherever they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from mindspeed_rl_plugin.dock.api import ColumnSpec
from mindspeed_rl_plugin.rows import Column, Ragged, SampleId


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


def ids_array(ids: Sequence[SampleId] | Tensor) -> np.ndarray:
    """`[B, 3]` int64 of ids, plain triples, or a `[B, 3]` tensor."""
    return np.array(ids, np.int64).reshape(-1, 3)


def ids_tuple(ids: np.ndarray) -> tuple[SampleId, ...]:
    """Inverse of `ids_array`."""
    return tuple(map(SampleId._make, ids.tolist()))
