"""Work in a thread of its own, one task at a time: an engine goes on with its steps meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundTask:
    """name: of the thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Start something; what was begun before is over then."""
        self.finish()
        self._error = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True, name=self._name)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> Exception | None:
        """Wait for what was begun last; why it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised in the main thread, which would wait for ever otherwise
            self._error = error
