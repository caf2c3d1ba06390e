"""Shared memory of one warehouse: segments that its node maps, handed out in extents and recycled.

A segment is a file in a private directory of /dev/shm, its pages touched when it is made: a first touch costs
ten times a copy. Extents are multiples of a cache line; free neighbours merge. The owner allocates and frees; writers
and readers on the node only map.

Free memory stays for the next rollout. Only where new memory is needed and all together would pass the limit, segments
that are wholly free are removed and whole pages of other free ranges go back to the machine ("dry"), also those that
readers map. Numbers of segments are never used again, so that a mapping of a removed one is never taken for another.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mindspeed_rl_plugin.dock.distributed.ranges import Range, cut, insert, overlap, take

LINE = 64  # bytes, granularity of extents
LEAST = 64  # parts of the limit: what a new segment has at least, so that a full warehouse does not make one a commit


class Extent(NamedTuple):
    """A range of one segment, in bytes."""

    segment: int
    offset: int
    nbytes: int

    def holds(self, other: Extent) -> bool:
        """Whether `other` begins in it."""
        return self.segment == other.segment and self.offset <= other.offset < self.offset + self.nbytes


class Segments:
    """Segments of a directory as uint8 arrays, mapped when first used, let go when their owner has removed them."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._arrays: dict[int, np.ndarray] = {}

    def view(self, segment: int, offset: int, nbytes: int) -> np.ndarray:
        """`[nbytes]` uint8 of a segment. Raises FileNotFoundError when its owner has removed it."""
        if not nbytes:  # a cell without entries keeps no memory: its segment may be gone
            return np.empty(0, np.uint8)
        array = self._arrays.get(segment)
        if array is None:
            array = self._arrays[segment] = self._map(segment)
        if not 0 <= offset <= offset + nbytes <= array.nbytes:
            raise ValueError(f"segment {segment} has {array.nbytes} bytes; asked for {nbytes} at {offset}")
        return array[offset : offset + nbytes]

    def path(self, segment: int) -> Path:
        """File of a segment."""
        return self.directory / f"segment-{segment:05d}"

    def _map(self, segment: int) -> np.ndarray:
        with open(self.path(segment), "r+b") as file:
            found = os.fstat(file.fileno())
            # Where the owner has given pages back, mapping all at once would bring them again.
            whole = found.st_blocks * 512 >= found.st_size
            populate = getattr(mmap, "MAP_POPULATE", 0) if whole else 0
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | populate)
        for known in [s for s in list(self._arrays) if not self.path(s).exists()]:
            self._arrays.pop(known, None)
        return np.frombuffer(mapped, np.uint8)


