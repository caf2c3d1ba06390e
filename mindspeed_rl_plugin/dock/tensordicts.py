"""Rows as TensorDict, the form that users of the dock see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mindspeed_rl_plugin.rows import Column, Ragged, Rows, SampleId

if TYPE_CHECKING:
    from tensordict import TensorDict  # takes seconds to import

IDS = "ids"


def to_tensordict(rows: Rows) -> TensorDict:
    """A TensorDict of batch size `[B]`: "ids" is `[B, 3]` int64, ragged columns are jagged nested tensors.

    The tensors share memory with `rows`. Raises ValueError for a column named "ids".
    """
    from tensordict import TensorDict

    if IDS in rows.columns:
        raise ValueError(f"a column named {IDS!r} collides with the ids of the rows; rename it")
    entries = {IDS: torch.tensor(rows.ids, dtype=torch.int64).reshape(-1, 3)}
    for name, column in rows.columns.items():
        ragged = isinstance(column, Ragged)
        entries[name] = torch.nested.nested_tensor_from_jagged(column.values, column.offsets) if ragged else column
    return TensorDict(entries, batch_size=[len(rows)])


def from_tensordict(td: TensorDict) -> Rows:
    """Inverse of `to_tensordict`. Raises ValueError without "ids", or for a nested tensor that is not packed."""
    names = sorted(td.keys())
    if IDS not in names:
        raise ValueError(f"the TensorDict has no {IDS!r} of shape [B, 3]; it holds {names}")
    columns: dict[str, Column] = {}
    for name, value in td.items():
        if name == IDS:
            continue
        if value.is_nested and value.layout != torch.jagged:
            raise ValueError(f"column {name!r} is a strided nested tensor; make it with layout=torch.jagged")
        columns[name] = _pack(value) if value.is_nested else value
    return Rows(tuple(SampleId(*i) for i in td[IDS].tolist()), columns)


def _pack(value: torch.Tensor) -> Ragged:
    if value.lengths() is None:
        return Ragged(value.values(), value.offsets())
    return Ragged.from_rows(list(value.unbind()), dtype=value.dtype)  # a view with holes between its rows
