"""The journal of a warehouse: its records as a file beside the segments, so that a successor knows what lies where.

The file begins with the number of bytes that count (int64), written after the bytes themselves: a record that
its writer did not finish is not there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from mindspeed_rl_plugin.dock.distributed import frames
from mindspeed_rl_plugin.dock.distributed.records import Record

NAME = "journal"
HEADER = 8  # bytes


class Journal:
    """Append-only file of records in `directory`; opened where one is left there, else begun."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory) / NAME
        self._file = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600)
        header = os.pread(self._file, HEADER, 0)
        if len(header) < HEADER:  # new, or its maker died before it wrote the number
            header = HEADER.to_bytes(HEADER, "little")
            os.pwrite(self._file, header, 0)
        self.nbytes = int.from_bytes(header, "little")

    def append(self, record: Record) -> None:
        """Add one record; it counts once this returns."""
        data = record.encoded
        os.pwrite(self._file, data, self.nbytes)
        self.nbytes += len(data)
        os.pwrite(self._file, self.nbytes.to_bytes(8, "little"), 0)

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
        os.close(self._file)
        self._file = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
        self.nbytes = HEADER
        for record in records:
            self.append(record)
        os.pwrite(self._file, self.nbytes.to_bytes(8, "little"), 0)
        os.rename(new, self.path)

    def close(self) -> None:
        """Close the file; it stays."""
        os.close(self._file)
