"""What a job announces to its engines, followed by a thread."""

from __future__ import annotations

import threading

from mindspeed_rl_plugin.dock import Dock

NEWS_SECONDS = 30.0  # that one question for news waits


class News:
    """version: of the newest weights; error: why nothing more comes."""

    def __init__(self, dock: Dock) -> None:
        self.dock, self.error = dock, None
        self.number, self.version = 0, -1
        self._changed = threading.Event()
        threading.Thread(target=self._follow, daemon=True, name="news").start()

    def wake(self) -> None:
        self._changed.set()

    def wait(self, seconds: float) -> None:
        """For something new, at most `seconds`."""
        self._changed.wait(seconds)
        self._changed.clear()

    def check(self) -> bool:
        """Whether the job goes on. Raises what has ended the thread, unless the job has left."""
        if self.error is not None and not self.dock.ended:
            raise self.error
        return self.error is None and not self.dock.ended

    def _follow(self) -> None:
        try:
            while True:
                news = self.dock.exchange.news(self.number, NEWS_SECONDS)
                self.number, self.version = news.number, news.version
                self._changed.set()
        except Exception as error:  # noqa: BLE001 - raised in the main thread by `check`
            self.error = error
            self._changed.set()
