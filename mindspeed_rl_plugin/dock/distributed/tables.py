"""What a warehouse knows of its cells: where those of each column of an epoch lie, and in which extents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mindspeed_rl_plugin.dock.api import ColumnSpec
from mindspeed_rl_plugin.dock.distributed.arena import LINE, Extent
from mindspeed_rl_plugin.dock.distributed.cells import entry_bytes
from mindspeed_rl_plugin.dock.distributed.records import Cells, Shape
from mindspeed_rl_plugin.dock.report import listed


@dataclass(frozen=True)
class Block:
    """Cells of one column as one packed block: row i has `lengths[i]` entries and lies in `extent` after those
    before it. lengths: `[n]`, all 1 for a dense column; slots: `[n]` row (or group) numbers."""

    column: str
    slots: np.ndarray
    lengths: np.ndarray
    extent: Extent


def forms(blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks of the same rows and lengths together; what a message says once for several is one array."""
    found: dict[tuple[int, int], list[Block]] = {}
    for block in blocks:
        found.setdefault((id(block.slots), id(block.lengths)), []).append(block)
    return list(found.values())


def check_form(
    form: Sequence[Block], columns: Mapping[str, ColumnSpec], shape: Shape, most: Mapping[str, int]
) -> None:
    """Raise ValueError for rows outside the epoch, cells that do not fit their extent, or one above `most` bytes, by
    column. form: blocks of the same rows and lengths."""
    slots, lengths = form[0].slots, form[0].lengths
    alike = len(slots) == len(lengths) and not (lengths < 0).any()
    entries, longest = int(lengths.sum()), int(lengths.max(initial=0))
    for grouped in {columns[block.column].level == "group" for block in form}:
        check_rows(form[0].column, slots, shape.groups * (1 if grouped else shape.members))
    for block in form:
        size, limit = entry_bytes(columns[block.column]), most.get(block.column)
        if not alike or entries * size > block.extent.nbytes:
            raise ValueError(f"column {block.column!r}: {entries * size} bytes of cells in {block.extent}")
        if limit is not None and longest * size > limit:
            raise ValueError(
                f"column {block.column!r}: a cell of {longest * size} bytes, the dock keeps room for {limit}; raise "
                "the length limit that it was made with"
            )


def check_rows(name: str, slots: np.ndarray, limit: int) -> None:
    """Raise ValueError for row numbers outside 0..limit - 1."""
    if len(slots) and (slots.min() < 0 or slots.max() >= limit):
        raise ValueError(f"{name!r}: rows {slots.min()}..{slots.max()} of an epoch with rows 0..{limit - 1}")


class Table:
    """Where the cells of one column of one epoch lie."""

    def __init__(self, slots: int) -> None:
        self.segment = np.full(slots, -1, np.int32)
        self.offset = np.zeros(slots, np.int64)
        self.length = np.zeros(slots, np.int32)
        self.extent = np.full(slots, -1, np.int64)  # key of the extent that holds the cell

    def cells(self, slots: np.ndarray) -> Cells:
        """Locations of some cells."""
        return Cells(slots.astype(np.int32), self.segment[slots], self.offset[slots], self.length[slots])


@dataclass
class EpochTables:
    """All that a warehouse keeps of one epoch."""

    shape: Shape
    tables: dict[str, Table]
    admitted: np.ndarray  # [groups] bool, whether the group counts against the credits
    alive: np.ndarray  # [groups] bool
    tokens: np.ndarray  # [rows] int64, entries of the row's token columns, -1 unknown
    token_columns: frozenset[str]
    group_columns: frozenset[str]
    acks: dict[str, np.ndarray] = field(default_factory=dict)  # state -> [rows] bool
    versions: np.ndarray | None = None  # [rows] int64, -1 unknown

    @classmethod
    def empty(cls, shape: Shape, columns: Mapping[str, ColumnSpec], versioned: bool) -> EpochTables:
        """Nothing committed yet."""
        rows = shape.groups * shape.members
        return cls(
            shape,
            {n: Table(shape.groups if c.level == "group" else rows) for n, c in columns.items()},
            np.zeros(shape.groups, bool),
            np.ones(shape.groups, bool),
            np.full(rows, -1, np.int64),
            frozenset(n for n, c in columns.items() if c.level == "token"),
            frozenset(n for n, c in columns.items() if c.level == "group"),
            versions=np.full(rows, -1, np.int64) if versioned else None,
        )

    def check_lengths(self, epoch: int, blocks: Sequence[Block]) -> None:
        """Raise ValueError where new token cells are not as long as the other token cells of their row."""
        tokens = [b for b in blocks if b.column in self.token_columns]
        known = self.tokens.copy() if len(tokens) > 1 else self.tokens
        whole: Block | None = None  # the last one whose cells are all new
        for i, block in enumerate(tokens):
            if whole is not None and block.slots is whole.slots and block.lengths is whole.lengths:
                continue
            fresh = self.tables[block.column].segment[block.slots] < 0
            rows, got = block.slots[fresh], block.lengths[fresh]
            wrong = ((known[rows] >= 0) & (known[rows] != got)).nonzero()[0]
            if len(wrong):
                row, length = int(rows[wrong[0]]), int(got[wrong[0]])
                raise ValueError(
                    f"column {block.column!r} has {length} entries for id {(epoch, *divmod(row, self.shape.members))}, "
                    f"the other token columns of that row have {known[row]}; {len(wrong)} rows disagree"
                )
            if i + 1 < len(tokens):
                known[rows] = got
                whole = block if fresh.all() else whole

    def check_complete(
        self, epoch: int, blocks: Sequence[Block], state: str, rows: np.ndarray, needs: Sequence[str]
    ) -> None:
        """Raise ValueError where `state` is done with rows that lack a column of `needs`, also after `blocks`."""
        members = self.shape.members
        for name in needs:
            alive = rows[self.alive[rows // members]]
            at = alive // members if name in self.group_columns else alive
            brings = [b.slots for b in blocks if b.column == name]
            if any(np.array_equal(slots, at) for slots in brings):
                continue
            brought = np.concatenate([np.empty(0, np.int32), *brings])
            lacking = alive[(self.tables[name].segment[at] < 0) & ~np.isin(at, brought)]
            if len(lacking):
                ids = [(epoch, *divmod(row, members)) for row in lacking.tolist()]
                raise ValueError(f"commit: state {state!r} must write column {name!r}; it is missing for {listed(ids)}")


def merged(spans: Sequence[tuple[int, int, int, int]]) -> list[tuple[Extent, list[int]]]:
    """Extents of whole lines that cover cells (segment, offset, bytes, slot); cells that share a line share one."""
    found: list[tuple[Extent, list[int]]] = []
    for segment, offset, nbytes, slot in sorted(spans):
        low, high = offset // LINE * LINE, -(-(offset + nbytes) // LINE) * LINE
        if found:
            last, slots = found[-1]
            if last.segment == segment and low < last.offset + last.nbytes:
                end = max(high, last.offset + last.nbytes)
                found[-1] = (Extent(segment, last.offset, end - last.offset), [*slots, slot])
                continue
        found.append((Extent(segment, low, high - low), [slot]))
    return found
