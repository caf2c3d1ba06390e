"""Aliases: storages that point into the memory of another storage. MindSpeed's `--reuse-fp32-param` makes them.

MindSpeed's operator `reuse_data_ptr(alias, source, offset)` (mindspeed/ops/csrc/algorithm/algorithm.cpp, equal in 2.3.0
and 26.1.0) gives the storage of `alias` a raw pointer into that of `source`, which may be an alias too. When the
storage that owns the memory is resized, these pointers become invalid. The same calls, in the same order, set them
again.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_OPERATOR = "reuse_data_ptr"


@dataclass(frozen=True)
class _AliasCall:
    """One call of the operator."""

    operator: Callable[[Tensor, Tensor, int], None]
    alias: Tensor
    source: Tensor
    offset: int  # from the start of source's storage, in elements of alias


_calls: list[_AliasCall] = []  # of this process, in order


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Within the context, while MindSpeed builds an optimizer, every call of the operator is recorded."""
    builder = importlib.import_module("mindspeed.op_builder.builder").MindSpeedOpBuilder
    original = builder.load

    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        operators = original(self, *args, **kwargs)
        return _Recorded(operators) if hasattr(operators, _OPERATOR) else operators

    builder.load = load
    try:
        yield
    finally:
        builder.load = original


class _Recorded:
    """Replaces MindSpeed's module of operators, and records each call of `reuse_data_ptr` in `_calls`."""

    def __init__(self, operators: Any) -> None:
        self._operator = getattr(operators, _OPERATOR)

    def reuse_data_ptr(self, alias: Tensor, source: Tensor, offset: int) -> None:
        self._operator(alias, source, offset)
        _calls.append(_AliasCall(self._operator, alias, source, offset))


def repoint(revived: Iterable[torch.UntypedStorage]) -> None:
    """Set the pointers of aliases again. revived: storages whose memory is now at another address."""
    alive, where = {storage._cdata for storage in revived}, places()
    for call in _calls:
        if where[call.alias.untyped_storage()._cdata][0]._cdata in alive:
            call.operator(call.alias, call.source, call.offset)


def places() -> dict[int, tuple[torch.UntypedStorage, int]]:
    """Identity of an alias's storage -> the storage that owns its bytes, and the offset of its first byte in that
    storage."""
    out: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for call in _calls:
        source = call.source.untyped_storage()
        owner, before = out.get(source._cdata, (source, 0))
        out[call.alias.untyped_storage()._cdata] = owner, before + call.offset * call.alias.element_size()
    return out
