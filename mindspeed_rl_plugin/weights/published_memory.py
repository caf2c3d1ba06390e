"""The bytes that a rank publishes for processes outside of the job, by version: its share of the weights.

The rank writes the next version over its oldest one and does not wait for readers. Readers on its machine map the
memory; other readers ask for spans of it. At the end of a read, each reader asks whether the version still exists: so
it notices if the version was overwritten meanwhile. The dock's server receives these requests, and does not hold the
lock of its rows while it answers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from mindspeed_rl_plugin.device.meters import host_available
from mindspeed_rl_plugin.dock import Dock, Gone, messages
from mindspeed_rl_plugin.dock.calls import Calls
from mindspeed_rl_plugin.dock.core import BulkAnswer
from mindspeed_rl_plugin.dock.memory import mapped, nameless_file
from mindspeed_rl_plugin.dock.messages import Address, Message, Ok

QUESTION_SECONDS = 1.0  # longest time that a server waits for a version before it answers
LEAST_SECONDS = 0.1  # time left for the answer: a server ends its wait this long before the deadline
TAKE_BYTES = 256 << 20  # largest size of one answer

ByteSpan = Sequence[int]  # byte offset, number of rows, bytes of a row, bytes from one row to the next


class Seek(Message):
    """Asks for the memory of a version."""

    version: int  # -1: the newest
    wait: float  # seconds to wait if the version does not exist yet


class Found(Message):
    """The memory of a version."""

    version: int
    about: bytes  # the publisher's description of the version
    path: str  # file of its bytes, which a process of the same machine maps
    nbytes: int
    read: int = 0  # bytes read for this answer, if a `machine_staging` reader gives it


class Missed(Message):
    """The rank does not have the version."""

    newest: int  # newest version of this rank; -1: none yet


class ListVersions(Message):
    """Asks which versions a rank has."""


class VersionList(Message):
    """The versions that a rank has, by rising number."""

    versions: list[int]


class Take(Message):
    """Asks for n spans of a version; the answer has their bytes as bulk, one span after the other."""

    version: int
    spans: np.ndarray  # `[n, 4]`, each a `ByteSpan`


messages.add(Seek, Found, Missed, ListVersions, VersionList, Take)


def check_memory(count: int, nbytes: int, mend: str) -> None:
    """Raise MemoryError if `count` versions of `nbytes` do not fit into the free host memory of this machine. mend: end
    of the error."""
    if count * nbytes > (left := host_available()):
        raise MemoryError(
            f"{count} versions of {nbytes} bytes of weights do not fit into the host memory of this machine, where "
            f"{left} bytes are free; {mend}"
        )


class PublishedMemory:
    """Memory of this rank for `count` versions of `nbytes`, in nameless files. Raises what `check_memory` raises."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        check_memory(count, nbytes, "keep fewer versions or spread the trainer over more machines")
        self._files = [nameless_file(max(nbytes, 1)) for _ in range(count)]
        self._memory = [mapped(file, max(nbytes, 1))[:nbytes] for file in self._files]
        self._held: list[tuple[int, bytes] | None] = [None] * count
        self._changed = threading.Condition()
        self._writing, self.newest = 0, -1

    def begin(self, version: int) -> np.ndarray:
        """`[nbytes]` uint8 to write a version into, which replaces the oldest. Raises ValueError if the version is not
        newer than all before."""
        with self._changed:
            if version <= self.newest:
                raise ValueError(f"version {version} of the weights cannot follow version {self.newest}")
            self._writing = min(range(len(self._held)), key=lambda i: (self._held[i] or (-1,))[0])
            self._held[self._writing] = None
        return self._memory[self._writing]

    def commit(self, version: int, about: bytes) -> None:
        """Make the written version readable for others. about: description for them."""
        with self._changed:
            self._held[self._writing], self.newest = (version, about), version
            self._changed.notify_all()

    def seek(self, message: Seek) -> Message:
        """Answers `Seek`: Found or Missed. Waits at most QUESTION_SECONDS if the version does not exist yet."""
        wanted = message.version
        with self._changed:
            self._changed.wait_for(lambda: self.newest >= max(wanted, 0), min(message.wait, QUESTION_SECONDS))
            slot = self._slot(self.newest if wanted < 0 else wanted)
            if slot < 0:
                return Missed(self.newest)
            path = f"/proc/{os.getpid()}/fd/{self._files[slot]}"
            return Found(*self._held[slot], path, self.nbytes)

    def versions(self) -> VersionList:
        """The complete versions."""
        with self._changed:
            return VersionList(sorted(held[0] for held in self._held if held))

    def take(self, message: Take) -> BulkAnswer:
        """Answers `Take`. Raises ValueError for spans outside of the version, or more than TAKE_BYTES in all."""
        with self._changed:
            slot = self._slot(message.version)
            if slot < 0:
                return Missed(self.newest), ()
        spans = message.spans.tolist()
        for span in spans:
            check_span(span, self.nbytes)
        if sum(rows * size for _, rows, size, _ in spans) > TAKE_BYTES:
            raise ValueError(f"more than {TAKE_BYTES} bytes of weights in one answer; ask for fewer spans")
        return Ok(), [np.ascontiguousarray(view(self._memory[slot], span)).reshape(-1) for span in spans]

    def close(self) -> None:
        """Close the files; their memory is freed when no process maps it any more. Idempotent."""
        while self._files:
            os.close(self._files.pop())
        self._memory.clear()
        self._held = []

    def _slot(self, version: int) -> int:
        return next((i for i, held in enumerate(self._held) if held and held[0] == version), -1)


