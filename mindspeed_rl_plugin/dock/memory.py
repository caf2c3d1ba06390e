"""Memory of a warehouse: how much the warehouse may hold, and of which segments its memory consists.

Producers wait until their rows are admitted; write-backs of states never wait. An admitted row reserves memory for all
cells that states will write into it, at their maximum length. For cells without a maximum, bytes above the reserve
count when they are written.

A segment is a nameless file (memfd), whose memory is freed once no process maps it. Processes of the same machine open
it through /proc. Its pages are touched when it is made, since the first touch takes ten times as long as a copy. An
extent is a range in a segment, in complete cache lines. It is freed as a whole or by ranges; neighbouring free ranges
become one. The owner (the warehouse) allocates and frees; writers and readers only map.
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
SEGMENT_DIVISOR = 64  # near the limit, a new segment has at least min(limit / 64, segment_bytes), so segments stay few

Range = tuple[int, int]  # offset, bytes
SEGMENT_BYTES = 64 << 20
LIMIT_FLAGS = {"bytes": "--rl-dock-gb", "rows": "--rl-dock-rows"}


def entry_bytes(spec: ColumnSpec) -> int:
    """Bytes of one entry of a column."""
    return spec.dtype.itemsize * math.prod(spec.trailing)


def open_ended(spec: ColumnSpec) -> bool:
    """Whether the cells of a column have no maximum length, such as a text of a row. The reserve for such a cell has as
    many entries as the longest sample has tokens."""
    return spec.ragged and spec.level != "token" and spec.longest is None


def items(columns: Mapping[str, ColumnSpec], names: Sequence[str]) -> np.ndarray:
    """`[C, 1]` int64 bytes of an entry of each column."""
    return np.array([entry_bytes(columns[name]) for name in names], np.int64)[:, None]


def row_reserve(write_backs: Mapping[str, int]) -> int:
    """Bytes that an admitted row reserves. write_backs: most bytes that states write into one row, by column. Each cell
    counts two lines more: extents are complete lines, and only complete lines of a cleared cell are freed."""
    return sum(nbytes + 2 * LINE for nbytes in write_backs.values())


def put_bytes(blocks: Iterable[int]) -> int:
    """Bytes that a producer's columns of these sizes take, in complete lines."""
    return sum(rounded(max(nbytes, 1)) for nbytes in blocks)


@dataclass(frozen=True)
class DockLimits:
    """Limits of a warehouse."""

    capacity: int | None = None  # bytes of cells, None for no limit
    max_tokens: int | None = None  # longest sample; needed with a capacity, for the reserve
    segment_bytes: int = SEGMENT_BYTES
    rows: int | None = None  # of all admitted groups, None for no limit

    def write_backs(self, columns: Sequence[ColumnSpec], states: Sequence[StateSpec]) -> dict[str, int]:
        """Most bytes that states write into one row, by column. Raises ValueError for a capacity without max_tokens."""
        if self.capacity is None:
            return {}
        if self.max_tokens is None:
            raise ValueError(f"a dock of {self.capacity} bytes must know the longest sample; give max_tokens too")
        written = {name for s in states for name in s.writes}
        return {c.name: self._cell_bytes(c) for c in columns if c.name in written}

    def check(self, columns: Sequence[ColumnSpec], states: Sequence[StateSpec], groups: int, members: int) -> None:
        """Raise ValueError if a warehouse cannot hold `groups` groups of `members` samples of maximum length. A cell
        without a maximum (text of a prompt) counts with max_tokens entries; a put with longer cells may still be
        refused."""
        if self.rows is not None and groups * members > self.rows:
            raise ValueError(
                f"--rl-dock-rows {self.rows}: {groups} groups of {members} samples on one machine are "
                f"{groups * members} rows; raise the limit, or lower --rl-rollout-prompts"
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
                f"{need} bytes ({need / 2**30:.3g} GiB){uncounted}; raise --rl-dock-gb, or lower --rl-rollout-prompts "
                "or the length limits"
            )

    def missing(self, wanted: Mapping[str, int], taken: Mapping[str, int], groups: int) -> str | None:
        """Why a put of `groups` groups must wait; None: it need not. Raises ValueError if it is too large even for an
        empty warehouse. wanted: what the put needs, with its reserve; taken: what is used or reserved; both by unit
        ("bytes", "rows")."""
        limited = {u: limit for u, limit in (("bytes", self.capacity), ("rows", self.rows)) if limit is not None}
        for unit, limit in limited.items():
            if wanted[unit] > limit:
                raise ValueError(
                    f"a put of {groups} groups needs {wanted[unit]} {unit}, with what states write back; the dock on "
                    f"this machine may hold {limit}; lower --rl-rollout-prompts or raise {LIMIT_FLAGS[unit]}"
                )
        for unit, limit in limited.items():
            if taken[unit] + wanted[unit] > limit:
                return f"{taken[unit]} of {limit} {unit} are used or reserved, the put needs {wanted[unit]} more"
        return None

    def _cell_bytes(self, column: ColumnSpec) -> int:
        return entry_bytes(column) * ((column.longest or self.max_tokens) if column.ragged else 1)


