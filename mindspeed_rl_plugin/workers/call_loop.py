"""Makes calls of a user's code, in its process. Coroutines run together in one event loop of the process, so that a
call can use what an earlier call opened; any other call is made alone, outside of the loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from mindspeed_rl_plugin.workers.child import Parent
from mindspeed_rl_plugin.workers.process import LATE


class TooLong(Exception):
    """A coroutine was cancelled at its limit."""


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, or an object's `__call__`, is a coroutine function."""
    return any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004


async def settled(value: Any, seconds: float) -> Any:
    """The result of a user's code. A coroutine is awaited in the loop; it runs its first step before another call
    begins. Raises TooLong after `seconds`; a time limit of the user's code raises other errors."""
    if not inspect.isawaitable(value):
        return value
    await asyncio.sleep(0)  # now `CallLoop` enters its loop
    task, late = asyncio.current_task(), []
    timer = asyncio.get_running_loop().call_later(seconds, lambda: (late.append(True), task.cancel()))
    try:
        return await value
    except asyncio.CancelledError:
        if late:
            raise TooLong(f"{LATE} {seconds:g} s and was cancelled") from None
        raise
    finally:
        timer.cancel()


class CallLoop:
    """The loop in the process of a `PoolWorker`. parent: sends (number, message) and gets (number, answer); the answer
    is a text if a coroutine was cancelled at its limit."""

    def __init__(self, parent: Parent) -> None:
        self._parent, self._loop, self._tasks = parent, asyncio.new_event_loop(), set[asyncio.Task]()
        asyncio.set_event_loop(self._loop)  # also for objects that a user's file makes when it is imported

    def serve(self, answer: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        """Answer each message by `answer(*message)`, which raises only TooLong, until the parent closes the
        connection."""
        while True:
            number, message = self._parent.receive()
            self._begin(number, answer(*message))
            if self._tasks:
                self._loop.add_reader(self._parent.fileno(), self._loop.stop)
                self._loop.run_forever()
                self._loop.remove_reader(self._parent.fileno())

    def finish(self, last: Coroutine[Any, Any, Any]) -> None:
        """After the parent has closed the connection: finish all calls, and then make this last one."""
        self._wait()
        with contextlib.suppress(OSError):
            self._begin(-1, last)
        self._wait()

    def _begin(self, number: int, call: Coroutine[Any, Any, Any]) -> None:
        try:
            call.send(None)  # outside of the loop, up to its first await
        except StopIteration as over:
            self._parent.send((number, over.value))
            return
        task = self._loop.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._over, number))

    def _over(self, number: int, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._loop.stop()
        late = task.exception()
        with contextlib.suppress(OSError):  # the parent has ended; `receive` will notice it
            self._parent.send((number, task.result() if late is None else str(late)))

    def _wait(self) -> None:
        while self._tasks:
            self._loop.run_forever()
