"""When an engine did what, for the job's timeline."""

from __future__ import annotations

import threading
import time
from collections import deque

Span = tuple[str, float, float]  # what, and from when to when, seconds since 1970
GAP_SECONDS = 0.02  # between two spans of a kind that are one
LONGEST_SECONDS = 4.0  # of one that goes on, before it is told
MOST = 2000  # spans that are kept until they are told; then the oldest are lost


class Spans:
    """Few spans: neighbours of one kind are one. Filled by the threads of an engine, emptied by its reports."""

    def __init__(self) -> None:
        self._since_epoch = time.time() - time.monotonic()
        self._lock = threading.Lock()
        self._going: dict[str, tuple[float, float]] = {}  # what -> the last of its kind, which may go on
        self._over: deque[Span] = deque(maxlen=MOST)

    def add(self, what: str, began: float, ended: float) -> None:
        """A span by the clock of `time.monotonic`."""
        with self._lock:
            first, last = self._going.get(what, (began, began))
            if began - last > GAP_SECONDS:
                self._end(what)
                first = began
            self._going[what] = first, ended
            if ended - first > LONGEST_SECONDS:
                self._end(what)

    def take(self, now: float) -> list[Span]:
        """Those that are over, which are taken away."""
        with self._lock:
            for what in [what for what, (_, last) in self._going.items() if now - last > GAP_SECONDS]:
                self._end(what)
            taken = list(self._over)
            self._over.clear()
        return taken

    def _end(self, what: str) -> None:
        if what in self._going:
            first, last = self._going.pop(what)
            self._over.append((what, first + self._since_epoch, last + self._since_epoch))