def publish_memory(dock: Dock, nbytes: int, versions: int) -> PublishedMemory:
    """`PublishedMemory` of this rank, which processes outside of the job read through the dock's server until the dock
    is closed. Raises ValueError in a process that is no rank of the job."""
    if (core := dock.calls.core) is None:
        raise ValueError("only a rank of the job can publish its weights")
    store = PublishedMemory(nbytes, versions)
    core.serve(
        {
            Seek: lambda request: store.seek(request.message),
            ListVersions: lambda request: store.versions(),
            Take: lambda request: store.take(request.message),
        },
        locked=False,
    )
    core.at_close.append(store.close)
    return store


class Maps:
    """Mapped files of other processes of this machine. Each file is mapped only once, since setting up page tables
    takes longer than a small read."""

    def __init__(self) -> None:
        self._arrays: dict[int, np.ndarray] = {}  # by inode, which is unique while the file is mapped

    def map(self, path: str, nbytes: int, write: bool = False) -> np.ndarray:
        """`[nbytes]` uint8, the complete file. write: map it writable, as torch requires; nobody writes into it."""
        with open(path, "r+b" if write else "rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            array = self._arrays.get(inode)
            if array is None:
                array = self._arrays[inode] = mapped(file.fileno(), max(nbytes, 1), write)[:nbytes]
        return array


class VersionSource:
    """In another process: reads the versions of one rank, for one thread at a time. Each call raises TimeoutError after
    `seconds`, ConnectionError if the rank is lost, and Gone if the version was overwritten."""

    def __init__(self, calls: Calls, address: Address) -> None:
        self._calls, self.address = calls, address
        self._maps, self._mapped = Maps(), None

    def seek(
        self, version: int | None, seconds: float, alive: Callable[[], object] = lambda: None
    ) -> tuple[int, bytes]:
        """Wait until a version exists (None: any version; then take the newest). Returns its number and its publisher's
        description. alive: called about once a second; it may raise to end the wait."""
        until = time.monotonic() + seconds
        while True:
            alive()
            left = until - time.monotonic()
            answer = self._ask(Seek(-1 if version is None else version, max(left - LEAST_SECONDS, 0.0)), left)
            if isinstance(answer, Found):
                break
            if self._calls.closed:
                raise ConnectionError("this process has left the dock")
            if version is not None and answer.newest >= version:
                raise Gone(version, answer.newest)
            if left <= LEAST_SECONDS:
                what = "any version" if version is None else f"version {version}"
                raise TimeoutError(
                    f"rank {self.address.rank} has not published {what} of the weights within {seconds:g} s; its "
                    f"newest is {answer.newest}"
                )
        if self.address.node == self._calls.me.node:
            self._mapped = self._maps.map(answer.path, answer.nbytes)
        return answer.version, answer.about

    def versions(self, seconds: float) -> list[int]:
        """The versions that the rank has now."""
        return self._ask(ListVersions(), seconds).versions

    def read(self, version: int, spans: Sequence[ByteSpan], into: Sequence[np.ndarray], seconds: float) -> None:
        """Copy spans into arrays `[rows, bytes]`. The bytes are only valid if a later `check` does not raise."""
        if self._mapped is not None:
            for span, there in zip(spans, into, strict=True):
                there[...] = view(self._mapped, span)
            return
        got = self._ask(Take(version, np.array(spans, np.int64).reshape(-1, 4)), seconds)
        if isinstance(got, Missed):
            raise Gone(version, got.newest)
        at = 0
        for there in into:
            there[...] = got[at : at + there.size].reshape(there.shape)
            at += there.size

    def check(self, version: int, seconds: float) -> None:
        """Raise Gone if the version was overwritten since `seek`."""
        answer = self._ask(Seek(version, 0.0), seconds)
        if not isinstance(answer, Found):
            raise Gone(version, answer.newest)

    def _ask(self, message: Message, seconds: float) -> Found | Missed | VersionList | np.ndarray:
        return self._calls.ask_rank(self.address, message, max(seconds, LEAST_SECONDS))


def sources_of(dock: Dock) -> list[VersionSource]:
    """A source for each rank of the job, in a process outside of the job."""
    return [VersionSource(dock.calls, address) for address in dock.calls.directory.ranks]


def view(memory: np.ndarray, span: ByteSpan) -> np.ndarray:
    """`[rows, bytes]`, the view of a span."""
    offset, rows, nbytes, stride = span
    return np.lib.stride_tricks.as_strided(memory[offset:], (rows, nbytes), (stride, 1))


def check_span(span: ByteSpan, nbytes: int) -> None:
    """Raise ValueError if a span is not inside of `nbytes`, or if its rows overlap."""
    offset, rows, size, stride = span
    inside = offset >= 0 and rows > 0 and 0 < size <= stride and (rows - 1) * stride + size <= nbytes - offset
    if not inside:
        raise ValueError(f"span {list(span)} is not inside the {nbytes} bytes of a version")
