"""Calls of a user's code, on both sides of the pipe: coroutines of a process are awaited together in its one event
loop, so that what one call opened is of use in the next; any other call is made alone, outside of a loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from mindspeed_rl_plugin.workers.child import Parent
from mindspeed_rl_plugin.workers.process import LATE, WROTE, Worker, wait_for

RESTARTS = 2  # of a worker that ends before it reads its call
FEWER = 16  # by which the number of calls beside each other is divided where their process ended


class TooLong(Exception):
    """A coroutine was cancelled at its limit."""


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, or an object's `__call__`, is a coroutine function."""
    return any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004


async def settled(value: Any, seconds: float) -> Any:
    """What a user's code returned, awaited in the loop where it can be, in which it begins before any other call does.
    Raises TooLong after `seconds`, which a time limit of the user's own does not."""
    if not inspect.isawaitable(value):
        return value
    await asyncio.sleep(0)  # here `Calls` goes into its loop
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


class Calls:
    """In the process of a worker. parent: sends (number, message), and gets (number, answer)."""

    def __init__(self, parent: Parent) -> None:
        self._parent, self._loop, self._tasks = parent, asyncio.new_event_loop(), set[asyncio.Task]()
        asyncio.set_event_loop(self._loop)  # also of what a user's file makes when it is imported

    def serve(self, answer: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        """`answer(*message)` of each message, which raises nothing, until the parent closes its end."""
        while True:
            number, message = self._parent.receive()
            self._begin(number, answer(*message))
            if self._tasks:
                self._loop.add_reader(self._parent.fileno(), self._loop.stop)
                self._loop.run_forever()
                self._loop.remove_reader(self._parent.fileno())

    def finish(self, last: Coroutine[Any, Any, Any]) -> None:
        """When the parent has ended: all calls to their ends, and then this one."""
        self._wait()
        with contextlib.suppress(OSError):
            self._begin(-1, last)
        self._wait()

    def _begin(self, number: int, call: Coroutine[Any, Any, Any]) -> None:
        try:
            call.send(None)  # outside of the loop, as far as it comes
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
        with contextlib.suppress(OSError):  # the parent has ended, as `receive` says next
            self._parent.send((number, task.result()))

    def _wait(self) -> None:
        while self._tasks:
            self._loop.run_forever()


class CallWorker(Worker):
    """A worker whose process has `Calls`; its program's answers are (number, answer). calls: those in the making, by
    number: whose, seconds, and until when."""

    def __init__(self, *given: Any) -> None:
        self.calls: dict[int, tuple[Any, float, float]] = {}
        self._numbers, self._begun, self._most = itertools.count(), 0, 1
        super().__init__(*given)

    def next_of(self, waiting: Sequence[Any], most: Callable[[Any], int]) -> Any:
        """Which of the calls that wait is next, None for none: the first, if no call is in the making; else one that
        may be made beside those. most: how many may be in the making with it: 1 of what is no coroutine, before which
        no more than so many of those behind it begin."""
        if not waiting:
            return None
        if not self.calls:
            self._begun = 0
            return waiting[0] if self.ready() else None
        if len(self.calls) >= self._most or (self._begun >= self._most and any(most(call) == 1 for call in waiting)):
            return None
        return next((call for call in waiting if most(call) > len(self.calls)), None)

    def make(self, whose: Any, message: Any, seconds: float, grace: float, most: int) -> None:
        """Begin a call. most: see `next_of`."""
        number, self._begun = next(self._numbers), self._begun + 1
        self._most = min(most, self._most) if self.calls else most
        self.calls[number] = whose, seconds, time.monotonic() + seconds + grace
        self.call((number, message), seconds, grace)
        self._look()

    def answers(self) -> list[tuple[Any, Any]]:
        """(whose, answer) of the calls that are over: a text where one is lost; a number where it is to be made again,
        with at most so many in the making, for the process ended before it read it, or while others were in the making.
        Raises the program's error where the former happens again and again."""
        over: list[tuple[Any, Any]] = []
        while self.calls and (answer := self.answer()) is not None:
            if not isinstance(answer, str) and answer[0] in self.calls:
                over.append((self.calls.pop(answer[0])[0], answer[1]))
                self._look()
                continue
            if not isinstance(answer, str):
                self.close()
                answer = WROTE
            lost = [whose for whose, _, _ in self.calls.values()]
            self.calls.clear()
            if self.unread > RESTARTS:
                raise self._program.raises(
                    f"{self._program.who} {answer} before it read its call, {self.unread} times in a row; look at what "
                    f"the files of {self._loads} start when they are imported, and at the machine's free memory"
                )
            again = len(lost) > 1 or self.unread
            over += [(whose, max(1, len(lost) // FEWER) if again else answer) for whose in lost]
        return over

    def _look(self) -> None:
        """What the worker waits for next."""
        self.until, self._limit = min(((end, seconds) for _, seconds, end in self.calls.values()), default=(None, 0.0))


def load_all(workers: Sequence[CallWorker]) -> None:
    """Wait until each of them can take a call. Closes them and raises the program's error where one cannot load."""
    try:
        while not all([worker.ready() for worker in workers]):
            wait_for(workers, math.inf)
    except BaseException:
        for worker in workers:
            worker.close()
        raise
