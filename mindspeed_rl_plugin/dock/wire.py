"""Rows and a small JSON note as one contiguous uint8 tensor, without pickle.

Layout, each part padded to 8 bytes so that it can be viewed in its own dtype: JSON length (int64), JSON, ids
(`[B, 3]` int64), then for each column its values and, if ragged, its offsets.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.types import Column, Ragged, Rows, SampleId

ALIGN = 8


def encode(note: dict[str, Any], rows: Rows | None = None) -> Tensor:
    """`[bytes]` uint8. note: JSON values; rows: tensors on the host, of any dtype that torch names."""
    parts: list[Tensor] = []
    head: dict[str, Any] = {"note": note, "columns": None}
    if rows is not None:
        parts.append(torch.tensor(rows.ids, dtype=torch.int64).reshape(-1, 3))
        head["columns"] = []
        for name, column in rows.columns.items():
            ragged = isinstance(column, Ragged)
            values = (column.values if ragged else column).detach().to("cpu").contiguous()
            head["columns"].append([name, str(values.dtype).removeprefix("torch."), list(values.shape), ragged])
            parts += [values, column.offsets.to("cpu", torch.int64).contiguous()] if ragged else [values]
        head["count"] = len(rows)
    text = json.dumps(head).encode()
    blob = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return torch.cat([_padded(p) for p in (torch.tensor([len(text)]), blob, *parts)])


def decode(data: Tensor) -> tuple[dict[str, Any], Rows | None]:
    """Inverse of `encode`; the columns are views of `data`."""
    cursor = _Cursor(data)
    length = int(cursor.take(torch.int64, [1]))
    head = json.loads(bytes(cursor.take(torch.uint8, [length]).tolist()))
    if head["columns"] is None:
        return head["note"], None
    ids = cursor.take(torch.int64, [head["count"], 3]).tolist()
    columns: dict[str, Column] = {}
    for name, dtype, shape, ragged in head["columns"]:
        values = cursor.take(getattr(torch, dtype), shape)
        columns[name] = Ragged(values, cursor.take(torch.int64, [head["count"] + 1])) if ragged else values
    return head["note"], Rows(tuple(SampleId(*i) for i in ids), columns)


class _Cursor:
    """Reads typed, padded parts one after the other."""

    def __init__(self, data: Tensor) -> None:
        self._data, self._at = data, 0

    def take(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        part = self._data[self._at : self._at + size].view(dtype).reshape(shape)
        self._at += -(-size // ALIGN) * ALIGN
        return part


def _padded(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1).view(torch.uint8)
    short = -flat.numel() % ALIGN
    return torch.cat([flat, flat.new_zeros(short)]) if short else flat
