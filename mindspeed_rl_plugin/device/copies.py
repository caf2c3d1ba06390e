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
    """Copies on a side stream of `api` (torch.npu or torch.cuda). Waiting is for an event that is recorded after
    them."""

    def __init__(self, api: ModuleType) -> None:
        self.api, self._stream = api, api.Stream()

    def start(self, copies: Callable[[], None]) -> Copying:
        """Begin a batch of copies, after the batches before it and after all work that is queued already. The caller
        must not change the memory of `copies` before it has waited."""
        event = self.api.Event()
        self._stream.wait_stream(self.api.current_stream())
        with self.api.stream(self._stream):
            copies()
            event.record(self._stream)
        return Copying(lambda: self.api.current_stream().wait_event(event), event.synchronize)


class ThreadCopier:
    """Copies in a thread, for CPU: as on a device, only the waits order copies and other work."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")

    def start(self, copies: Callable[[], None]) -> Copying:
        try:
            done = self._thread.submit(copies)
        except RuntimeError:  # the interpreter ends and starts no more work in threads: copy here
            copies()
            done = Future()
            done.set_result(None)
        return Copying(done.result, done.result)
