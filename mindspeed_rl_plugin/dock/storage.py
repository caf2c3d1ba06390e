"""The cells of one machine: lend memory, commit, look up, clear. No sockets here; the caller serialises the calls.

A commit makes all its cells visible at once and is described by one `Record`. The first commit of a cell wins. A
writer of this machine fills memory that was lent to it through its own mapping, then commits; until then nobody sees
a byte of it. Of a commit the columns lie one after the other, each from the begin of a cache line on.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mindspeed_rl_plugin.dock.api import ColumnSpec, StateSpec, listed
from mindspeed_rl_plugin.dock.limits import Limits, entry_bytes, row_reserve, write_back_bytes
from mindspeed_rl_plugin.dock.messages import Cells, Extent, FrameError, Part, Put, Record, Reserve, Shape
from mindspeed_rl_plugin.dock.places import Places, indexed, rows_of_groups
from mindspeed_rl_plugin.dock.slabs import LINE, Range, Slabs, cut, rounded

MOST = 16 << 20  # bytes of memory that a writer is lent ahead
SEVERAL = 8  # commits that it is lent for


@dataclass
class Block:
    """Memory of one commit. rest: ranges of its segment that are not free yet; groups: whose cells lie in it."""

    segment: int
    offset: int
    nbytes: int
    rest: list[Range]
    groups: np.ndarray


@dataclass
class EpochTables:
    """All that a warehouse keeps of one epoch. places: of columns by row (False) and by group (True)."""

    shape: Shape
    places: dict[bool, Places]
    admitted: np.ndarray  # [groups] bool, whether the group counts against the limits
    alive: np.ndarray  # [groups] bool
    tokens: np.ndarray  # [rows] int32, entries of the row's token columns, -1 unknown
    acks: dict[str, np.ndarray] = field(default_factory=dict)  # state -> [rows] bool
    blocks: list[Block] = field(default_factory=list)


class Warehouse:
    """`index`: number of this warehouse; columns, states: all that are declared; limits: what it may hold."""

    def __init__(
        self, index: int, columns: Mapping[str, ColumnSpec], states: Mapping[str, StateSpec], limits: Limits
    ) -> None:
        self.index, self.columns, self.states, self.limits = index, columns, states, limits
        self.slabs = Slabs(limits.segment_bytes, limits.capacity)
        self.write_backs = limits.write_backs(list(columns.values()), list(states.values()))
        self.seq = 0
        self.outstanding = 0  # bytes promised for write-backs that have not come
        self._gone: set[int] = set()
        self._epochs: dict[int, EpochTables] = {}
        self._lent: dict[Extent, Hashable] = {}
        self._reserve = row_reserve(self.write_backs)
        self._layout = Layout(columns)
        self._names = {g: tuple(n for n, c in columns.items() if (c.level == "group") == g) for g in (False, True)}

    # writing

    def admit(self, put: Reserve) -> str | None:
        """Book a producer's groups, or say why it must wait. Raises ValueError when an empty warehouse would be too
        small."""
        if not self.limits.bounded or put.epoch in self._gone:  # of a late repeat nothing is kept
            return None
        self._check(put.epoch, put.shape, put.parts)
        groups = self._new_groups(put.epoch, put.shape, put.parts)
        rows = len(groups) * put.shape.members
        produced = sum(
            rounded(max(nbytes, 1))
            for part in put.parts
            for name, nbytes in zip(part.names, self._layout.sizes(part), strict=True)
            if name not in self.write_backs
        )
        wanted = {"bytes": produced + rows * self._reserve, "rows": rows}
        if reason := self.limits.missing(wanted, self._taken(), len(groups)):
            return reason
        self._book(self._epoch(put.epoch, put.shape), groups)
        return None

    def reserve(self, writer: Hashable, parts: Sequence[Part]) -> Extent:
        """Memory that only `writer` fills, for a put of `parts`."""
        extent = self.slabs.allocate(self._layout(parts)[1])
        self._lent[extent] = writer
        return extent

    def forget(self, writer: Hashable, *extents: Extent | None) -> None:
        """Take back what was lent to a writer, all of it where no extents are named."""
        for extent in [e for e, w in self._lent.items() if w == writer and (not extents or e in extents)]:
            del self._lent[extent]
            self.slabs.free(*extent)

    def store(self, writer: Hashable, parts: Sequence[Part], bulk: np.ndarray) -> Extent:
        """Bytes that came with a message, in memory lent to its writer. Raises FrameError for another number of them
        than the parts take."""
        nbytes = self._layout(parts)[1]
        if nbytes != len(bulk):
            raise FrameError(f"cells of {nbytes} bytes in {len(bulk)}")
        extent = self.reserve(writer, parts)
        self.slabs.view(extent.segment, extent.offset, nbytes)[:] = bulk
        return extent

    def commit(self, writer: Hashable, put: Put, extent: Extent | None) -> tuple[Record | None, Extent | None]:
        """Make cells visible that lie in `extent`, lent to `writer`, and note that a state is done with rows; what is
        left of the extent stays lent. None for a late repeat: all of it is cleared.

        Raises ValueError, and changes nothing but that the extent goes back, for memory that was not lent, rows outside
        `shape`, token columns of unequal length, and rows that lack a column that the state writes.
        """
        if extent is not None and self._lent.pop(extent, None) != writer:
            raise ValueError(f"{extent} was not lent to this writer")
        try:
            record, used = self._commit(put, extent)
        except BaseException:
            if extent is not None:
                self.slabs.free(*extent)
            raise
        if extent is None:
            return record, None
        left = Extent(extent.segment, extent.offset + used, extent.nbytes - used)
        if left.nbytes:
            self._lent[left] = writer
        return record, left

    def lend(self, writer: Hashable, left: Extent | None, want: int) -> Extent | None:
        """Memory for the writer's next put of `want` bytes: what is left of the last, or new; None where memory that
        lies ready would count against a limit."""
        if left is not None and left.nbytes and 0 < want <= left.nbytes:
            return left
        if left is not None and left.nbytes:
            del self._lent[left]
            self.slabs.free(*left)
        if self.limits.bounded or not 0 < want <= MOST:
            return None
        extent = self.slabs.allocate(min(SEVERAL * want, MOST))
        self._lent[extent] = writer
        return extent

    def clear(self, epoch: int, shape: Shape, groups: np.ndarray) -> Record | None:
        """Free the cells of groups; None where they are gone already."""
        if epoch in self._gone:
            return None
        self._check(epoch, shape, ())
        check_slots("clear", groups, shape.groups)
        state = self._epoch(epoch, shape)
        groups = groups[state.alive[groups]]
        if not len(groups):
            return None
        self._return_promises(state, groups)
        state.alive[groups] = False
        state.blocks = [block for block in state.blocks if not self._drop(state, block)]
        for grouped, places in state.places.items():
            places.forget(groups if grouped else rows_of_groups(groups, shape.members))
        if not state.alive.any():
            del self._epochs[epoch]
            self._gone.add(epoch)
        return self._record(epoch, shape, cleared=groups.astype(np.int32))

    # reading

    def locate(self, epoch: int, columns: tuple[str, ...], slots: np.ndarray) -> Cells:
        """Where the cells of rows lie; segment -1 marks one that is not committed."""
        out = [np.full((len(columns), len(slots)), x, t) for x, t in ((-1, np.int32), (0, np.int64), (0, np.int32))]
        state = self._epochs.get(epoch)
        if state is not None:
            check_slots("read", slots, state.shape.groups * state.shape.members)
            for i, name in enumerate(columns):
                grouped = self.columns[name].level == "group"
                at = slots // state.shape.members if grouped else slots
                for table, found in zip(out, state.places[grouped].cells((name,), at), strict=True):
                    table[i] = found[0]
        return Cells(columns, slots, *out)

    def manifest(self) -> list[Record]:
        """All that lies here: one record an epoch."""
        records = []
        for number, state in sorted(self._epochs.items()):
            record = Record(self.index, self.seq, number, state.shape)
            for grouped, places in state.places.items():
                for name in self._names[grouped]:
                    slots = (places.segment[places.row[name]] >= 0).nonzero()[0]
                    record.cells.append(Cells((name,), slots.astype(np.int32), *places.cells((name,), slots)))
            record.cleared = (~state.alive).nonzero()[0].astype(np.int32)
            records.append(record)
            for name, done in state.acks.items():
                rows = done.nonzero()[0].astype(np.int32)
                records.append(Record(self.index, self.seq, number, state.shape, state=name, rows=rows))
        return records

    @property
    def used(self) -> int:
        """Bytes of cells, without what is only lent."""
        return self.slabs.used - sum(extent.nbytes for extent in self._lent)

    @property
    def epochs(self) -> list[int]:
        """Epochs of which something lies here."""
        return sorted(self._epochs)

    # inside: commits

    def _commit(self, put: Put, extent: Extent | None) -> tuple[Record | None, int]:
        """The record of a commit, and how many bytes of `extent` it takes."""
        epoch, shape, parts, state, rows = put.epoch, put.shape, put.parts, put.state, put.rows
        self._check(epoch, shape, parts)
        begins, used = self._layout(parts)
        if used > (0 if extent is None else extent.nbytes):
            raise ValueError(f"cells of {used} bytes in {extent}")
        if epoch in self._gone:  # a late repeat is harmless
            return None, 0
        tables = self._epoch(epoch, shape)
        tokens = self._token_lengths(epoch, tables, parts)
        if state is not None:
            check_slots(state, rows, shape.groups * shape.members)
            self._check_complete(epoch, tables, parts, state, rows if put.checked else rows[:0])
        if self.limits.bounded:
            self._book(tables, self._new_groups(epoch, shape, parts))
        tables.tokens = tokens
        cells, groups = [], np.zeros(shape.groups, bool)
        for part, begin in zip(parts, begins, strict=True):
            found = self._enter(tables, part, extent, begin, groups)
            cells += [] if found is None else [found]
        kept = groups.nonzero()[0]
        if used and len(kept):
            span = extent.offset, used
            tables.blocks.append(Block(extent.segment, *span, [span], kept))
        if state is not None:
            tables.acks.setdefault(state, np.zeros(shape.groups * shape.members, bool))[rows] = True
        record = self._record(epoch, shape, cells=cells, state=state, rows=rows)
        return record, used if len(kept) else 0

    def _enter(
        self, tables: EpochTables, part: Part, extent: Extent | None, begins: np.ndarray, groups: np.ndarray
    ) -> Cells | None:
        """Enter those cells of a part that are new, and mark their groups. begins: `[C]` bytes of the extent."""
        grouped, at = self._is_grouped(part), indexed(part.slots)
        nbytes = part.length * self._layout.items(part.names)
        offset = (extent.offset if extent else 0) + begins[:, None] + np.cumsum(nbytes, 1) - nbytes
        of_row = part.slots if grouped else part.slots // tables.shape.members
        live = None if tables.alive.all() else tables.alive[of_row]
        new = tables.places[grouped].absent(part.names, at)
        if live is not None:
            new &= live
        segment = np.full((1, 1), extent.segment if extent else 0, np.int32)
        if not new.all():
            segment = np.where(new, segment, np.int32(-1))
        if not new.any():
            return None
        cells = Cells(part.names, part.slots, segment, offset, part.length)
        tables.places[grouped].enter(cells, at)
        groups[of_row[new.any(0)]] = True
        for i, name in enumerate(part.names) if self.write_backs else ():
            lengths = part.length[i][new[i]]
            self.outstanding -= self._kept_promise(name, lengths)
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
            grouped = self._is_grouped(part)
            if part.slots.ndim != 1 or part.length.shape != (len(part.names), len(part.slots)):
                raise FrameError(f"cells of columns {listed(part.names)} have parts of different lengths")
            check_slots(part.names[0], part.slots, shape.groups * (1 if grouped else shape.members))
            if len(part.slots) and part.length.min() < 0:
                raise FrameError(f"cells of columns {listed(part.names)} have less than no entries")
            self._check_longest(part)

    def _check_longest(self, part: Part) -> None:
        for i, name in enumerate(part.names) if self.write_backs else ():
            longest = int(part.length[i].max(initial=0)) * entry_bytes(self.columns[name])
            if longest > self.write_backs.get(name, longest):
                raise ValueError(
                    f"column {name!r}: a cell of {longest} bytes, the dock keeps {self.write_backs[name]} free for it; "
                    "raise the length limit that it was made with"
                )

    def _token_lengths(self, epoch: int, tables: EpochTables, parts: Sequence[Part]) -> np.ndarray:
        """`[rows]` entries of the token columns after `parts`. Raises ValueError where new token cells are not as long
        as the other token cells of their row."""
        known = tables.tokens
        for part in parts:
            tokens = [i for i, n in enumerate(part.names) if self.columns[n].level == "token"]
            alike = bool(tokens) and (part.length[tokens] == part.length[tokens[0]]).all()
            for i in tokens[:1] if alike else tokens:
                at, got = indexed(part.slots), part.length[i]
                absent = tables.places[False].absent((part.names[i],), at)[0]
                wrong = absent & (known[at] >= 0) & (known[at] != got)
                if wrong.any():
                    row, length = int(part.slots[wrong.argmax()]), int(got[wrong.argmax()])
                    raise ValueError(
                        f"column {part.names[i]!r} has {length} entries for id "
                        f"{(epoch, *divmod(row, tables.shape.members))}, the other token columns of that row have "
                        f"{known[row]}; {int(wrong.sum())} rows disagree"
                    )
                known = known.copy() if known is tables.tokens else known
                known[at] = np.where(absent, got, known[at])
        return known

    def _check_complete(
        self, epoch: int, tables: EpochTables, parts: Sequence[Part], state: str, rows: np.ndarray
    ) -> None:
        """Raise ValueError where `state` is done with rows that lack a column that it writes, also after `parts`."""
        if state not in self.states:
            raise ValueError(f"state {state!r} is not declared; declared: {listed(self.states)}")
        members = tables.shape.members
        for name in self.states[state].writes:
            grouped = self.columns[name].level == "group"
            at = rows // members if grouped else rows
            brought = [part.slots for part in parts if name in part.names]
            if any(np.array_equal(slots, at) for slots in brought):
                continue
            lacking = tables.places[grouped].absent((name,), at)[0] & tables.alive[rows // members]
            lacking &= ~np.isin(at, np.concatenate([np.empty(0, np.int32), *brought]))
            if lacking.any():
                ids = [(epoch, *divmod(row, members)) for row in rows[lacking].tolist()]
                raise ValueError(f"commit: state {state!r} must write column {name!r}; it is missing for {listed(ids)}")

    def _record(self, epoch: int, shape: Shape, **what: object) -> Record:
        self.seq += 1
        return Record(self.index, self.seq, epoch, shape, **what)

    # inside: limits and memory

    def _epoch(self, number: int, shape: Shape) -> EpochTables:
        if number not in self._epochs:
            rows = shape.groups * shape.members
            places = {g: Places(self._names[g], shape.groups if g else rows) for g in (False, True)}
            flags = np.zeros(shape.groups, bool), np.ones(shape.groups, bool)
            self._epochs[number] = EpochTables(shape, places, *flags, np.full(rows, -1, np.int32))
        return self._epochs[number]

    def _is_grouped(self, part: Part) -> bool:
        levels = {self.columns[name].level == "group" for name in part.names}
        if len(levels) > 1:
            raise FrameError(f"columns {listed(part.names)} are not numbered alike")
        return levels.pop()

    def _new_groups(self, epoch: int, shape: Shape, parts: Sequence[Part]) -> np.ndarray:
        """Groups that come in with `parts`."""
        touched = np.zeros(shape.groups, bool)
        for part in parts:
            touched[part.slots if self._is_grouped(part) else part.slots // shape.members] = True
        state = self._epochs.get(epoch)
        return (touched if state is None else touched & ~state.admitted & state.alive).nonzero()[0]

    def _book(self, state: EpochTables, groups: np.ndarray) -> None:
        state.admitted[groups] = True
        self.outstanding += len(groups) * state.shape.members * self._reserve

    def _taken(self) -> dict[str, int]:
        rows = sum(int(state.admitted.sum()) * state.shape.members for state in self._epochs.values())
        return {"bytes": self.slabs.used + self.outstanding, "rows": rows}

    def _kept_promise(self, column: str, lengths: np.ndarray) -> int:
        """Bytes promised for write-backs that cells of these lengths use; none for what only producers write."""
        if column not in self.write_backs:
            return 0
        return write_back_bytes(int(lengths.sum()) * entry_bytes(self.columns[column]), len(lengths))

    def _return_promises(self, state: EpochTables, groups: np.ndarray) -> None:
        """What was promised to groups and is not used; they count no longer."""
        promised = int(state.admitted[groups].sum()) * state.shape.members * self._reserve
        for name in self.write_backs:
            grouped = self.columns[name].level == "group"
            slots = groups if grouped else rows_of_groups(groups, state.shape.members)
            segment, _, length = (x[0] for x in state.places[grouped].cells((name,), slots))
            promised -= self._kept_promise(name, length[segment >= 0])
        self.outstanding -= promised
        state.admitted[groups] = False

    def _drop(self, state: EpochTables, block: Block) -> bool:
        """Free what of a block belongs to cleared groups, whole lines of it; True: all of it."""
        dead = ~state.alive[block.groups]
        if not dead.any():
            return False
        if not dead.all():
            for begin, end in self._runs(state, block, block.groups[dead]):
                low, high = rounded(begin), end // LINE * LINE
                for offset, nbytes in cut(block.rest, low, high) if low < high else ():
                    self.slabs.free(block.segment, offset, nbytes)
            block.groups = block.groups[~dead]
            return False
        for offset, nbytes in block.rest:
            self.slabs.free(block.segment, offset, nbytes)
        return True

    def _runs(self, state: EpochTables, block: Block, groups: np.ndarray) -> list[tuple[int, int]]:
        """Begin and end of the bytes of a block in which cells of groups lie, each column and group apart."""
        out = []
        for grouped, places in state.places.items():
            slots = groups if grouped else rows_of_groups(groups, state.shape.members)
            for name, i in places.row.items():
                inside = (places.segment[i][slots] == block.segment) & (places.offset[i][slots] >= block.offset)
                inside &= places.offset[i][slots] < block.offset + block.nbytes
                begin = places.offset[i][slots[inside]]
                end = begin + places.length[i][slots[inside]].astype(np.int64) * entry_bytes(self.columns[name])
                if not len(begin):
                    continue
                order = np.argsort(begin, kind="stable")
                begin, end = begin[order], end[order]
                cuts = np.flatnonzero(begin[1:] != end[:-1]) + 1
                low, high = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(begin)]]) - 1
                out += list(zip(begin[low].tolist(), end[high].tolist(), strict=True))
        return out


class Layout:
    """Where the columns of a put lie in its extent."""

    def __init__(self, columns: Mapping[str, ColumnSpec]) -> None:
        self._bytes = {name: entry_bytes(spec) for name, spec in columns.items()}
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
            begin = []
            for nbytes in self.sizes(part):
                begin.append(at)
                at += rounded(nbytes)
            begins.append(np.array(begin, np.int64))
        return begins, at


def check_slots(name: str, slots: np.ndarray, limit: int) -> None:
    """Raise ValueError for row numbers outside 0..limit - 1."""
    if len(slots) and (slots.min() < 0 or slots.max() >= limit):
        raise ValueError(f"{name!r}: rows {slots.min()}..{slots.max()} of an epoch with rows 0..{limit - 1}")