class Arena(Segments):
    """The owner's side.

    segment_bytes: size of an ordinary segment; a larger extent gets one of its own, up to twice as large, in which a
    block that grows from rollout to rollout has room again. limit: bytes that all segments should not pass, what is
    handed out aside, and but for LEAST and parts of pages; None: twice the most that was ever handed out.
    """

    def __init__(self, directory: str | os.PathLike[str], segment_bytes: int = 64 << 20) -> None:
        super().__init__(directory)
        self.segment_bytes = rounded(segment_bytes)
        self.limit: int | None = None
        self._free: dict[int, list[Range]] = {}  # segment -> free (offset, nbytes), by offset; smaller segments first
        self._size: dict[int, int] = {}
        self._dry: dict[int, list[Range]] = {}  # free pages that were given back
        self._former: set[int] = set()  # segments of a former owner, of which nothing is handed out any more
        self._next = 0  # number of the next segment
        self.used = self._most = 0  # bytes handed out, now and at most

    @property
    def reserved(self) -> int:
        """Bytes of memory that all segments take."""
        return sum(self._size.values()) - sum(n for dry in self._dry.values() for _, n in dry)

    def allocate(self, nbytes: int) -> Extent:
        """An extent of at least `nbytes`. Raises OSError when the node has no shared memory left."""
        size = rounded(max(nbytes, 1))
        found = self._fit(size, warm=True)
        if found is None and any(self._dry.values()):
            found = self._fit(size, warm=False)
            if found is not None:
                self._wet(found)
        return self._take(self._grow(size), 0, size) if found is None else found

    def claim(self, extent: Extent) -> None:
        """Mark an extent as handed out that a former owner of this directory had handed out."""
        if extent.segment not in self._free:
            self._add(extent.segment, self.path(extent.segment).stat().st_size)
        self._take(*extent)

    def adopt(self, first: int) -> None:
        """Take over all segments that a former owner left here, for the cells in them alone: a writer to whom it gave
        an extent may still be filling it. first: lowest number of new segments, above all that ever were."""
        for path in sorted(self.directory.glob("segment-*")):
            number = int(path.name.removeprefix("segment-"))
            if number not in self._free:
                self._add(number, path.stat().st_size)
            self._former.add(number)
        self._next = max(self._next, first)

    def drop_former(self) -> None:
        """Remove the segments of a former owner that hold nothing any more."""
        for segment in [s for s in self._former if self._is_free(s)]:
            self._remove(segment)

    def free(self, extent: Extent) -> None:
        """Give an extent back."""
        insert(self._free[extent.segment], extent.offset, extent.offset + extent.nbytes)
        self.used -= extent.nbytes

    def _fit(self, size: int, warm: bool) -> Extent | None:
        """Free memory for `size` bytes; warm: of which nothing was given back."""
        for segment, free in self._free.items():
            if segment in self._former:
                continue
            dry = self._dry.get(segment) if warm else None
            for i, (offset, room) in enumerate(free):
                if room >= size and not (dry and overlap(dry, offset, offset + size)):
                    free[i : i + 1] = [(offset + size, room - size)] if room > size else []
                    return self._hand_out(segment, offset, size)
        return None

    def _take(self, segment: int, offset: int, size: int) -> Extent:
        """Just this free range."""
        if not take(self._free[segment], offset, offset + size):
            raise ValueError(f"segment {segment}: {size} bytes at {offset} are not free")
        return self._hand_out(segment, offset, size)

    def _hand_out(self, segment: int, offset: int, size: int) -> Extent:
        self.used += size
        self._most = max(self._most, self.used)
        return Extent(segment, offset, size)

    # whole segments, and pages

    def _grow(self, size: int) -> int:
        """A new segment that has room for `size` bytes; its number."""
        room = self.segment_bytes if size <= self.segment_bytes else 1 << (size - 1).bit_length()
        self._shrink(room, size)
        if self.limit is not None:
            least = min(self.segment_bytes, self.limit // LEAST)
            room = min(room, rounded(max(size, least, self.limit - self.reserved)))
        try:
            return self._make(room)
        except OSError:
            self._shrink(None, size)  # all that is free, and then no more than is needed
            return self._make(size)

    def _make(self, room: int) -> int:
        segment, self._next = self._next, self._next + 1
        handle = os.open(self.path(segment), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # Reserves the pages: where the node is out of memory this fails here, not with SIGBUS at a write.
            os.posix_fallocate(handle, 0, room)
        except OSError as error:
            os.unlink(self.path(segment))
            raise self._full(error, room) from error
        finally:
            os.close(handle)
        self._add(segment, room)
        return segment

    def _add(self, segment: int, size: int) -> None:
        self._free[segment], self._size[segment] = [(0, size)], size
        self._free = dict(sorted(self._free.items(), key=lambda item: self._size[item[0]]))

    def _remove(self, segment: int) -> None:
        self._give_back(segment, 0, self._size[segment])
        self.path(segment).unlink()
        for known in (self._free, self._size, self._dry, self._arrays):
            known.pop(segment, None)
        self._former.discard(segment)

    def _is_free(self, segment: int) -> bool:
        return self._free[segment] == [(0, self._size[segment])]

    def _shrink(self, room: int | None, size: int) -> None:
        """Give free memory back until there is `room` below the limit, as far as there is any; None: all of it.

        size: bytes that will be handed out. What blocks have outgrown goes first, ordinary segments come after it.
        """
        limit = 2 * max(self._most, self.used + size) if self.limit is None else self.limit

        def enough() -> bool:
            return room is not None and self.reserved + room <= limit

        outgrown = sorted(self._free, key=lambda s: (self._size[s] <= self.segment_bytes, self._size[s]))
        for segment in outgrown:
            if enough():
                return
            if self._is_free(segment):
                self._remove(segment)
        for segment, free in self._free.items():
            for offset, nbytes in free:
                begin, end = -(-offset // mmap.PAGESIZE), (offset + nbytes) // mmap.PAGESIZE
                begin, end = begin * mmap.PAGESIZE, end * mmap.PAGESIZE
                dry = self._dry.setdefault(segment, [])
                if begin >= end or overlap(dry, begin, end) == end - begin:
                    continue
                if enough():
                    return
                if self._give_back(segment, begin, end):
                    cut(dry, begin, end)
                    insert(dry, begin, end)

    def _give_back(self, segment: int, begin: int, end: int) -> bool:
        """The pages of a range to the machine, whoever maps them; False where the file system cannot."""
        with open(self.path(segment), "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            with contextlib.suppress(OSError):
                mapped.madvise(mmap.MADV_REMOVE, begin, end - begin)
                return True
        return False

    def _wet(self, extent: Extent) -> None:
        """Have the pages of an extent again that were given back; others go for them where the limit asks for it."""
        begin = extent.offset // mmap.PAGESIZE * mmap.PAGESIZE
        end = begin + max(extent.offset + extent.nbytes - begin, self.segment_bytes // LEAST)  # not page by page
        dry = self._dry[extent.segment]
        pieces = cut(dry, begin, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._shrink(0, 0)
        with open(self.path(extent.segment), "r+b") as file:
            try:
                for offset, nbytes in pieces:
                    os.posix_fallocate(file.fileno(), offset, nbytes)
            except OSError as error:
                for offset, nbytes in pieces:
                    insert(dry, offset, offset + nbytes)
                self.free(extent)
                raise self._full(error, extent.nbytes) from error

    def _full(self, error: OSError, nbytes: int) -> OSError:
        return OSError(error.errno, f"no room for {nbytes} bytes in {self.directory}: enlarge it or lower --rl-dock-gb")


def rounded(nbytes: int) -> int:
    """Bytes of the whole lines that hold `nbytes`."""
    return -(-nbytes // LINE) * LINE
