"""Streams and events of a stand-in device, which finishes all work before it returns."""

from __future__ import annotations

import time
from typing import Any


class NullEvent:
    """An event holds the time at which it was recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from the record of this event to that of `end`."""
        return (end._seconds - self._seconds) * 1e3


class NullStream:
    """A stream has nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes and ignores what a real stream takes: device, priority."""

    def __enter__(self) -> NullStream:
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing to restore."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        event = event if event is not None else NullEvent()
        event.record()
        return event

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True
