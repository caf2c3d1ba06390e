"""Bytes of cells that a process moved: by whom, of what, and whether they left the memory of this machine."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import NamedTuple

Key = tuple[str, str, str]


class Moved(NamedTuple):
    """One sum. way: "read" or "written"; state: worker state, "put" for a producer, "read" for a look without a lease;
    where: "local" for the memory of this machine's warehouse, "remote" for what travels in messages."""

    way: str
    state: str
    column: str
    where: str
    nbytes: int


@dataclass
class Traffic:
    """Bytes so far by (state, column, "local" or "remote"), reads and writes apart."""

    read: collections.Counter[Key] = field(default_factory=collections.Counter)
    written: collections.Counter[Key] = field(default_factory=collections.Counter)
    _taken: collections.Counter[tuple[str, Key]] = field(default_factory=collections.Counter)

    def take(self) -> list[Moved]:
        """What was moved since the last call, or since the start."""
        now = collections.Counter({("read", k): n for k, n in self.read.items()})
        now.update({("written", k): n for k, n in self.written.items()})
        new = [Moved(way, *key, nbytes - self._taken[way, key]) for (way, key), nbytes in sorted(now.items())]
        self._taken = now
        return [moved for moved in new if moved.nbytes]
