"""Copies between a device and its host that overlap other work."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Copying:
    """Copies that were started."""

    wait: Callable[[], None]  # later work on the current stream waits for them
    synchronize: Callable[[], None]  # returns once they are done


class StreamCopier:
    """A side stream of `api` (torch.npu or torch.cuda); the event behind the copies is what is waited for."""

    def __init__(self, api: ModuleType) -> None:
        self.api, self._stream = api, api.Stream()

    def start(self, copies: Callable[[], None]) -> Copying:
        """Begin one batch after the other, each after all work that was queued before it; `copies` must touch nothing
        that the caller changes before the wait."""
        event = self.api.Event()
        self._stream.wait_stream(self.api.current_stream())
        with self.api.stream(self._stream):
            copies()
            event.record(self._stream)
        return Copying(lambda: self.api.current_stream().wait_event(event), event.synchronize)


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
        return Copying(done.result, done.result)
