"""What the models of episodes.py act on, one file for this project and for TRL: rounds of work, counted down to 0."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Mapping, Sequence

LEAST, MOST = 0.05, 0.5  # seconds of a slow call


def work(left: int) -> str:
    """Do one round of the work.

    Args:
        left: Rounds that are left.
    """
    return str(left - 1)


class Work:
    """Answers at once."""

    def reset(self, who: str, **_: object) -> None:
        self._who = who

    def work(self, left: int) -> str:
        """Do one round of the work.

        Args:
            left: Rounds that are left.
        """
        return str(left - 1)


class SlowWork(Work):
    """Sleeps for a time that the task and the round decide."""

    def work(self, left: int) -> str:
        """Do one round of the work.

        Args:
            left: Rounds that are left.
        """
        time.sleep(seconds(self._who, left))
        return str(left - 1)


class SlowWorkAsync(Work):
    """The same, awaited."""

    async def work(self, left: int) -> str:
        """Do one round of the work.

        Args:
            left: Rounds that are left.
        """
        await asyncio.sleep(seconds(self._who, left))
        return str(left - 1)


def seconds(who: str, left: int) -> float:
    """Of a slow call."""
    return LEAST + (MOST - LEAST) * (zlib.crc32(f"{who} {left}".encode()) % 1000) / 1000


def grade(conversation: Sequence[Mapping[str, object]]) -> float:
    """A grade that any conversation has, by its length."""
    return sum(len(str(message.get("content"))) for message in conversation) % 5 / 4
