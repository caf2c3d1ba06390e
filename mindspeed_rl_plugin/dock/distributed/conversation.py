"""One connection of a service: requests one after the other, most of them answered in the callback that read them.

A request costs one wake-up, one read and one write; only those that wait for something, and answers that the socket
does not take at once, become tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections import deque
from collections.abc import Awaitable, Callable

from mindspeed_rl_plugin.dock.distributed import frames
from mindspeed_rl_plugin.dock.distributed.frames import FrameError, Message, Reader

GATHERED = 256  # buffers of one system call

Answer = Message | None | Awaitable[Message | None]


class Conversation:
    """Serve the requests of `connection` with `answer` until its other side ends it or sends what is no message.

    The end of the connection cancels a request that still waits. reader: may hold the first bytes already.
    """

    def __init__(self, connection: socket.socket, reader: Reader, answer: Callable[[Message], Answer]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket, self._reader, self._answer = connection, reader, answer
        self._ended = self._loop.create_future()
        self._work: asyncio.Task[None] | None = None  # a request that waits, or an answer on its way
        self._reading = False

    async def hold(self) -> None:
        """Until the connection ends. Raises FrameError for what is no message, ConnectionError when it broke."""
        try:
            self._proceed()
            await self._ended
        finally:
            self._pause()
            if self._work is not None:
                self._work.cancel()
                await asyncio.gather(self._work, return_exceptions=True)

    def _proceed(self) -> None:
        """Answer what has come, as far as that needs no waiting, then read on."""
        try:
            while self._work is None and (message := self._reader.message()) is not None:
                answer = self._answer(message)
                if isinstance(answer, Message):
                    self._send(answer)
                elif answer is not None:
                    self._start(self._late(answer))
        except (FrameError, OSError) as error:
            return self._end(error)
        except BaseException as error:
            self._end(error)
            raise
        if not self._reading and len(self._reader.room()):
            self._reading = True
            self._loop.add_reader(self._socket, self._readable)

    def _readable(self) -> None:
        room = self._reader.room()
        if not len(room):  # a whole message waits for the answer to the one before
            return self._pause()
        try:
            got = self._socket.recv_into(room)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            return self._end(error)
        if not got:
            return self._end(None)
        self._reader.got(got)
        if self._work is None:
            self._proceed()

    def _send(self, message: Message) -> None:
        left = _encoded(message)
        with contextlib.suppress(BlockingIOError, InterruptedError):
            send_some(self._socket, left)
        if left:
            self._start(send_all(self._socket, left))

    def _start(self, work: Awaitable[None]) -> None:
        self._work = self._loop.create_task(work)
        self._work.add_done_callback(self._done)

    async def _late(self, answer: Awaitable[Message | None]) -> None:
        message = await answer
        if message is not None:
            await send_all(self._socket, _encoded(message))

    def _done(self, work: asyncio.Task[None]) -> None:
        self._work = None
        if work.cancelled() or self._ended.done():
            return
        if (error := work.exception()) is not None:
            return self._end(error)
        self._proceed()

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._socket)

    def _end(self, error: BaseException | None) -> None:
        self._pause()
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


def _encoded(message: Message) -> deque[memoryview | bytes]:
    """Buffers of an answer; of an error, where it is too large to be one."""
    try:
        return deque(frames.encode(message))
    except FrameError as error:
        return deque(frames.encode(Message("error", {"type": "ValueError", "text": str(error)})))


def send_some(connection: socket.socket, left: deque[memoryview | bytes]) -> None:
    """Send what the socket takes of the buffers `left`, and drop that from them. Raises BlockingIOError for none."""
    one = len(left) == 1
    sent = connection.send(left[0]) if one else connection.sendmsg(list(itertools.islice(left, GATHERED)))
    while left and sent >= len(left[0]):
        sent -= len(left.popleft())
    if sent:
        left[0] = memoryview(left[0])[sent:]


async def send_all(connection: socket.socket, left: deque[memoryview | bytes]) -> None:
    """Send all of `left` on a socket that does not block."""
    loop = asyncio.get_running_loop()
    while left:
        try:
            send_some(connection, left)
        except (BlockingIOError, InterruptedError):
            free = loop.create_future()
            loop.add_writer(connection, _release, free)
            try:
                await free
            finally:
                loop.remove_writer(connection)


def _release(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
