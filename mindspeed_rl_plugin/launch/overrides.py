"""Megatron's arguments with other values for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def overridden(args: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Set some arguments for a while, then put back what the user gave. Names that this Megatron lacks are skipped."""
    before = {name: getattr(args, name) for name in values if hasattr(args, name)}
    for name in before:
        setattr(args, name, values[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)
