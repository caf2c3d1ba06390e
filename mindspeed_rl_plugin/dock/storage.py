"""Warehouse: the cells of one machine. It lends memory, commits, looks up and clears; the caller serialises the calls.

A commit makes all its cells visible together; one `Record` describes it. The first commit of a cell wins. A writer
on this machine may borrow memory, fill it and then commit; nobody reads it before the commit. The columns of a commit
follow each other in memory; each begins at a cache line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mindspeed_rl_plugin.dock.api import ColumnSpec, Declared, listed
from mindspeed_rl_plugin.dock.memory import (
    LINE,
    DockLimits,
    Range,
    Slabs,
    cut,
    items,
    open_ended,
    put_bytes,
    rounded,
    row_reserve,
)
from mindspeed_rl_plugin.dock.messages import Cells, Extent, Put, Record, Shape, Slots, no_cells
from mindspeed_rl_plugin.dock.places import Numbers, Places, rows_of_groups, runs
from mindspeed_rl_plugin.rows import Column, Ragged


@dataclass
class Block:
    """Memory of one commit."""

    segment: int
    rest: list[Range]  # ranges of the segment that the block still uses
    groups: np.ndarray  # groups whose cells are in it
    promised: bool  # whether states write all its columns, so that memory was reserved for them
    beyond: int  # bytes above what was reserved


class EpochTables(Places):
    """Tables that a warehouse keeps of one epoch. admitted: `[groups]` bool, groups that count against the limits."""

    def __init__(self, shape: Shape, declared: Declared) -> None:
        super().__init__(shape, declared.columns, declared.columns)
        self.admitted = np.zeros(shape.groups, bool)
        self.blocks: list[Block] = []


def layout(
    columns: Mapping[str, ColumnSpec], parts: Sequence[Slots]
) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
    """Where the columns of a put are in its extent. Returns `[C]` int64 begin and bytes of the columns for each part,
    and the bytes of all parts, in complete cache lines."""
    at, places = 0, []
    for part in parts:
        sizes = part.length.sum(1, dtype=np.int64) * items(columns, part.names)[:, 0]
        whole = rounded(sizes)
        places.append((at + np.cumsum(whole) - whole, sizes))
        at += int(whole.sum())
    return places, at


class Warehouse:
    """index: number of this warehouse; limits: what it may hold."""

    def __init__(self, index: int, declared: Declared, limits: DockLimits) -> None:
        self.index, self.limits, self._declared = index, limits, declared
        self.columns, self.states = declared.columns, declared.states
        self.slabs = Slabs(limits.segment_bytes, limits.capacity)
        self.write_backs = limits.write_backs(list(self.columns.values()), list(self.states.values()))
        self.seq = 0
        self._gone = Numbers()  # epochs that are cleared
        self._epochs: dict[int, EpochTables] = {}
        self._reserve = row_reserve(self.write_backs)

    # memory for writers

    def admit(self, put: Put) -> str | None:
        """Admit a producer's groups, or return why the producer must wait. Raises ValueError if even an empty warehouse
        is too small."""
        unlimited = self.limits.capacity is None and self.limits.rows is None
        if unlimited or put.epoch in self._gone:  # cleared: a late repeat
            return None
        tables = self._tables(put.epoch, put.shape)
        touched = np.unique(np.concatenate([tables.groups_of(part) for part in put.parts]))
        new = touched[tables.alive[touched] & ~tables.admitted[touched]]
        rows = len(new) * put.shape.members
        sizes = zip(put.parts, layout(self.columns, put.parts)[0], strict=True)
        columns = (one for part, (_, each) in sizes for one in zip(part.names, each.tolist(), strict=True))
        produced = put_bytes(nbytes for name, nbytes in columns if name not in self.write_backs)
        wanted = {"bytes": produced + rows * self._reserve, "rows": rows}
        reason = self.limits.missing(wanted, self.taken(), len(new))
        if reason is None:
            tables.admitted[new] = True
        return reason

    def taken(self) -> dict[str, int]:
        """What counts against the limits: rows of admitted groups, and bytes. Each of these rows counts with its full
        reserve, so bytes that states have written into the reserve do not count again."""
        tables = self._epochs.values()
        rows = sum(int(t.admitted.sum()) * t.shape.members for t in tables)
        kept = [block for t in tables for block in t.blocks if block.promised]
        back = sum(nbytes for block in kept for _, nbytes in block.rest) - sum(block.beyond for block in kept)
        return {"bytes": self.slabs.used - back + rows * self._reserve, "rows": rows}

    def reserve(self, parts: Sequence[Slots]) -> Extent:
        """Memory for a put of `parts`, which its writer fills and commits."""
        return self.slabs.allocate(layout(self.columns, parts)[1])

    # commits

    def commit(self, put: Put, bulk: np.ndarray | None) -> Record | None:
        """Make the cells visible that are in the put's extent or in `bulk`, and acknowledge rows of a state. None for a
        late repeat, whose epoch is cleared.

        Raises ValueError for cells longer than their maximum, for token columns of unequal length, and for rows that
        lack a column that the state writes. Then the extent is freed, and nothing else changes.
        """
        extent, used = put.extent if bulk is None else self.reserve(put.parts), 0
        try:
            if bulk is not None:
                self.slabs.view(extent.segment, extent.offset, len(bulk))[:] = bulk
            record, used = self._commit(put, extent or Extent(0, 0, 0))
        finally:
            if extent is not None and not used:
                self.slabs.free(*extent)
        return record

    def _commit(self, put: Put, extent: Extent) -> tuple[Record | None, int]:
        """The record of a commit, and how many bytes of `extent` it uses."""
        places, used = layout(self.columns, put.parts)
        if used > extent.nbytes:
            raise ValueError(f"put: cells of {used} bytes do not fit into {extent}")
        if put.epoch in self._gone:  # a late repeat is harmless
            return None, 0
        tables = self._tables(put.epoch, put.shape)
        self._check_tokens(put, tables)
        promised, beyond = self._promised(put)
        if put.state is not None:
            self._check_complete(put, tables)
        cells, groups = list[Cells](), np.zeros(put.shape.groups, bool)
        for part, (begins, _) in zip(put.parts, places, strict=True):
            entered, new = self._enter(tables, part, extent, begins)
            cells += [entered] if len(new) else []
            groups[new] = True
        if groups.any():
            tables.admitted |= groups
            if used:
                block = Block(extent.segment, [(extent.offset, used)], groups.nonzero()[0], promised, beyond)
                tables.blocks.append(block)
        record = self._record(put.epoch, put.shape, cells=cells, state=put.state, rows=put.rows)
        return record, used if groups.any() else 0

    def _enter(self, tables: EpochTables, part: Slots, extent: Extent, begins: np.ndarray) -> tuple[Cells, np.ndarray]:
        """Enter the new cells of a part. Returns the cells (segment -1: not new), and the groups of the new ones.
        begins: `[C]` offsets in the extent."""
        nbytes = part.length * items(self.columns, part.names)
        offset = extent.offset + begins[:, None] + np.cumsum(nbytes, 1) - nbytes
        cells = Cells(part.names, part.slots, part.length, np.full((1, 1), extent.segment, np.int32), offset)
        _, new = tables.enter(cells)
        new = new[:, :: tables.repeat(part.names)]
        if not new.all():
            cells.segment = np.where(new, cells.segment, np.int32(-1))
        return cells, tables.groups_of(part)[new.any(0)]

    def _promised(self, put: Put) -> tuple[bool, int]:
        """Whether states write back all columns of a put (without a capacity: False), and how many bytes of the put are
        above the reserve. Raises ValueError for a cell that is longer than its maximum."""
        every, beyond = True, 0
        for part in put.parts if self.write_backs else ():
            for name, nbytes in zip(part.names, part.length * items(self.columns, part.names), strict=True):
                kept, longest = self.write_backs.get(name), int(nbytes.max(initial=0))
                every &= kept is not None
                if kept is not None and longest > kept and not open_ended(self.columns[name]):
                    raise ValueError(
                        f"column {name!r}: a cell has {longest} bytes, but the dock reserves {kept} for it; raise the "
                        "length limit with which the dock was made"
                    )
                beyond += 0 if kept is None else int((nbytes - kept).clip(0).sum())
        return every and bool(self.write_backs), beyond

    def _check_tokens(self, put: Put, tables: EpochTables) -> None:
        """Raise ValueError if new token cells are not as long as the other token cells of their row."""
        every = tuple(name for name, column in self.columns.items() if column.level == "token")
        for part in put.parts:
            mine = [i for i, name in enumerate(part.names) if name in every]
            if not mine:
                continue
            names, length = tuple(part.names[i] for i in mine), part.length[mine]
            segment, _, there = tables.cells(every, part.slots)
            known = np.where(segment < 0, -1, there).max(0)
            known = np.where(known < 0, length.max(0), known)
            wrong = tables.absent(names, part.slots) & (length != known)
            if wrong.any():
                column, at = np.argwhere(wrong)[0].tolist()
                raise ValueError(
                    f"column {names[column]!r} has {length[column, at]} entries for id "
                    f"{(put.epoch, *divmod(int(part.slots[at]), tables.shape.members))}, the other token columns of "
                    f"that row have {known[at]}; {int(wrong.any(0).sum())} rows disagree"
                )

    def _check_complete(self, put: Put, tables: EpochTables) -> None:
        """Raise ValueError if a put acknowledges rows that still lack a column that the state writes."""
        rows, members = put.rows if put.checked else put.rows[:0], tables.shape.members
        for name in self.states[put.state].writes:
            at = rows // tables.repeat((name,))
            written = [part.slots for part in put.parts if name in part.names]
            if any(np.array_equal(slots, at) for slots in written):
                continue
            lacking = tables.absent((name,), rows)[0] & tables.alive[rows // members]
            lacking &= ~np.isin(at, np.concatenate([np.empty(0, np.int32), *written]))
            if lacking.any():
                missing = listed((put.epoch, *divmod(row, members)) for row in rows[lacking].tolist())
                raise ValueError(f"commit: state {put.state!r} must write column {name!r}; it is missing for {missing}")

    # looking

    def locate(self, epoch: int, columns: tuple[str, ...], rows: np.ndarray) -> list[np.ndarray]:
        """Segment (-1: the cell is not committed), offset and length `[C, n]` of cells."""
        tables = self._epochs.get(epoch)
        if tables is None:
            return no_cells(len(columns), len(rows))
        return tables.cells(columns, rows)

    # clearing

    def clear(self, epoch: int, shape: Shape, groups: np.ndarray) -> Record | None:
        """Free the cells of groups; None if they are freed already."""
        if epoch in self._gone:
            return None
        tables = self._tables(epoch, shape)
        groups = groups[tables.alive[groups]]
        if not len(groups):
            return None
        tables.alive[groups] = tables.admitted[groups] = False
        tables.blocks = [block for block in tables.blocks if not self._drop(tables, block)]
        tables.segment[:, rows_of_groups(groups, shape.members)] = -1
        if not tables.alive.any():
            del self._epochs[epoch]
            self._gone.add(epoch)
        return self._record(epoch, shape, cleared=groups.astype(np.int32))

    def _drop(self, tables: EpochTables, block: Block) -> bool:
        """Free the complete cache lines of a block that belong to cleared groups. Returns whether the complete block is
        free now."""
        dead = ~tables.alive[block.groups]
        if dead.all():
            for offset, nbytes in block.rest:
                self.slabs.free(block.segment, offset, nbytes)
            return True
        for begin, size in self._cells_of(tables, block, block.groups[dead]) if dead.any() else ():
            low, high = rounded(begin), (begin + size) // LINE * LINE
            for offset, nbytes in cut(block.rest, low, high) if low < high else ():
                self.slabs.free(block.segment, offset, nbytes)
        block.groups = block.groups[~dead]
        return False

    def _cells_of(self, tables: EpochTables, block: Block, groups: np.ndarray) -> list[tuple[int, int]]:
        """(offset, bytes) of the cells of groups that are in a block; neighbouring cells are joined."""
        rows, names = rows_of_groups(groups, tables.shape.members), tuple(self.columns)
        segment, offset, length = tables.cells(names, rows)
        nbytes = length * items(self.columns, names)
        (low, _), (last, size) = block.rest[0], block.rest[-1]
        mine = (segment == block.segment) & (offset >= low) & (offset < last + size) & (nbytes > 0)
        begin, first = np.unique(offset[mine], return_index=True)
        flat, sizes = runs(nbytes[mine][first][None], np.zeros((1, len(begin))), begin[None])
        return list(zip(begin[flat].tolist(), sizes.tolist(), strict=True))

    def opened(self, epoch: int, shape: Shape) -> EpochTables | None:
        """Tables of an open epoch; None if all its groups are cleared. Raises ValueError for an epoch that is not open,
        or has another shape."""
        if epoch in self._gone:
            return None
        if epoch not in self._epochs:
            raise ValueError(f"put: epoch {epoch} is not open; open: {listed(sorted(self._epochs))}")
        return self._tables(epoch, shape)

    def _tables(self, number: int, shape: Shape) -> EpochTables:
        tables = self._epochs.get(number)
        if tables is None:
            tables = self._epochs[number] = EpochTables(shape, self._declared)
        if tables.shape != shape:
            raise ValueError(f"epoch {number} is given with {shape}, it has {tables.shape}")
        return tables

    def _record(self, epoch: int, shape: Shape, **what: object) -> Record:
        self.seq += 1
        return Record(self.index, self.seq, epoch, shape, **what)


def as_column(spec: ColumnSpec, data: np.ndarray, lengths: np.ndarray, packed: dict[bytes, Tensor]) -> Column:
    """`[bytes]` uint8 as a column of B rows. packed: offsets by lengths; columns with equal lengths share them."""
    values = torch.frombuffer(data, dtype=spec.dtype) if len(data) else torch.empty(0, dtype=spec.dtype)
    if spec.trailing:
        values = values.reshape(-1, *spec.trailing)
    if not spec.ragged:
        return values
    if (key := lengths.tobytes()) not in packed:
        packed[key] = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
    return Ragged(values, packed[key])
