"""What the models of episodes.py act on, one file for this project and for TRL: parts of a work, until it is over."""

from __future__ import annotations

import asyncio
import itertools
import time
import zlib
from collections.abc import Mapping, Sequence

LEAST, MOST = 0.05, 0.5  # seconds of a slow call
ANSWERS = itertools.cycle(("more", "more", "over", "more", "over"))  # of the function, which knows no task


def work(part: str) -> str:
    """Do a part of the work.

    Args:
        part: Which one.
    """
    return next(ANSWERS)


class Work:
    """Answers at once, and as often as its task says."""

    def reset(self, who: str, rounds: int, **_: object) -> None:
        self._who, self._left = who, rounds

    def _answer(self) -> str:
        self._left -= 1
        return "more" if self._left > 0 else "over"

    def work(self, part: str) -> str:
        """Do a part of the work.

        Args:
            part: Which one.
        """
        return self._answer()


class SlowWork(Work):
    """Sleeps for a time that the task and the round decide."""

    def work(self, part: str) -> str:
        """Do a part of the work.

        Args:
            part: Which one.
        """
        time.sleep(seconds(self._who, self._left))
        return self._answer()


class SlowWorkAsync(Work):
    """The same, awaited."""

    async def work(self, part: str) -> str:
        """Do a part of the work.

        Args:
            part: Which one.
        """
        await asyncio.sleep(seconds(self._who, self._left))
        return self._answer()


def seconds(who: str, left: int) -> float:
    """Of a slow call."""
    return LEAST + (MOST - LEAST) * (zlib.crc32(f"{who} {left}".encode()) % 1000) / 1000


def grade(conversation: Sequence[Mapping[str, object]]) -> float:
    """A grade that any conversation has, by its length."""
    return sum(len(str(message.get("content"))) for message in conversation) % 5 / 4
