"""Cells of one column in one epoch: the packed blocks as they were committed, and where each cell lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_rl_plugin.dock.api import ColumnSpec
from mindspeed_rl_plugin.rows import Column, Ragged

ABSENT = -1


class ColumnStore:
    """`slots` cells (samples, or groups for a group column); a commit is kept as one packed block."""

    def __init__(self, spec: ColumnSpec, slots: int) -> None:
        self.spec = spec
        self._block = torch.full((slots,), ABSENT, dtype=torch.int64)
        self._row = torch.zeros(slots, dtype=torch.int64)
        self._blocks: dict[int, Column] = {}
        self._offsets: dict[int, list[int]] = {}  # of ragged blocks, as numbers: a read slices row by row
        self._next = 0

    @property
    def present(self) -> Tensor:
        """`[slots]` bool, which cells are committed."""
        return self._block != ABSENT

    def write(self, slots: Sequence[int], column: Column) -> None:
        """Keep a private copy of `column`, whose row i is the cell `slots[i]`. The slots must be absent."""
        if not slots:
            return
        where = torch.tensor(slots, dtype=torch.int64)
        self._blocks[self._next] = kept = _copy(column)
        if isinstance(kept, Ragged):
            self._offsets[self._next] = kept.offsets.tolist()
        self._block[where] = self._next
        self._row[where] = torch.arange(len(slots))
        self._next += 1

    def gather(self, slots: Sequence[int]) -> Column:
        """A new packed column with the cells `slots`, in that order. The slots must be present."""
        where = torch.tensor(slots, dtype=torch.int64)
        block, row = self._block[where], self._row[where]
        if not self.spec.ragged:
            out = torch.empty(len(slots), *self.spec.trailing, dtype=self.spec.dtype)
            for b in block.unique().tolist():
                out[block == b] = self._blocks[b][row[block == b]]
            return out
        rows = []
        for b, r in zip(block.tolist(), row.tolist(), strict=True):
            offsets = self._offsets[b]
            rows.append(self._blocks[b].values[offsets[r] : offsets[r + 1]])
        return pack(rows, self.spec)

    def drop(self, slots: Sequence[int]) -> None:
        """Forget cells; a block that keeps a few of its rows is packed anew, so that the others' memory goes."""
        where = torch.tensor(slots, dtype=torch.int64)
        touched = [b for b in self._block[where].unique().tolist() if b != ABSENT]
        self._block[where] = ABSENT
        for block in touched:
            left = (self._block == block).nonzero().flatten().tolist()
            kept = self.gather(left) if left else None
            del self._blocks[block]
            self._offsets.pop(block, None)
            if kept is not None:
                self._block[left] = ABSENT
                self.write(left, kept)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, offsets included."""
        tensors = [t for b in self._blocks.values() for t in ((b.values, b.offsets) if isinstance(b, Ragged) else (b,))]
        return sum(t.numel() * t.element_size() for t in tensors)


def pack(rows: Sequence[Tensor], spec: ColumnSpec) -> Ragged:
    """Ragged rows packed; with no rows the empty column of the declared dtype and trailing shape."""
    if rows:
        return Ragged.from_rows(rows, dtype=spec.dtype)
    return Ragged(torch.empty(0, *spec.trailing, dtype=spec.dtype), torch.zeros(1, dtype=torch.int64))


def check_column(spec: ColumnSpec, column: Column) -> None:
    """Raise ValueError unless `column` is a well-formed column of `spec`."""
    if isinstance(column, Ragged) != spec.ragged:
        wants, got = ("Ragged", "a tensor") if spec.ragged else ("a tensor", "Ragged")
        raise ValueError(f"column {spec.name!r} is declared {spec.describe()}: pass {wants}, not {got}")
    values = column.values if isinstance(column, Ragged) else column
    if values.dtype != spec.dtype:
        raise ValueError(f"column {spec.name!r} is declared {spec.dtype}, got {values.dtype}; convert it first")
    if tuple(values.shape[1:]) != spec.trailing:
        raise ValueError(f"column {spec.name!r} has trailing shape {list(spec.trailing)}, got {list(values.shape[1:])}")
    if isinstance(column, Ragged):
        offsets = column.offsets.cpu().numpy()
        if offsets[0] != 0 or offsets[-1] != values.shape[0] or (offsets[1:] < offsets[:-1]).any():
            raise ValueError(
                f"column {spec.name!r}: offsets must rise from 0 to the {values.shape[0]} packed entries, "
                f"got {offsets[:4].tolist()} .. {offsets[-1]}"
            )


def take(column: Column, index: Sequence[int]) -> Column:
    """Rows `index` of a column."""
    if isinstance(column, Tensor):
        return column[torch.as_tensor(index, dtype=torch.int64)]
    return column.take(index)


def _copy(column: Column) -> Column:
    if isinstance(column, Ragged):
        return Ragged(_host(column.values), _host(column.offsets))
    return _host(column)


def _host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
