"""Memory of a warehouse: how much it may hold, and the segments where it lies.

Producers wait for memory; what states write back never does: a row that comes in keeps free what states will write into
it, the longest there may be. Of cells that nothing bounds, what is longer counts when it comes.

A segment is a nameless file (memfd), so that nothing outlives the processes that map it; processes of the same machine
open it through /proc. Its pages are touched when it is made: a first touch costs ten times a copy. It is handed out in
extents, multiples of a cache line, and freed by ranges, of which free neighbours merge. The owner allocates and frees;
writers and readers only map.
"""

from __future__ import annotations

import bisect
import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_rl_plugin.device.meters import host_available
from mindspeed_rl_plugin.dock.api import ColumnSpec, StateSpec
from mindspeed_rl_plugin.dock.messages import Extent

LINE = 64  # bytes, granularity of extents
SEGMENT_DIVISOR = 64  # a new segment has at least 1/64 of the limit, so that a full warehouse makes few of them

Range = tuple[int, int]  # offset, bytes
SEGMENT_BYTES = 64 << 20
LIMIT_FLAGS = {"bytes": "--rl-dock-gb", "rows": "--rl-dock-rows"}


def entry_bytes(spec: ColumnSpec) -> int:
    """Bytes of one entry of a column."""
    return spec.dtype.itemsize * math.prod(spec.trailing)


def open_ended(spec: ColumnSpec) -> bool:
    """Whether nothing bounds its cells: text of a row, of which a promise counts as many entries as tokens."""
    return spec.ragged and spec.level != "token" and spec.longest is None


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
class DockLimits:
    """What a warehouse may hold."""

    capacity: int | None = None  # bytes of cells, None for no limit
    max_tokens: int | None = None  # longest sample, needed with a capacity, for what write-backs are promised
    segment_bytes: int = SEGMENT_BYTES
    rows: int | None = None  # of groups, None for no limit

    def write_backs(self, columns: Sequence[ColumnSpec], states: Sequence[StateSpec]) -> dict[str, int]:
        """Most bytes that states write into one row, by column. Raises ValueError for a capacity without max_tokens."""
        if self.capacity is None:
            return {}
        if self.max_tokens is None:
            raise ValueError(f"a dock of {self.capacity} bytes must know the longest sample; give max_tokens too")
        written = {name for s in states for name in s.writes}
        return {c.name: self._cell_bytes(c) for c in columns if c.name in written}

    def check(self, columns: Sequence[ColumnSpec], states: Sequence[StateSpec], groups: int, members: int) -> None:
        """Raise ValueError where a warehouse cannot admit `groups` of `members` samples, the longest there may be. A
        cell that nothing bounds (text of a prompt) counts with max_tokens entries; a put of longer ones still says what
        it lacks."""
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
            names = ", ".join(c.name for c in produced if open_ended(c))
            uncounted = f", with {self.max_tokens} entries per cell of {names}" if names else ""
            raise ValueError(
                f"--rl-dock-gb {self.capacity / 2**30:g}: {groups} groups of {members} samples on one machine may need "
                f"{need} bytes ({need / 2**30:.3g} GiB){uncounted}; raise it, or lower --rl-rollout-prompts or the "
                "length limits"
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
                    f"this node holds {limit}; lower --rl-rollout-prompts or raise {LIMIT_FLAGS[unit]}"
                )
        for unit, limit in limited.items():
            if taken[unit] + wanted[unit] > limit:
                return f"{taken[unit]} of {limit} {unit} are taken or promised, the put needs {wanted[unit]} more"
        return None

    def _cell_bytes(self, column: ColumnSpec) -> int:
        return entry_bytes(column) * ((column.longest or self.max_tokens) if column.ragged else 1)


