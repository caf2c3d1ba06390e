"""Streams and events of the CPU in the role of an accelerator: all work has finished when an operator returns."""

from __future__ import annotations

import contextlib
import time
from typing import Any


def _nothing(self: Any, other: Any = None) -> None:
    """Nothing to wait for."""


class NullEvent:
    """An event that stores the time at which it was recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.record()

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from the record of this event to that of `end`."""
        return (end._seconds - self._seconds) * 1e3

    wait = synchronize = _nothing


class NullStream(contextlib.nullcontext):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accepts and ignores the arguments of a real stream: device, priority."""
        super().__init__(self)

    def record_event(self, event: Any = None) -> Any:
        event = event if event is not None else NullEvent()
        event.record()
        return event

    def query(self) -> bool:
        return True

    wait_stream = wait_event = synchronize = _nothing
