"""The cells of one node: reserve, commit, look up, clear. No sockets here; the caller serialises the calls.

A commit makes all its cells visible at once and is told as one `Record`. The first commit of a cell wins. A writer
on the node reserves extents, fills them through its own mapping, and commits; until then nobody sees a byte of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from mindspeed_rl_plugin.dock.api import ColumnSpec
from mindspeed_rl_plugin.dock.distributed.arena import Arena, Extent
from mindspeed_rl_plugin.dock.distributed.cells import entry_bytes
from mindspeed_rl_plugin.dock.distributed.credits import missing, put_bytes, row_reserve, write_back_bytes
from mindspeed_rl_plugin.dock.distributed.journal import Journal
from mindspeed_rl_plugin.dock.distributed.records import Cells, EpochSet, Record, Shape, places, slots_of_groups
from mindspeed_rl_plugin.dock.distributed.reservations import Reservations
from mindspeed_rl_plugin.dock.distributed.tables import Block, EpochTables, Table, check_form, check_rows, forms, merged

COMPACT_ABOVE = 1 << 20  # bytes of journal
SEGMENTS = 1 << 20  # numbers that an incarnation has for its segments: none is used twice


class Warehouse:
    """`index`: number of this warehouse; capacity, max_rows: bytes that cells and rows that groups may take, None for
    no limit; write_backs: most bytes that worker states write into one row, by column: kept free from when the row is
    admitted, so that they never wait; version_column: the column that holds the weight version of a row. What a
    former warehouse left in the arena's directory is taken over.
    """

    def __init__(
        self,
        index: int,
        columns: Mapping[str, ColumnSpec],
        arena: Arena,
        *,
        capacity: int | None = None,
        max_rows: int | None = None,
        write_backs: Mapping[str, int] | None = None,
        version_column: str | None = None,
    ) -> None:
        self.index, self.columns, self.arena = index, columns, arena
        self.capacity, self.max_rows, self.write_backs = capacity, max_rows, dict(write_backs or {})
        arena.limit = capacity
        self._limited = capacity is not None or max_rows is not None
        self.row_reserve = row_reserve(self.write_backs)
        self.version_column = version_column
        self.seq, self.incarnation = 0, 1
        self.outstanding = 0  # bytes reserved for write-backs that have not come
        self.gone = EpochSet()
        self._epochs: dict[int, EpochTables] = {}
        self._live: dict[int, int] = {}  # extent key -> cells in it
        self._began: dict[int, int] = {}  # extent key -> cells that were in it at first
        self._extents: dict[int, Extent] = {}
        self._next_key = 0
        self.reservations = Reservations(arena, lends=not self._limited)
        self._journal = Journal(arena.directory)
        self._compacted = 0
        self._adopt()

    # writing

    def admit(self, epoch: int, shape: Shape, blocks: Sequence[tuple[str, np.ndarray, int]]) -> str | None:
        """Book the credits of a producer's put, or say why it must wait. blocks: (column, slots, bytes) of each column.

        Raises ValueError when it would not fit into an empty warehouse either.
        """
        if not self._limited or epoch in self.gone:  # of a late repeat nothing is kept
            return None
        groups = self._new_groups(epoch, shape, blocks)
        rows = len(groups) * shape.members
        payload = put_bytes(nbytes for name, _, nbytes in blocks if name not in self.write_backs)
        wanted = {"bytes": payload + rows * self.row_reserve, "rows": rows}
        taken = {"bytes": self.arena.used + self.outstanding, "rows": self.rows}
        if reason := missing(wanted, taken, {"bytes": self.capacity, "rows": self.max_rows}, len(groups)):
            return reason
        self._epoch(epoch, shape).admitted[groups] = True
        self.outstanding += rows * self.row_reserve
        return None

    @property
    def rows(self) -> int:
        """Rows of the groups that are admitted and not cleared."""
        return sum(int(state.admitted.sum()) * state.shape.members for state in self._epochs.values())

    def commit(
        self,
        owner: Hashable,
        epoch: int,
        shape: Shape,
        blocks: Sequence[Block],
        *,
        ack: tuple[str, np.ndarray] | None = None,
        needs: Sequence[str] = (),
    ) -> Record:
        """Make cells visible and note that a state is done with rows. The blocks' extents must be reserved by `owner`.

        needs: columns that acknowledged rows must have by now. Raises ValueError, and changes nothing, where they
        lack, for extents that are not reserved, for rows outside `shape`, and for token columns of unequal length.
        """
        self._check(owner, epoch, shape, blocks, ack)
        if epoch in self.gone:  # a late repeat is harmless
            for block in blocks:
                self.reservations.take(block.extent)
                self.arena.free(block.extent)
            return self._tell(epoch, Shape(0, 0), cleared=np.array(self.gone.to_list(), np.int32))
        state = self._epoch(epoch, shape)
        state.check_lengths(epoch, blocks)
        if ack is not None:
            state.check_complete(epoch, blocks, *ack, needs)
        self._admit(state, shape, blocks)
        columns = {}
        for form in forms(blocks):
            at = places(form[0].slots)
            begins = np.cumsum(form[0].lengths, dtype=np.int64) - form[0].lengths
            whole = isinstance(at, slice) and bool(state.alive.all())
            for block in form:
                self.reservations.take(block.extent)
                new = whole and (state.tables[block.column].segment[at] < 0).all()
                cells = self._store_all(state, block, at, begins) if new else self._store(state, block, begins)
                if len(cells.slots):
                    columns[block.column] = cells
        acks = {}
        if ack is not None:
            rows = np.asarray(ack[1], np.int64)
            done = state.acks.setdefault(ack[0], np.zeros(shape.groups * shape.members, bool))
            done[rows] = True
            acks = {ack[0]: rows.astype(np.int32)}
        return self._tell(epoch, shape, columns=columns, acks=acks, versions=self._versions(state, columns))

    def clear(self, epoch: int, shape: Shape, groups: np.ndarray) -> Record | None:
        """Free the cells of groups; None where they are gone already."""
        if epoch in self.gone:
            return None
        state = self._epoch(epoch, shape)
        groups = groups[state.alive[groups]]
        if not len(groups):
            return None
        shape = state.shape
        slots = slots_of_groups(groups, shape.members)
        promised = int(state.admitted[groups].sum()) * shape.members * self.row_reserve
        for name, table in state.tables.items():
            gone = groups if self.columns[name].level == "group" else slots
            promised -= self._kept_promise(name, table.length[gone[table.segment[gone] >= 0]])
            self._drop(table, gone, self.itemsize(name))
        self.outstanding -= promised
        state.alive[groups] = False
        state.admitted[groups] = False
        record = self._tell(epoch, shape, cleared=groups.astype(np.int32))
        if not state.alive.any():
            self._retire(epoch)
        self.arena.drop_former()
        self._compact()
        return record

    # reading

    def locate(self, epoch: int, column: str, slots: np.ndarray) -> Cells:
        """Where cells lie; segment -1 marks one that is not committed."""
        state = self._epochs.get(epoch)
        if state is None:
            absent = np.full(len(slots), -1, np.int32)
            return Cells(slots.astype(np.int32), absent, np.zeros(len(slots), np.int64), np.zeros(len(slots), np.int32))
        return state.tables[column].cells(slots)

    def itemsize(self, column: str) -> int:
        """Bytes of one entry of a column."""
        return entry_bytes(self.columns[column])

    def manifest(self) -> list[Record]:
        """What a controller that knows nothing must apply: one record an epoch, with the running number of now."""
        records = []
        for number, state in sorted(self._epochs.items()):
            columns = {}
            for name, table in state.tables.items():
                slots = (table.segment >= 0).nonzero()[0]
                if len(slots):
                    columns[name] = table.cells(slots)
            acks = {s: done.nonzero()[0].astype(np.int32) for s, done in state.acks.items() if done.any()}
            known = None if state.versions is None else (state.versions >= 0).nonzero()[0]
            versions = None if known is None else (known.astype(np.int32), state.versions[known])
            gone = (~state.alive).nonzero()[0].astype(np.int32)
            cleared = gone if len(gone) else None
            records.append(
                Record(self.index, self.incarnation, self.seq, number, state.shape, columns, acks, cleared, versions)
            )
        return records

    @property
    def used(self) -> int:
        """Bytes of cells, committed and being written; without what only lies ready for writers."""
        return self.arena.used - self.reservations.idle

    # inside

    def _check(
        self,
        owner: Hashable,
        epoch: int,
        shape: Shape,
        blocks: Sequence[Block],
        ack: tuple[str, np.ndarray] | None,
    ) -> None:
        known = self._epochs.get(epoch)
        if known is not None and known.shape != shape:
            raise ValueError(f"epoch {epoch} has {tuple(known.shape)} groups x members, a writer says {tuple(shape)}")
        for block in blocks:
            if block.column not in self.columns:
                raise ValueError(f"column {block.column!r} is not declared; declared: {', '.join(self.columns)}")
            self.reservations.check(owner, block.column, block.extent)
        for form in forms(blocks):
            check_form(form, self.columns, shape, self.write_backs)
        if ack is not None:
            check_rows(ack[0], ack[1], shape.groups * shape.members)

    def _epoch(self, number: int, shape: Shape) -> EpochTables:
        state = self._epochs.get(number)
        if state is None:
            versioned = self.version_column is not None
            state = self._epochs[number] = EpochTables.empty(shape, self.columns, versioned)
        return state

    def _new_groups(self, epoch: int, shape: Shape, blocks: Sequence[tuple[str, np.ndarray, int]]) -> np.ndarray:
        touched = np.zeros(shape.groups, bool)
        for name, slots, _ in blocks:
            touched[slots if self.columns[name].level == "group" else slots // shape.members] = True
        state = self._epochs.get(epoch)
        return (touched if state is None else touched & ~state.admitted & state.alive).nonzero()[0]

    def _admit(self, state: EpochTables, shape: Shape, blocks: Sequence[Block]) -> None:
        if not self._limited:
            return
        seen: set[tuple[int, bool]] = set()  # slots that several columns share
        for block in blocks:
            grouped = self.columns[block.column].level == "group"
            if (id(block.slots), grouped) in seen:
                continue
            seen.add((id(block.slots), grouped))
            groups = np.unique(block.slots if grouped else block.slots // shape.members)
            new = groups[~state.admitted[groups] & state.alive[groups]]
            state.admitted[new] = True
            self.outstanding += len(new) * shape.members * self.row_reserve

    def _store(self, state: EpochTables, block: Block, begins: np.ndarray) -> Cells:
        """Enter the cells of a block that are new; an extent without any goes back at once. begins: `[n]` entries
        before each cell."""
        table, size = state.tables[block.column], self.itemsize(block.column)
        slots = block.slots.astype(np.int64)
        grouped = self.columns[block.column].level == "group"
        fresh = (table.segment[slots] < 0) & state.alive[slots if grouped else slots // state.shape.members]
        first = np.zeros(len(slots), bool)
        first[np.unique(slots, return_index=True)[1]] = True  # a repeat inside one block
        index = (fresh & first).nonzero()[0]
        if not len(index):
            self.arena.free(block.extent)
            return Cells(*(np.empty(0, t) for t in (np.int32, np.int32, np.int64, np.int32)))
        where = slots[index]
        table.segment[where] = block.extent.segment
        table.offset[where] = block.extent.offset + begins[index] * size
        table.length[where] = block.lengths[index]
        if len(index) == len(slots):
            self._keep(table, where, len(where), block.extent)
        else:
            self.arena.free(block.extent)
            self._claim(table, where, size)
        if block.column in state.token_columns:
            state.tokens[where] = block.lengths[index]
        self.outstanding -= self._kept_promise(block.column, block.lengths[index])
        return table.cells(where)

    def _store_all(self, state: EpochTables, block: Block, at: slice, begins: np.ndarray) -> Cells:
        """Enter cells of neighbouring rows that are all new."""
        table, lengths = state.tables[block.column], block.lengths
        offset = block.extent.offset + begins * self.itemsize(block.column)
        table.segment[at], table.offset[at], table.length[at] = block.extent.segment, offset, lengths
        self._keep(table, at, len(lengths), block.extent)
        if block.column in state.token_columns:
            state.tokens[at] = lengths
        self.outstanding -= self._kept_promise(block.column, lengths)
        slots = block.slots.astype(np.int32, copy=False)
        return Cells(slots, np.full(len(lengths), block.extent.segment, np.int32), offset, lengths)

    def _versions(self, state: EpochTables, columns: Mapping[str, Cells]) -> tuple[np.ndarray, np.ndarray] | None:
        if state.versions is None or self.version_column not in columns:
            return None
        cells = columns[self.version_column]
        values = np.empty(len(cells.slots), np.int64)
        for i, (segment, offset) in enumerate(zip(cells.segment.tolist(), cells.offset.tolist(), strict=True)):
            values[i] = self.arena.view(segment, offset, 8).view(np.int64)[0]
        state.versions[cells.slots] = values
        return cells.slots, values

    def _kept_promise(self, column: str, lengths: np.ndarray) -> int:
        """Bytes of the room for write-backs that cells of these lengths use; none for what only producers write."""
        if column not in self.write_backs:
            return 0
        return write_back_bytes(int(lengths.sum()) * self.itemsize(column), len(lengths))

    def _keep(self, table: Table, slots: np.ndarray | slice, cells: int, extent: Extent) -> None:
        """Note which cells lie in an extent, and how many they are."""
        table.extent[slots] = self._next_key
        self._extents[self._next_key] = extent
        self._live[self._next_key] = self._began[self._next_key] = cells
        self._next_key += 1

    def _claim(self, table: Table, slots: np.ndarray, size: int) -> None:
        """Keep the lines that hold these cells, of memory that is free otherwise."""
        table.extent[slots] = -1
        spans = []
        for slot in slots[table.length[slots] > 0].tolist():
            spans.append((int(table.segment[slot]), int(table.offset[slot]), int(table.length[slot]) * size, slot))
        for extent, held in merged(spans):
            self.arena.claim(extent)
            self._keep(table, np.array(held, np.int64), len(held), extent)

    def _drop(self, table: Table, slots: np.ndarray, size: int) -> None:
        present = slots[table.segment[slots] >= 0]
        table.segment[present] = -1
        keys, counts = np.unique(table.extent[present], return_counts=True)
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            if key < 0:  # without a byte
                continue
            self._live[key] -= count
            if 2 * self._live[key] > self._began[key]:
                continue
            # Half of it or more is gone: what is left keeps only its own lines.
            left = ((table.extent == key) & (table.segment >= 0)).nonzero()[0]
            del self._live[key], self._began[key]
            self.arena.free(self._extents.pop(key))
            self._claim(table, left, size)

    def _tell(self, epoch: int, shape: Shape, **parts: object) -> Record:
        self.seq += 1
        record = Record(self.index, self.incarnation, self.seq, epoch, shape, **parts)
        self._journal.append(record)
        return record

    def _compact(self) -> None:
        """Keep the journal in proportion to what lies here."""
        if self._journal.nbytes > max(COMPACT_ABOVE, 4 * self._compacted):
            self._journal.rewrite([self._mark(), *self.manifest()])
            self._compacted = self._journal.nbytes

    def _mark(self) -> Record:
        """A record that only keeps the running number and the epochs that are over."""
        gone = np.array(self.gone.to_list(), np.int32)
        return Record(self.index, self.incarnation, self.seq, 0, Shape(0, 0), cleared=gone)

    def _retire(self, epoch: int) -> None:
        del self._epochs[epoch]
        self.gone.add(epoch)

    def _adopt(self) -> None:
        """Rebuild everything from the journal that a former warehouse left."""
        for record in self._journal.records():
            self.seq, self.incarnation = max(self.seq, record.seq), record.incarnation + 1
            if not record.shape.groups:
                self.gone = EpochSet.from_list(record.cleared.tolist())
                continue
            state = self._epoch(record.epoch, record.shape)
            for name, cells in record.columns.items():
                table = state.tables[name]
                table.segment[cells.slots], table.offset[cells.slots] = cells.segment, cells.offset
                table.length[cells.slots] = cells.length
                if name in state.token_columns:
                    state.tokens[cells.slots] = cells.length
            for name, rows in record.acks.items():
                rows_of = record.shape.groups * record.shape.members
                state.acks.setdefault(name, np.zeros(rows_of, bool))[rows] = True
            if record.versions is not None and state.versions is not None:
                state.versions[record.versions[0]] = record.versions[1]
            if record.cleared is not None:
                state.alive[record.cleared] = False
                for name, table in state.tables.items():
                    grouped = self.columns[name].level == "group"
                    table.segment[record.cleared if grouped else slots_of_groups(record.cleared, record.shape[1])] = -1
                if not state.alive.any():
                    self._retire(record.epoch)
        # A writer may have an extent of the former incarnation and not know that it is over.
        self.arena.adopt((self.incarnation - 1) * SEGMENTS)
        self._adopt_cells()
        self.arena.drop_former()
        self._journal.append(self._mark())  # the next one starts after this incarnation, whatever this one writes

    def _adopt_cells(self) -> None:
        """Each cell that is left becomes an extent of its own: its block's other cells may be gone."""
        for state in self._epochs.values():
            shape = state.shape
            for name, table in state.tables.items():
                present = (table.segment >= 0).nonzero()[0]
                self._claim(table, present, self.itemsize(name))
                grouped = self.columns[name].level == "group"
                state.admitted[np.unique(present if grouped else present // shape.members)] = True
            self.outstanding += int(state.admitted.sum()) * shape.members * self.row_reserve
            for name, table in state.tables.items():
                self.outstanding -= self._kept_promise(name, table.length[table.segment >= 0])
