"""The journal of a warehouse: its records as a file beside the segments, so that a successor knows what lies where.

The file begins with the number of bytes that count (int64), written after the bytes themselves: a record that
its writer did not finish is not there.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from mindspeed_rl_plugin.dock.distributed import frames
from mindspeed_rl_plugin.dock.distributed.records import Record

NAME = "journal"
HEADER = 8  # bytes
GROWTH = 256 << 10  # bytes


class Journal:
    """Append-only file of records in `directory`; opened where one is left there, else begun.

    It is written through a mapping: a system call would hand the interpreter to another thread at every record.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory) / NAME
        self._open(self.path)
        header = os.pread(self._file, HEADER, 0)
        if len(header) < HEADER:  # new, or its maker died before it wrote the number
            header = HEADER.to_bytes(HEADER, "little")
            os.pwrite(self._file, header, 0)
        self.nbytes = int.from_bytes(header, "little")

    def append(self, record: Record) -> None:
        """Add one record; it counts once this returns. Raises OSError where there is no memory for it."""
        data = record.encoded
        end = self.nbytes + len(data)
        if self._memory is None or end > len(self._memory):
            self._grow(end)
        self._memory[self.nbytes : end] = data
        self._memory[:HEADER] = end.to_bytes(HEADER, "little")
        self.nbytes = end

    def records(self) -> Iterator[Record]:
        """All records that count, in order."""
        at = HEADER
        while at < self.nbytes:
            head, payload = frames.prefix(os.pread(self._file, frames.PREFIX.size, at))
            at += frames.PREFIX.size
            data = os.pread(self._file, head + payload, at)
            at += head + payload
            yield Record.from_message(frames.decode(data[:head], bytearray(data[head:])))

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace the content at once, by a rename."""
        new = self.path.with_suffix(".new")
        new.unlink(missing_ok=True)
        self.close()
        self._open(new)
        self.nbytes = HEADER
        os.pwrite(self._file, HEADER.to_bytes(HEADER, "little"), 0)
        for record in records:
            self.append(record)
        os.rename(new, self.path)

    def close(self) -> None:
        """Close the file; it stays."""
        if self._memory is not None:
            self._memory.close()
        os.close(self._file)

    def _open(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        self._memory: mmap.mmap | None = None

    def _grow(self, nbytes: int) -> None:
        room = -(-nbytes // GROWTH) * GROWTH
        # Reserves the pages: where the node is out of memory this fails here, not with SIGBUS at a write.
        os.posix_fallocate(self._file, 0, room)
        if self._memory is not None:
            self._memory.close()
        self._memory = mmap.mmap(self._file, room)
