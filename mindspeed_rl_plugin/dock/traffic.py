"""Bytes of cells that a process moved: by whom, of what, and whether they left the memory of this machine."""

from __future__ import annotations

import collections
from typing import NamedTuple


class Moved(NamedTuple):
    """One sum. way: "read" or "written"; state: worker state, "put" for a producer, "read" for a look without a lease;
    where: "local" for the memory of this machine's warehouse, "remote" for what travels in messages."""

    way: str
    state: str
    column: str
    where: str
    nbytes: int


class Traffic(collections.Counter[tuple[str, str, str, str]]):
    """Bytes by (way, state, column, where) since the last `take`."""

    def take(self) -> list[Moved]:
        """What was moved since the last call, or since the start."""
        return [Moved(*key, nbytes) for key in sorted(self) if (nbytes := self.pop(key))]
