"""Copies between a device and its host that pass beside other work."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any, Protocol


class Copying(Protocol):
    """Copies that were started."""

    def wait(self) -> None:
        """Later work on the current stream comes after the copies."""

    def synchronize(self) -> None:
        """Return once the copies are done."""


class Copier(Protocol):
    """Starts copies one batch after the other, each after all work that was queued before it."""

    def start(self, copies: Callable[[], None]) -> Copying:
        """Begin; `copies` must touch nothing that the caller changes before the wait."""


class StreamCopier:
    """A side stream of `api` (torch.npu or torch.cuda); the event behind the copies is what is waited for."""

    def __init__(self, api: ModuleType) -> None:
        self.api, self._stream = api, api.Stream()

    def start(self, copies: Callable[[], None]) -> Copying:
        event = self.api.Event()
        self._stream.wait_stream(self.api.current_stream())
        with self.api.stream(self._stream):
            copies()
            event.record(self._stream)
        return _StreamCopying(self.api, event)


class _StreamCopying:
    def __init__(self, api: ModuleType, event: Any) -> None:
        self.api, self._event = api, event

    def wait(self) -> None:
        self.api.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()


class ThreadCopier:
    """A thread, so that on CPU too the order of copies and other work is kept by the waits alone."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")

    def start(self, copies: Callable[[], None]) -> Copying:
        try:
            done = self._thread.submit(copies)
        except RuntimeError:  # the interpreter ends, and its threads take nothing more: what closes then copies here
            copies()
            done = Future()
            done.set_result(None)
        return _ThreadCopying(done)


class _ThreadCopying:
    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def wait(self) -> None:
        self._done.result()

    synchronize = wait
