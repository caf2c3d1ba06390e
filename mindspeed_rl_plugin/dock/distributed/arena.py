"""Shared memory of one warehouse: segments that its node maps, handed out in extents and recycled.

A segment is a file in a private directory of /dev/shm, its pages touched when it is made: a first touch costs
ten times a copy. Extents are multiples of a cache line; free neighbours merge. The owner allocates and frees; writers
and readers on the node only map.
"""

from __future__ import annotations

import bisect
import mmap
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

LINE = 64  # bytes, granularity of extents


class Extent(NamedTuple):
    """A range of one segment, in bytes."""

    segment: int
    offset: int
    nbytes: int

    def holds(self, other: Extent) -> bool:
        """Whether `other` begins in it."""
        return self.segment == other.segment and self.offset <= other.offset < self.offset + self.nbytes


class Segments:
    """Segments of a directory as uint8 arrays, mapped when first used."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._arrays: dict[int, np.ndarray] = {}

    def view(self, segment: int, offset: int, nbytes: int) -> np.ndarray:
        """`[nbytes]` uint8 of a segment. Raises FileNotFoundError when its owner has removed it."""
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
            populate = getattr(mmap, "MAP_POPULATE", 0)
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | populate)
        return np.frombuffer(mapped, np.uint8)


class Arena(Segments):
    """The owner's side. segment_bytes: size of an ordinary segment; a larger extent gets one of its own."""

    def __init__(self, directory: str | os.PathLike[str], segment_bytes: int = 64 << 20) -> None:
        super().__init__(directory)
        self.segment_bytes = rounded(segment_bytes)
        self._free: dict[int, list[tuple[int, int]]] = {}  # segment -> free (offset, nbytes), by offset
        self._former: set[int] = set()  # segments of a former owner, of which nothing is handed out any more
        self._next = 0  # number of the next segment
        self.used = 0  # bytes handed out

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return sum(self.path(s).stat().st_size for s in self._free)

    def allocate(self, nbytes: int) -> Extent:
        """An extent of at least `nbytes`. Raises OSError when the node has no shared memory left."""
        size = rounded(max(nbytes, 1))
        for segment, free in self._free.items():
            if segment in self._former:
                continue
            for i, (offset, room) in enumerate(free):
                if room >= size:
                    free[i : i + 1] = [(offset + size, room - size)] if room > size else []
                    self.used += size
                    return Extent(segment, offset, size)
        segment = self._grow(size)
        return self._take(segment, 0, size)

    def claim(self, extent: Extent) -> None:
        """Mark an extent as handed out that a former owner of this directory had handed out."""
        if extent.segment not in self._free:
            self._free[extent.segment] = [(0, self.path(extent.segment).stat().st_size)]
        self._take(*extent)

    def adopt(self, first: int) -> None:
        """Take over all segments that a former owner left here, for the cells in them alone: a writer to whom it gave
        an extent may still be filling it. first: lowest number of new segments, above all that ever were."""
        for path in sorted(self.directory.glob("segment-*")):
            number = int(path.name.removeprefix("segment-"))
            self._free.setdefault(number, [(0, path.stat().st_size)])
            self._former.add(number)
        self._next = max(self._next, first)

    def drop_former(self) -> None:
        """Remove the segments of a former owner that hold nothing any more."""
        for segment in list(self._former):
            path = self.path(segment)
            if self._free[segment] == [(0, path.stat().st_size)]:
                path.unlink()
                del self._free[segment]
                self._former.remove(segment)
                self._arrays.pop(segment, None)

    def free(self, extent: Extent) -> None:
        """Give an extent back."""
        ranges = self._free[extent.segment]
        at = bisect.bisect(ranges, (extent.offset, 0))
        begin, end = extent.offset, extent.offset + extent.nbytes
        low, high = at, at
        if at > 0 and sum(ranges[at - 1]) == begin:
            low, begin = at - 1, ranges[at - 1][0]
        if at < len(ranges) and ranges[at][0] == end:
            high, end = at + 1, sum(ranges[at])
        ranges[low:high] = [(begin, end - begin)]
        self.used -= extent.nbytes

    def _grow(self, size: int) -> int:
        segment, self._next = self._next, self._next + 1
        room = max(size, self.segment_bytes)
        handle = os.open(self.path(segment), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # Reserves the pages: where the node is out of memory this fails here, not with SIGBUS at a write.
            os.posix_fallocate(handle, 0, room)
        except OSError as error:
            os.unlink(self.path(segment))
            raise OSError(
                error.errno, f"no room for {room} bytes in {self.directory}: enlarge it or lower --rl-dock-gb"
            ) from error
        finally:
            os.close(handle)
        self._free[segment] = [(0, room)]
        return segment

    def _take(self, segment: int, offset: int, size: int) -> Extent:
        free = self._free[segment]
        for i, (begin, room) in enumerate(free):
            if begin <= offset and offset + size <= begin + room:
                tail = (offset + size, begin + room - offset - size)
                free[i : i + 1] = [part for part in ((begin, offset - begin), tail) if part[1]]
                self.used += size
                return Extent(segment, offset, size)
        raise ValueError(f"segment {segment}: {size} bytes at {offset} are not free")


def rounded(nbytes: int) -> int:
    """Bytes of the whole lines that hold `nbytes`."""
    return -(-nbytes // LINE) * LINE