def rounded(nbytes: Any) -> Any:
    """Bytes of the whole lines that hold `nbytes`, an integer or an array of them."""
    return -(-nbytes // LINE) * LINE


class Segments:
    """Segments of a warehouse as uint8 arrays, mapped when first used. find: number -> file and bytes of a segment, and
    the numbers of all that there are: the others are unmapped then, as one is removed only where another is made."""

    def __init__(self, find: Callable[[int], tuple[str, int, list[int]]]) -> None:
        self._find = find
        self._arrays: dict[int, np.ndarray] = {}

    def view(self, segment: int, offset: int, nbytes: int) -> np.ndarray:
        """`[nbytes]` uint8 of a segment. Raises ValueError for a range outside of it."""
        if not nbytes:  # a cell without entries keeps no memory: its segment may be gone
            return np.empty(0, np.uint8)
        array = self._arrays.get(segment)
        if array is None:
            path, size, there = self._find(segment)
            for gone in {*self._arrays}.difference(there):
                self._arrays.pop(gone, None)  # another thread may be at it, too
            with open(path, "r+b") as file:
                array = self._arrays[segment] = mapped(file.fileno(), size)
        if not 0 <= offset <= offset + nbytes <= array.nbytes:
            raise ValueError(f"segment {segment} has {array.nbytes} bytes; asked for {nbytes} at {offset}")
        return array[offset : offset + nbytes]


class Slabs(Segments):
    """The owner's side. Wholly free segments stay for the next rollout, and go where new memory would pass the limit.

    segment_bytes: size of an ordinary segment; a larger extent gets one of its own, up to twice as large, in which a
    block that grows from rollout to rollout has space again. limit: bytes that all segments should not pass, what is
    handed out aside; None: twice the most that was ever handed out.
    """

    def __init__(self, segment_bytes: int = SEGMENT_BYTES, limit: int | None = None) -> None:
        super().__init__(self.place)
        self.segment_bytes, self.limit = rounded(segment_bytes), limit
        self._files: dict[int, tuple[int, int]] = {}  # segment -> descriptor, bytes
        self._free: dict[int, list[Range]] = {}  # segment -> free ranges, by offset
        self._next = 0  # no number is used twice: a mapping of a removed segment is never taken for another
        self.used = self._most = 0  # bytes handed out, now and at most

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return sum(size for _, size in self._files.values())

    def place(self, segment: int) -> tuple[str, int, list[int]]:
        """Where processes of this machine open a segment, its bytes, and all segments. Raises ValueError for one that
        is gone."""
        if segment not in self._files:
            raise ValueError(f"segment {segment} of this warehouse is gone")
        handle, size = self._files[segment]
        return f"/proc/{os.getpid()}/fd/{handle}", size, [*self._files]

    def allocate(self, nbytes: int) -> Extent:
        """The first free extent of at least `nbytes`. Raises OSError when the machine has no memory left."""
        size = rounded(max(nbytes, 1))
        spaces = ((segment, *space) for segment, free in self._free.items() for space in free)
        segment, offset = next((x[:2] for x in spaces if x[2] >= size), (-1, 0))
        segment = self._grow(size) if segment < 0 else segment
        cut(self._free[segment], offset, offset + size)
        self.used += size
        self._most = max(self._most, self.used)
        return Extent(segment, offset, size)

    def free(self, segment: int, offset: int, nbytes: int) -> None:
        """Give a range of extents back: whole lines."""
        insert(self._free[segment], offset, offset + nbytes)
        self.used -= nbytes

    def close(self) -> None:
        """Let go of everything; it goes back to the machine when nobody maps it any more. Idempotent."""
        for handle, _ in self._files.values():
            os.close(handle)
        for known in (self._files, self._free, self._arrays):
            known.clear()

    def _grow(self, size: int) -> int:
        """A new segment that has space for `size` bytes; its number."""
        space = self.segment_bytes if size <= self.segment_bytes else 1 << (size - 1).bit_length()
        limit = 2 * max(self._most, self.used + size) if self.limit is None else self.limit
        for segment in sorted(self._files, key=lambda s: self._files[s][1]):
            if self.reserved + space > limit and self._free[segment] == [(0, self._files[segment][1])]:
                self._remove(segment)
        if self.limit is not None:
            least = min(self.segment_bytes, self.limit // SEGMENT_DIVISOR)
            space = min(space, rounded(max(size, least, self.limit - self.reserved)))
        try:
            return self._make(space)
        except OSError:
            return self._make(size)

    def _make(self, space: int) -> int:
        left = host_available()
        if space > left:
            mend = "lower --rl-rollout-prompts or set --rl-dock-gb, with which producers wait"
            raise OSError(f"no memory for {space} bytes of rows: {left} are free here; {mend}")
        handle = nameless_file(space)
        segment, self._next = self._next, self._next + 1
        self._arrays[segment] = mapped(handle, space)
        self._files[segment], self._free[segment] = (handle, space), [(0, space)]
        self._free = dict(sorted(self._free.items(), key=lambda item: self._files[item[0]][1]))  # smaller ones first
        return segment

    def _remove(self, segment: int) -> None:
        handle, size = self._files.pop(segment)
        with mmap.mmap(handle, size) as mapped:
            mapped.madvise(mmap.MADV_REMOVE)  # its pages, whoever still maps them
        os.close(handle)
        del self._free[segment], self._arrays[segment]


def nameless_file(nbytes: int) -> int:
    """Descriptor of a file in memory that has all its pages. Raises OSError where the machine has no memory left."""
    handle = os.memfd_create("rl-dock", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(handle, 0, nbytes)
    except OSError:
        os.close(handle)
        raise
    return handle


def mapped(handle: int, size: int, write: bool = True) -> np.ndarray:
    """`[size]` uint8, the memory of a file."""
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    access = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    return np.frombuffer(mmap.mmap(handle, size, flags=flags, prot=access), np.uint8)


def insert(ranges: list[Range], begin: int, end: int) -> None:
    """Add what is not in `ranges`, a sorted list of ranges that do not touch; neighbours become one."""
    at = bisect.bisect(ranges, (begin, 0))
    low, high = at, at
    if at > 0 and sum(ranges[at - 1]) == begin:
        low, begin = at - 1, ranges[at - 1][0]
    if at < len(ranges) and ranges[at][0] == end:
        high, end = at + 1, sum(ranges[at])
    ranges[low:high] = [(begin, end - begin)]


def cut(ranges: list[Range], begin: int, end: int) -> list[Range]:
    """Take out what of begin..end lies in `ranges`, and return it."""
    kept, out = [], []
    for offset, nbytes in ranges:
        low, high = max(begin, offset), min(end, offset + nbytes)
        if low >= high:
            kept.append((offset, nbytes))
            continue
        out.append((low, high - low))
        kept += [part for part in ((offset, low - offset), (high, offset + nbytes - high)) if part[1]]
    ranges[:] = kept
    return out