def rounded(nbytes: Any) -> Any:
    """`nbytes` rounded up to complete lines; an integer or an array."""
    return -(-nbytes // LINE) * LINE


class Segments:
    """Segments of a warehouse as uint8 arrays. The first use of a segment maps it, and unmaps segments that the
    warehouse has removed. find: number -> file and bytes of a segment, and numbers of all that exist."""

    def __init__(self, find: Callable[[int], tuple[str, int, list[int]]]) -> None:
        self._find = find
        self._arrays: dict[int, np.ndarray] = {}

    def view(self, segment: int, offset: int, nbytes: int) -> np.ndarray:
        """`[nbytes]` uint8 of a segment. Raises ValueError for a range outside of it."""
        if not nbytes:  # an empty cell has no memory, and its segment may already be removed
            return np.empty(0, np.uint8)
        array = self._arrays.get(segment)
        if array is None:
            path, size, there = self._find(segment)
            for gone in {*self._arrays}.difference(there):
                self._arrays.pop(gone, None)  # another thread may do the same
            with open(path, "r+b") as file:
                array = self._arrays[segment] = mapped(file.fileno(), size)
        if not 0 <= offset <= offset + nbytes <= array.nbytes:
            raise ValueError(f"segment {segment} has {array.nbytes} bytes; asked for {nbytes} at {offset}")
        return array[offset : offset + nbytes]


class Slabs(Segments):
    """The segments of a warehouse on the warehouse's side. Free segments are kept for the next rollout; they are
    removed if a new segment would exceed the limit.

    segment_bytes: size of an ordinary segment. A larger extent gets a separate segment of up to twice its size, since
    the next rollout may need a larger extent. limit: bytes of all segments, above which free segments are removed;
    None: twice the most bytes that were ever in use.
    """

    def __init__(self, segment_bytes: int = SEGMENT_BYTES, limit: int | None = None) -> None:
        super().__init__(self.place)
        self.segment_bytes, self.limit = rounded(segment_bytes), limit
        self._files: dict[int, tuple[int, int]] = {}  # segment -> descriptor, bytes
        self._free: dict[int, list[Range]] = {}  # segment -> free ranges, by offset
        self._next = 0  # no number is used twice: a process may still have mapped a removed segment
        self.used = self._most = 0  # bytes in use, now and at most

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return sum(size for _, size in self._files.values())

    def place(self, segment: int) -> tuple[str, int, list[int]]:
        """The path at which processes of this machine open a segment, its bytes, and all segments. Raises ValueError
        for a removed one."""
        if segment not in self._files:
            raise ValueError(f"segment {segment} of this warehouse no longer exists")
        handle, size = self._files[segment]
        return f"/proc/{os.getpid()}/fd/{handle}", size, [*self._files]

    def allocate(self, nbytes: int) -> Extent:
        """The first free extent of at least `nbytes`. Raises OSError if the machine lacks the memory."""
        size = rounded(max(nbytes, 1))
        spaces = ((segment, *space) for segment, free in self._free.items() for space in free)
        segment, offset = next((x[:2] for x in spaces if x[2] >= size), (-1, 0))
        segment = self._grow(size) if segment < 0 else segment
        cut(self._free[segment], offset, offset + size)
        self.used += size
        self._most = max(self._most, self.used)
        return Extent(segment, offset, size)

    def free(self, segment: int, offset: int, nbytes: int) -> None:
        """Free a range of extents, in complete lines."""
        insert(self._free[segment], offset, offset + nbytes)
        self.used -= nbytes

    def close(self) -> None:
        """Close all segments; their memory is freed when no process maps them any more. Idempotent."""
        for handle, _ in self._files.values():
            os.close(handle)
        for known in (self._files, self._free, self._arrays):
            known.clear()

    def _grow(self, size: int) -> int:
        """Make a segment with space for `size` bytes. Returns its number."""
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
            mend = "lower --rl-rollout-prompts, or set --rl-dock-gb: then producers wait for memory"
            raise OSError(f"no memory for {space} bytes of rows: {left} are free on this machine; {mend}")
        handle = nameless_file(space)
        segment, self._next = self._next, self._next + 1
        self._arrays[segment] = mapped(handle, space)
        self._files[segment], self._free[segment] = (handle, space), [(0, space)]
        self._free = dict(sorted(self._free.items(), key=lambda item: self._files[item[0]][1]))  # smallest first
        return segment

    def _remove(self, segment: int) -> None:
        handle, size = self._files.pop(segment)
        with mmap.mmap(handle, size) as mapped:
            mapped.madvise(mmap.MADV_REMOVE)  # frees the pages even if other processes still map them
        os.close(handle)
        del self._free[segment], self._arrays[segment]


def nameless_file(nbytes: int) -> int:
    """Descriptor of a file in memory with all its pages allocated. Raises OSError if the machine lacks the memory."""
    handle = os.memfd_create("rl-dock", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(handle, 0, nbytes)
    except OSError:
        os.close(handle)
        raise
    return handle


def mapped(handle: int, size: int, write: bool = True) -> np.ndarray:
    """The memory of a file as `[size]` uint8."""
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    access = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    return np.frombuffer(mmap.mmap(handle, size, flags=flags, prot=access), np.uint8)


def insert(ranges: list[Range], begin: int, end: int) -> None:
    """Add begin..end, which is not in `ranges`, a sorted list of ranges; neighbouring ranges become one."""
    at = bisect.bisect(ranges, (begin, 0))
    low, high = at, at
    if at > 0 and sum(ranges[at - 1]) == begin:
        low, begin = at - 1, ranges[at - 1][0]
    if at < len(ranges) and ranges[at][0] == end:
        high, end = at + 1, sum(ranges[at])
    ranges[low:high] = [(begin, end - begin)]


def cut(ranges: list[Range], begin: int, end: int) -> list[Range]:
    """Remove begin..end from `ranges`. Returns the removed ranges."""
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
