"""What a warehouse may hold: bytes and rows. Producers wait for it; what states write back never does.

A row that comes in keeps free what states will write into it, the longest there may be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_rl_plugin.dock.api import ColumnSpec, StateSpec
from mindspeed_rl_plugin.dock.slabs import LINE, rounded

SEGMENT_BYTES = 64 << 20
FLAGS = {"bytes": "--rl-dock-gb", "rows": "--rl-dock-rows"}


def entry_bytes(spec: ColumnSpec) -> int:
    """Bytes of one entry of a column."""
    return spec.dtype.itemsize * math.prod(spec.trailing)


def items(columns: Mapping[str, ColumnSpec], names: Sequence[str]) -> np.ndarray:
    """`[C, 1]` int64 bytes of an entry of each column."""
    return np.array([entry_bytes(columns[name]) for name in names], np.int64)[:, None]


def row_reserve(write_backs: Mapping[str, int]) -> int:
    """Bytes that an admitted row keeps free. write_backs: most bytes that states write into one row, by column. Two
    lines more a cell: extents are whole lines, and of a cell that is cleared before its neighbours only the lines
    inside it are freed."""
    return sum(nbytes + 2 * LINE for nbytes in write_backs.values())


def put_bytes(blocks: Iterable[int]) -> int:
    """Bytes that a producer's columns of these sizes take: whole lines."""
    return sum(rounded(max(nbytes, 1)) for nbytes in blocks)


@dataclass(frozen=True)
class Limits:
    """capacity, rows: bytes of cells and rows of groups that a warehouse may hold (None: no limit); max_tokens: longest
    sample, needed with a capacity, for what write-backs are promised."""

    capacity: int | None = None
    max_tokens: int | None = None
    segment_bytes: int = SEGMENT_BYTES
    rows: int | None = None

    @property
    def bounded(self) -> bool:
        """Whether producers may have to wait."""
        return self.capacity is not None or self.rows is not None

    def write_backs(self, columns: Sequence[ColumnSpec], states: Sequence[StateSpec]) -> dict[str, int]:
        """Most bytes that states write into one row, by column. Raises ValueError for a capacity without max_tokens."""
        if self.capacity is None:
            return {}
        if self.max_tokens is None:
            raise ValueError(f"a dock of {self.capacity} bytes must know the longest sample; give max_tokens too")
        written = {name for s in states for name in s.writes}
        return {c.name: self._cell_bytes(c) for c in columns if c.name in written}

    def check(self, columns: Sequence[ColumnSpec], states: Sequence[StateSpec], groups: int, members: int) -> None:
        """Raise ValueError where a warehouse cannot admit `groups` of `members` samples, the longest there may be.

        A ragged column that declares no `longest` counts with max_tokens entries. Where its cells can be longer (text
        and record of a prompt), a put of such cells still says by itself what it lacks.
        """
        if self.rows is not None and groups * members > self.rows:
            raise ValueError(
                f"--rl-dock-rows {self.rows}: {groups} groups of {members} samples on one machine are "
                f"{groups * members} rows; raise it, or lower --rl-rollout-prompts"
            )
        if self.capacity is None:
            return
        written = self.write_backs(columns, states)
        read = {name for s in states for name in s.reads}
        produced = [c for c in columns if c.name in read and c.name not in written]
        row = row_reserve(written) + put_bytes(self._cell_bytes(c) for c in produced if c.level != "group")
        need = groups * (members * row + put_bytes(self._cell_bytes(c) for c in produced if c.level == "group"))
        if need > self.capacity:
            raise ValueError(
                f"--rl-dock-gb {self.capacity / 2**30:g}: {groups} groups of {members} samples on one machine may need "
                f"{need} bytes ({need / 2**30:.3g} GiB){self._uncounted(produced)}; raise it, or lower "
                "--rl-rollout-prompts or the length limits"
            )

    def missing(self, wanted: Mapping[str, int], taken: Mapping[str, int], groups: int) -> str | None:
        """Why a put of `groups` must wait, None where it need not.

        wanted: what the put needs, with what states write back; taken: used or promised by now; each by unit. Raises
        ValueError when it would not fit into an empty warehouse either.
        """
        limited = {u: limit for u, limit in (("bytes", self.capacity), ("rows", self.rows)) if limit is not None}
        for unit, limit in limited.items():
            if wanted[unit] > limit:
                raise ValueError(
                    f"a put of {groups} groups needs {wanted[unit]} {unit}, with what states write back; the dock of "
                    f"this node holds {limit}; lower --rl-rollout-prompts or raise {FLAGS[unit]}"
                )
        for unit, limit in limited.items():
            if taken[unit] + wanted[unit] > limit:
                return f"{taken[unit]} of {limit} {unit} are taken or promised, the put needs {wanted[unit]} more"
        return None

    def _uncounted(self, produced: Sequence[ColumnSpec]) -> str:
        open_ended = [c.name for c in produced if c.ragged and c.level != "token" and c.longest is None]
        return f", with {self.max_tokens} entries a cell of {', '.join(open_ended)}" if open_ended else ""

    def _cell_bytes(self, column: ColumnSpec) -> int:
        return entry_bytes(column) * ((column.longest or self.max_tokens) if column.ragged else 1)
