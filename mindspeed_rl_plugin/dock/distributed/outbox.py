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
    """Records to one process, in order. A connection may take records along that the other side never reads, so every
    new one begins with a mark, which tells it how many there are; it then fetches what it lacks.

    connect: makes a connection; mark: the bytes of a mark; wanted: whether the other side still is to be told, where
    that fails; spawn: runs a coroutine beside the caller. Only in the thread of the event loop.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[socket.socket]],
        mark: Callable[[], bytes],
        wanted: Callable[[], bool],
        spawn: Callable[[Awaitable[None]], None],
    ) -> None:
        self._connect, self._mark, self._wanted, self._spawn = connect, mark, wanted, spawn
        self._connection: socket.socket | None = None
        self._waiting: deque[Record] = deque()
        self._busy = False
        self._broken = False  # the other side has ended the connection
        self._closed = False

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
            self._broken = True  # the mark of the next connection stands for this record
            left.clear()
        if left or self._broken:
            self._deliver_later(left)

    def close(self) -> None:
        """Nothing is sent any more."""
        self._closed = True
        self._drop()

    def _deliver_later(self, begun: deque[bytes | memoryview]) -> None:
        if not self._busy and not self._closed:
            self._busy = True
            self._spawn(self._deliver(begun))

    async def _deliver(self, left: deque[bytes | memoryview]) -> None:
        """What is left of a record, then those that wait, until none does and a connection stands."""
        try:
            while left or self._waiting or self._broken or self._connection is None:
                if self._broken:
                    left.clear()
                    self._drop()
                    await asyncio.sleep(RETRY_SECONDS)
                try:
                    if self._connection is None:
                        self._connection = await self._connect()
                        asyncio.get_running_loop().add_reader(self._connection, self._readable)
                        left.append(self._mark())
                    while self._waiting and len(left) < TOGETHER:
                        left.append(self._waiting.popleft().encoded)
                    await send_all(self._connection, left)
                except (OSError, EOFError):
                    self._broken = True
                    if not self._wanted():
                        self._drop()
                        return self._waiting.clear()
        finally:
            self._busy = False

    def _readable(self) -> None:
        """The other side says nothing here: this is its end."""
        asyncio.get_running_loop().remove_reader(self._connection)
        self._broken = True
        self._deliver_later(deque())

    def _drop(self) -> None:
        self._broken = False
        if self._connection is not None:
            asyncio.get_running_loop().remove_reader(self._connection)
            self._connection.close()
            self._connection = None
