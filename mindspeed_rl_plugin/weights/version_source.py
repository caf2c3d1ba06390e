"""The versions that other ranks publish, seen from another process."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

from mindspeed_rl_plugin.dock import Dock, Gone
from mindspeed_rl_plugin.dock.calls import Calls
from mindspeed_rl_plugin.dock.memory import mapped
from mindspeed_rl_plugin.dock.messages import Address, Message
from mindspeed_rl_plugin.weights.published_memory import (
    Found,
    ListVersions,
    Missed,
    Seek,
    Span,
    Take,
    VersionList,
    view,
)

LEAST_SECONDS = 0.1  # for an answer; so much before its deadline a wait ends, to be answered in time
MAPS = 16  # files that a reader of one process keeps mapped


class Maps:
    """Files of another process of this machine, each mapped once: page tables take longer than a small read."""

    def __init__(self) -> None:
        self._arrays: dict[int, np.ndarray] = {}  # by inode, which no other file has while one maps it

    def map(self, path: str, nbytes: int, write: bool = False) -> np.ndarray:
        """`[nbytes]` uint8 of a file, all of it. write: as memory that torch takes, though nobody writes."""
        with open(path, "r+b" if write else "rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            array = self._arrays.get(inode)
            if array is None:
                while len(self._arrays) >= MAPS:
                    del self._arrays[next(iter(self._arrays))]
                array = self._arrays[inode] = mapped(file.fileno(), max(nbytes, 1), write)[:nbytes]
        return array


class VersionSource:
    """The versions of one rank, seen by another process. Serves one thread at a time. Each call raises TimeoutError
    after `seconds`, ConnectionError where the rank is gone, and Gone where the version is."""

    def __init__(self, calls: Calls, address: Address) -> None:
        self._calls, self.address = calls, address
        self._maps, self._mapped = Maps(), None

    def seek(self, version: int | None, seconds: float) -> tuple[int, bytes]:
        """Wait for a version, None: for any, and take the newest. Its number, and what its publisher says of it."""
        until = time.monotonic() + seconds
        while True:
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
        """Those that the rank holds now."""
        return self._ask(ListVersions(), seconds).versions

    def read(self, version: int, spans: Sequence[Span], into: Sequence[np.ndarray], seconds: float) -> None:
        """Copy spans into arrays `[rows, bytes]`. What is read may be torn unless a later `check` says it is whole."""
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
        """Raise Gone where the version has been overwritten since `seek`."""
        answer = self._ask(Seek(version, 0.0), seconds)
        if not isinstance(answer, Found):
            raise Gone(version, answer.newest)

    def _ask(self, message: Message, seconds: float) -> Found | Missed | VersionList | np.ndarray:
        return self._calls.ask_rank(self.address, message, max(seconds, LEAST_SECONDS))


def sources_of(dock: Dock) -> list[VersionSource]:
    """What each rank of the job publishes, for a process outside of it."""
    return [VersionSource(dock.calls, address) for address in dock.calls.directory.ranks]
