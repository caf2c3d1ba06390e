"""The cells of one machine: lend memory, commit, look up, clear. No sockets here; the caller serialises the calls.

A commit makes all its cells visible at once and is described by one `Record`. The first commit of a cell wins. A
writer of this machine fills memory that was lent to it through its own mapping, then commits; until then nobody sees
a byte of it. Of a commit the columns lie one after the other, each from the begin of a cache line on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mindspeed_rl_plugin.dock.api import Declared, listed
from mindspeed_rl_plugin.dock.limits import Limits, entry_bytes, row_reserve, write_back_bytes
from mindspeed_rl_plugin.dock.messages import Cells, Extent, FrameError, Part, Put, Record, Shape
from mindspeed_rl_plugin.dock.places import Places, by_row, indexed, rows_of_groups, runs
from mindspeed_rl_plugin.dock.slabs import LINE, Range, Slabs, cut, rounded

MOST = 16 << 20  # bytes of memory that a writer is lent ahead
SEVERAL = 8  # commits that it is lent for


@dataclass
class Block:
    """Memory of one commit. rest: ranges of its segment that are not free yet; groups: whose cells lie in it."""

    segment: int
    rest: list[Range]
    groups: np.ndarray


@dataclass
class EpochTables:
    """All that a warehouse keeps of one epoch. admitted: `[groups]` bool, what counts against the limits; alive:
    `[groups]` bool; tokens: `[rows]` entries of the token columns, -1 unknown; acks: state -> `[rows]` bool."""

    shape: Shape
    places: Places
    admitted: np.ndarray
    alive: np.ndarray
    tokens: np.ndarray
    acks: dict[str, np.ndarray] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)


class Layout:
    """Where the columns of a put lie in its extent."""

    def __init__(self, declared: Declared) -> None:
        self._bytes = {name: entry_bytes(spec) for name, spec in declared.columns.items()}
        self._items: dict[tuple[str, ...], np.ndarray] = {}

    def items(self, names: tuple[str, ...]) -> np.ndarray:
        """`[C, 1]` int64 bytes of an entry."""
        if names not in self._items:
            self._items[names] = np.array([self._bytes[name] for name in names], np.int64)[:, None]
        return self._items[names]

    def sizes(self, part: Part) -> list[int]:
        """Bytes of each column of a part."""
        return (part.length.sum(1, dtype=np.int64) * self.items(part.names)[:, 0]).tolist()

    def __call__(self, parts: Sequence[Part]) -> tuple[list[np.ndarray], int]:
        """`[C]` int64 begin of each column, by part, and the bytes of all, whole lines."""
        at, begins = 0, []
        for part in parts:
            sizes = np.array([rounded(nbytes) for nbytes in self.sizes(part)], np.int64)
            begins.append(at + np.cumsum(sizes) - sizes)
            at += int(sizes.sum())
        return begins, at


class Warehouse:
    """`index`: number of this warehouse; limits: what it may hold."""

    def __init__(self, index: int, declared: Declared, limits: Limits) -> None:
        self.index, self.limits = index, limits
        self.columns, self.states = declared.columns, declared.states
        self.slabs = Slabs(limits.segment_bytes, limits.capacity)
        self.write_backs = limits.write_backs(list(self.columns.values()), list(self.states.values()))
        self.seq = 0
        self.outstanding = 0  # bytes promised for write-backs that have not come
        self._gone: set[int] = set()
        self._epochs: dict[int, EpochTables] = {}
        self._lent: dict[Extent, Hashable] = {}
        self._reserve = row_reserve(self.write_backs)
        self._layout = Layout(declared)

    # memory for writers

    def admit(self, put: Put) -> str | None:
        """Book a producer's groups, or say why it must wait. Raises ValueError when an empty warehouse would be too
        small."""
        if not self.limits.bounded or put.epoch in self._gone:  # of a late repeat nothing is kept
            return None
        self._check(put.epoch, put.shape, put.parts)
        tables = self._tables(put.epoch, put.shape)
        groups = self._new_groups(tables, put.parts)
        rows = len(groups) * put.shape.members
        sizes = (size for part in put.parts for size in zip(part.names, self._layout.sizes(part), strict=True))
        produced = sum(rounded(max(nbytes, 1)) for name, nbytes in sizes if name not in self.write_backs)
        wanted = {"bytes": produced + rows * self._reserve, "rows": rows}
        held = sum(int(t.admitted.sum()) * t.shape.members for t in self._epochs.values())
        taken = {"bytes": self.slabs.used + self.outstanding, "rows": held}
        reason = self.limits.missing(wanted, taken, len(groups))
        if reason is None:
            self._book(tables, groups)
        return reason

    def reserve(self, writer: Hashable, parts: Sequence[Part]) -> Extent:
        """Memory that only `writer` fills, for a put of `parts`."""
        return self._lend(writer, self._layout(parts)[1])

    def store(self, writer: Hashable, parts: Sequence[Part], bulk: np.ndarray) -> Extent:
        """Bytes that came with a message, in memory lent to its writer. Raises FrameError for another number of them
        than the parts take."""
        if self._layout(parts)[1] != len(bulk):
            raise FrameError(f"cells of {self._layout(parts)[1]} bytes in {len(bulk)}")
        extent = self._lend(writer, len(bulk))
        self.slabs.view(extent.segment, extent.offset, len(bulk))[:] = bulk
        return extent

    def lend(self, writer: Hashable, left: Extent | None, want: int) -> Extent | None:
        """Memory for the writer's next put of `want` bytes: what is left of the last, or new; None where memory that
        lies ready would count against a limit."""
        if left is not None and 0 < want <= left.nbytes:
            return left
        if left is not None:
            self.forget(writer, left)
        return None if self.limits.bounded or not 0 < want <= MOST else self._lend(writer, min(SEVERAL * want, MOST))

    def forget(self, writer: Hashable, *extents: Extent | None) -> None:
        """Take back what was lent to a writer, all of it where no extents are named."""
        for extent in [e for e, w in self._lent.items() if w == writer and (not extents or e in extents)]:
            del self._lent[extent]
            self.slabs.free(*extent)

    def _lend(self, writer: Hashable, nbytes: int) -> Extent:
        extent = self.slabs.allocate(nbytes)
        self._lent[extent] = writer
        return extent

    # commits

    def commit(self, writer: Hashable, put: Put, extent: Extent | None) -> tuple[Record | None, Extent | None]:
        """Make cells visible that lie in `extent`, lent to `writer`, and note that a state is done with rows; what is
        left of the extent stays lent. None for a late repeat: all of it is cleared.

        Raises ValueError, and changes nothing but that the extent goes back, for memory that was not lent, rows outside
        the epoch, token columns of unequal length, and rows that lack a column that the state writes.
        """
        if extent is not None and self._lent.get(extent) != writer:
            raise ValueError(f"{extent} was not lent to this writer")
        try:
            record, used = self._commit(put, extent or Extent(0, 0, 0))
        except BaseException:
            self.forget(writer, extent)
            raise
        if extent is None or not used:
            return record, extent
        del self._lent[extent]
        left = Extent(extent.segment, extent.offset + used, extent.nbytes - used)
        if left.nbytes:
            self._lent[left] = writer
        return record, left if left.nbytes else None

    def _commit(self, put: Put, extent: Extent) -> tuple[Record | None, int]:
        """The record of a commit, and how many bytes of `extent` it takes."""
        self._check(put.epoch, put.shape, put.parts)
        begins, used = self._layout(put.parts)
        if used > extent.nbytes:
            raise ValueError(f"cells of {used} bytes in {extent}")
        if put.epoch in self._gone:  # a late repeat is harmless
            return None, 0
        tables = self._tables(put.epoch, put.shape)
        tokens = self._token_lengths(put, tables)
        if put.state is not None:
            self._check_complete(put, tables)
        if self.limits.bounded:
            self._book(tables, self._new_groups(tables, put.parts))
        tables.tokens = tokens
        groups = np.zeros(put.shape.groups, bool)
        found = [self._enter(tables, p, extent, b, groups) for p, b in zip(put.parts, begins, strict=True)]
        if used and groups.any():
            tables.blocks.append(Block(extent.segment, [(extent.offset, used)], groups.nonzero()[0]))
        if put.state is not None:
            tables.acks.setdefault(put.state, np.zeros(len(tokens), bool))[put.rows] = True
        cells = [c for c in found if c is not None]
        record = self._record(put.epoch, put.shape, cells=cells, state=put.state, rows=put.rows)
        return record, used if groups.any() else 0

    def _enter(
        self, tables: EpochTables, part: Part, extent: Extent, begins: np.ndarray, groups: np.ndarray
    ) -> Cells | None:
        """Enter those cells of a part that are new, and mark their groups. begins: `[C]` bytes of the extent."""
        members, grouped = tables.shape.members, self._is_grouped(part.names)
        nbytes = part.length * self._layout.items(part.names)
        offset = extent.offset + begins[:, None] + np.cumsum(nbytes, 1) - nbytes
        cells = Cells(part.names, part.slots, np.full((1, 1), extent.segment, np.int32), offset, part.length)
        every = by_row(cells, members) if grouped else cells
        at, of_row = indexed(every.slots), every.slots // members
        new = tables.places.absent(part.names, at) & tables.alive[of_row]
        if not new.any():
            return None
        mine = new[:, ::members] if grouped else new
        if not new.all():
            cells.segment = np.where(mine, cells.segment, np.int32(-1))
            every.segment = np.where(new, every.segment, np.int32(-1))
        tables.places.enter(every, at)
        groups[of_row[new.any(0)]] = True
        for i, name in enumerate(part.names) if self.write_backs else ():
            self.outstanding -= self._kept_promise(name, part.length[i][mine[i]])
        return cells

    def _check(self, epoch: int, shape: Shape, parts: Sequence[Part]) -> None:
        known = self._epochs.get(epoch)
        if min(shape) < 1 or epoch < 0 or (known is not None and known.shape != shape):
            here = "" if known is None else f", it has {tuple(known.shape)}"
            raise ValueError(f"epoch {epoch} of {tuple(shape)} groups x members{here}")
        for part in parts:
            unknown = [n for n in part.names if n not in self.columns]
            if unknown or not part.names:
                raise ValueError(f"columns {unknown} are not declared; declared: {listed(self.columns)}")
            alike = part.slots.ndim == 1 and part.length.shape == (len(part.names), len(part.slots))
            if not alike or (len(part.slots) and part.length.min() < 0):
                raise FrameError(f"cells of columns {listed(part.names)} have no common length")
            limit = shape.groups * (1 if self._is_grouped(part.names) else shape.members)
            _check_slots(part.names[0], part.slots, limit)
            for i, name in enumerate(part.names) if self.write_backs else ():
                longest = int(part.length[i].max(initial=0)) * entry_bytes(self.columns[name])
                if longest > self.write_backs.get(name, longest):
                    raise ValueError(
                        f"column {name!r}: a cell of {longest} bytes, the dock keeps {self.write_backs[name]} free for "
                        "it; raise the length limit that it was made with"
                    )

    def _token_lengths(self, put: Put, tables: EpochTables) -> np.ndarray:
        """`[rows]` entries of the token columns after a put. Raises ValueError where new token cells are not as long as
        the other token cells of their row."""
        known = tables.tokens
        for part in put.parts:
            tokens = [i for i, n in enumerate(part.names) if self.columns[n].level == "token"]
            alike = bool(tokens) and (part.length[tokens] == part.length[tokens[0]]).all()
            for i in tokens[:1] if alike else tokens:
                at, got = indexed(part.slots), part.length[i]
                absent = tables.places.absent((part.names[i],), at)[0]
                wrong = absent & (known[at] >= 0) & (known[at] != got)
                if wrong.any():
                    row, length = int(part.slots[wrong.argmax()]), int(got[wrong.argmax()])
                    raise ValueError(
                        f"column {part.names[i]!r} has {length} entries for id "
                        f"{(put.epoch, *divmod(row, tables.shape.members))}, the other token columns of that row have "
                        f"{known[row]}; {int(wrong.sum())} rows disagree"
                    )
                known = known.copy() if known is tables.tokens else known
                known[at] = np.where(absent, got, known[at])
        return known

    def _check_complete(self, put: Put, tables: EpochTables) -> None:
        """Raise ValueError where a state is done with rows that lack a column that it writes, also after this put."""
        if put.state not in self.states:
            raise ValueError(f"state {put.state!r} is not declared; declared: {listed(self.states)}")
        _check_slots(put.state, put.rows, len(tables.tokens))
        rows, members = put.rows if put.checked else put.rows[:0], tables.shape.members
        for name in self.states[put.state].writes:
            at = rows // members if self._is_grouped((name,)) else rows
            brought = [part.slots for part in put.parts if name in part.names]
            if any(np.array_equal(slots, at) for slots in brought):
                continue
            lacking = tables.places.absent((name,), rows)[0] & tables.alive[rows // members]
            lacking &= ~np.isin(at, np.concatenate([np.empty(0, np.int32), *brought]))
            if lacking.any():
                missing = listed((put.epoch, *divmod(row, members)) for row in rows[lacking].tolist())
                raise ValueError(f"commit: state {put.state!r} must write column {name!r}; it is missing for {missing}")

    # looking

    def locate(self, epoch: int, columns: tuple[str, ...], rows: np.ndarray) -> Cells:
        """Where the cells of rows lie; segment -1 marks one that is not committed."""
        tables = self._epochs.get(epoch)
        if tables is None:
            places = [np.full((len(columns), len(rows)), x, t) for x, t in ((-1, "i4"), (0, "i8"), (0, "i4"))]
        else:
            _check_slots("read", rows, len(tables.tokens))
            places = tables.places.cells(columns, rows)
        return Cells(columns, rows, *places)

    def manifest(self) -> list[Record]:
        """All that lies here."""
        records = []
        for number, tables in sorted(self._epochs.items()):
            record = Record(self.index, self.seq, number, tables.shape)
            for name in self.columns:
                step = tables.shape.members if self._is_grouped((name,)) else 1
                slots = (~tables.places.absent((name,), slice(None))[0][::step]).nonzero()[0].astype(np.int32)
                record.cells.append(Cells((name,), slots, *tables.places.cells((name,), slots * step)))
            records.append(record)
            for state, done in tables.acks.items():
                rows = done.nonzero()[0].astype(np.int32)
                records.append(Record(self.index, self.seq, number, tables.shape, state=state, rows=rows))
        return records

    @property
    def used(self) -> int:
        """Bytes of cells, without what is only lent."""
        return self.slabs.used - sum(extent.nbytes for extent in self._lent)

    @property
    def epochs(self) -> list[int]:
        """Epochs of which something lies here."""
        return sorted(self._epochs)

    # clearing

    def clear(self, epoch: int, shape: Shape, groups: np.ndarray) -> Record | None:
        """Free the cells of groups; None where they are gone already."""
        if epoch in self._gone:
            return None
        self._check(epoch, shape, ())
        _check_slots("clear", groups, shape.groups)
        tables = self._tables(epoch, shape)
        groups = groups[tables.alive[groups]]
        if not len(groups):
            return None
        self._return_promises(tables, groups)
        tables.alive[groups] = False
        tables.blocks = [block for block in tables.blocks if not self._drop(tables, block)]
        tables.places.segment[:, rows_of_groups(groups, shape.members)] = -1
        if not tables.alive.any():
            del self._epochs[epoch]
            self._gone.add(epoch)
        return self._record(epoch, shape, cleared=groups.astype(np.int32))

    def _drop(self, tables: EpochTables, block: Block) -> bool:
        """Free what of a block belongs to cleared groups, whole lines of it; True: all of it."""
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
        """(offset, bytes) of the cells of groups that lie in a block, neighbours together."""
        rows, names = rows_of_groups(groups, tables.shape.members), tuple(self.columns)
        segment, offset, length = tables.places.cells(names, rows)
        nbytes = length * self._layout.items(names)
        (low, _), (last, size) = block.rest[0], block.rest[-1]
        mine = (segment == block.segment) & (offset >= low) & (offset < last + size) & (nbytes > 0)
        begin, first = np.unique(offset[mine], return_index=True)
        flat, sizes = runs(nbytes[mine][first][None], np.zeros((1, len(begin))), begin[None])
        return list(zip(begin[flat].tolist(), sizes.tolist(), strict=True))

    # what counts against the limits

    def _new_groups(self, tables: EpochTables, parts: Sequence[Part]) -> np.ndarray:
        """Groups that come in with `parts`."""
        touched = np.zeros(tables.shape.groups, bool)
        for part in parts:
            touched[part.slots // (1 if self._is_grouped(part.names) else tables.shape.members)] = True
        return (touched & ~tables.admitted & tables.alive).nonzero()[0]

    def _book(self, tables: EpochTables, groups: np.ndarray) -> None:
        tables.admitted[groups] = True
        self.outstanding += len(groups) * tables.shape.members * self._reserve

    def _kept_promise(self, column: str, lengths: np.ndarray) -> int:
        """Bytes promised for write-backs that cells of these lengths use; none for what only producers write."""
        if column not in self.write_backs:
            return 0
        return write_back_bytes(int(lengths.sum()) * entry_bytes(self.columns[column]), len(lengths))

    def _return_promises(self, tables: EpochTables, groups: np.ndarray) -> None:
        """What was promised to groups and is not used; they count no longer."""
        promised = int(tables.admitted[groups].sum()) * tables.shape.members * self._reserve
        for name in self.write_backs:
            rows = rows_of_groups(groups, tables.shape.members)[
                :: tables.shape.members if self._is_grouped((name,)) else 1
            ]
            segment, _, length = (x[0] for x in tables.places.cells((name,), rows))
            promised -= self._kept_promise(name, length[segment >= 0])
        self.outstanding -= promised
        tables.admitted[groups] = False

    def _tables(self, number: int, shape: Shape) -> EpochTables:
        if number not in self._epochs:
            rows, flags = shape.groups * shape.members, np.zeros(shape.groups, bool)
            tokens = np.full(rows, -1, np.int32)
            self._epochs[number] = EpochTables(shape, Places(self.columns, rows), flags, ~flags, tokens)
        return self._epochs[number]

    def _is_grouped(self, names: tuple[str, ...]) -> bool:
        levels = {self.columns[name].level == "group" for name in names}
        if len(levels) > 1:
            raise FrameError(f"columns {listed(names)} are not numbered alike")
        return levels.pop()

    def _record(self, epoch: int, shape: Shape, **what: object) -> Record:
        self.seq += 1
        return Record(self.index, self.seq, epoch, shape, **what)


def _check_slots(name: str, slots: np.ndarray, limit: int) -> None:
    """Raise ValueError for row numbers outside 0..limit - 1."""
    if len(slots) and (slots.min() < 0 or slots.max() >= limit):
        raise ValueError(f"{name!r}: rows {slots.min()}..{slots.max()} of an epoch with rows 0..{limit - 1}")
