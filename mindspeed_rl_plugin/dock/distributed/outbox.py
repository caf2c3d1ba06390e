"""Records on their way from a warehouse to the controllers of other processes."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable

from mindspeed_rl_plugin.dock.distributed.conversation import send_all, send_some
from mindspeed_rl_plugin.dock.distributed.records import Record

RETRY_SECONDS = 0.2
TOGETHER = 64  # records of one write


class Outbox:
    """Records to one process, in order. What is lost with a connection, the other side asks for.

    connect: makes a connection; wanted: whether the other side still is to be told, where that fails; spawn: runs a
    coroutine beside the caller. Only in the thread of the event loop.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[socket.socket]],
        wanted: Callable[[], bool],
        spawn: Callable[[Awaitable[None]], None],
    ) -> None:
        self._connect, self._wanted, self._spawn = connect, wanted, spawn
        self._connection: socket.socket | None = None
        self._waiting: deque[Record] = deque()
        self._busy = False

    def put(self, record: Record) -> None:
        """Send a record: at once where the socket takes it, else as soon as it does."""
        if self._busy or self._connection is None:
            self._waiting.append(record)
            return self._deliver_later(deque())
        left: deque[bytes | memoryview] = deque([record.encoded])
        try:
            send_some(self._connection, left)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            return self._drop()
        if left:
            self._deliver_later(left)

    def _deliver_later(self, begun: deque[bytes | memoryview]) -> None:
        if not self._busy:
            self._busy = True
            self._spawn(self._deliver(begun))

    async def _deliver(self, left: deque[bytes | memoryview]) -> None:
        """What is left of a record, then those that wait, until none does."""
        try:
            while left or self._waiting:
                try:
                    if self._connection is None:
                        self._connection = await self._connect()
                    while self._waiting and len(left) < TOGETHER:
                        left.append(self._waiting.popleft().encoded)
                    await send_all(self._connection, left)
                except (OSError, EOFError):
                    left.clear()
                    self._drop()
                    if not self._wanted():
                        return self._waiting.clear()
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._busy = False

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
