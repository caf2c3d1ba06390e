"""Calls of a user's code go to worker processes: one at a time in each, those of an environment to the one that has it.

A call that runs too long, or ends its process, is lost. The environments of that process are made again in the process
that takes their next call: by all calls that they have answered, whose answers must be the same. That of a lost call is
then as it was before; a coroutine costs no process, since it can be cancelled, but it costs its environment likewise.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mindspeed_rl_plugin.episodes.protocol import EpisodeError
from mindspeed_rl_plugin.episodes.worker import Answer
from mindspeed_rl_plugin.workers.process import Worker, wait_for

GRACE = 0.5  # seconds beyond which an asynchronous call that should have been cancelled is stuck
RESTARTS = 2  # of a worker that ends before it reads its call


@dataclass(eq=False)
class Home:
    """An environment. slot: whose process has it, None before its first call and when that process ended; asked: what
    it has answered; known: to how many of these its process has answered."""

    key: int
    slot: Slot | None = None
    asked: list[tuple[tuple, Answer]] = field(default_factory=list)
    known: int = 0


@dataclass(eq=False)
class Call:
    """message: kind and arguments, as `worker.Desk` takes them; owner: who asks, None where nobody does; home: the
    environment that is asked; number: in the order of calls."""

    message: tuple
    owner: Any = None
    home: Home | None = None
    number: int = 0


class Lost(NamedTuple):
    """Why a call has no answer, and the seconds until then. unmade: its environment could not be made again for it."""

    why: str
    seconds: float
    unmade: bool = False


@dataclass(eq=False)
class Slot:
    """A worker. pid: of its process; homes: the environments in it; waiting: calls of these; closing: keys of those
    that are over; running: what it is busy with, since `began`, or loads since then."""

    worker: Worker
    pid: int
    homes: set[Home] = field(default_factory=set)
    waiting: deque[Call] = field(default_factory=deque)
    closing: deque[int] = field(default_factory=deque)
    running: Call | None = None
    began: float = field(default_factory=time.monotonic)


class Dispatcher:
    """workers: started already; timeout: seconds of one call; patience: seconds in which a worker that is started
    again must have loaded its files. answered: calls that are over, one that was replayed each time."""

    answered = 0

    def __init__(self, workers: Sequence[Worker], timeout: float, patience: float) -> None:
        self._slots = [Slot(worker, worker.pid) for worker in workers]
        self._timeout, self._patience = timeout, patience
        self._waiting: deque[Call] = deque()  # for any worker
        self._numbers = itertools.count()

    def home(self) -> Home:
        """For a new environment, which its first call makes."""
        return Home(next(self._numbers))

    def put(self, call: Call) -> None:
        """A call to make; an environment has one at a time."""
        call.number = next(self._numbers)
        self._queue(call).append(call)

    def withdraw(self, call: Call) -> bool:
        """Whether a call was still waiting, and now is none."""
        queue = self._queue(call)
        if call in queue:
            queue.remove(call)
            return True
        return False

    def close_home(self, home: Home) -> None:
        """An environment is over. It has no call in the making."""
        if home.slot is not None:
            home.slot.homes.remove(home)
            home.slot.closing.append(home.key)
            home.slot = None

    def give(self) -> None:
        """Calls to idle workers, new environments to those that have the fewest. Raises EpisodeError where a worker
        cannot be started again."""
        for slot in sorted(self._slots, key=lambda slot: len(slot.homes)):
            if slot.running is None and self._ready(slot):
                if slot.closing:
                    self._start(slot, Call(("close", [*slot.closing])), len(slot.closing))
                    slot.closing.clear()
                elif queues := [queue for queue in (slot.waiting, self._waiting) if queue]:
                    self._start(slot, min(queues, key=lambda queue: queue[0].number).popleft())

    def wait(self, end: float) -> None:
        """Until something is answered, `end` at most, on the monotonic clock."""
        wait_for((slot.worker for slot in self._slots), end)

    def take(self) -> Iterator[tuple[Call, Answer | Lost]]:
        """Calls that are over. Raises EpisodeError where a worker goes on to end before it reads its call."""
        for slot in self._slots:
            if slot.running is not None and (answer := slot.worker.answer()) is not None:
                call, slot.running = slot.running, None
                self.answered += not slot.worker.unread
                if isinstance(answer, str):
                    result = self._ended(slot, call, answer)
                elif answer.late:
                    result = self._cancelled(call, answer.seconds)
                else:
                    result = answer if call.home is None else self._answered(call, call.home, answer)
                if result is not None:
                    yield call, result

    def close(self, seconds: float) -> None:
        """Let all environments close themselves, within `seconds`, and end the processes."""
        end = time.monotonic() + seconds
        left = [slot for slot in self._slots if slot.homes or slot.closing]
        told: set[Slot] = set()
        try:
            while left := [slot for slot in left if self._parts(slot, told, end)]:
                if not wait_for((slot.worker for slot in left), end):
                    break
        finally:
            for slot in self._slots:
                slot.worker.close()

    def _queue(self, call: Call) -> deque[Call]:
        return self._waiting if call.home is None or call.home.slot is None else call.home.slot.waiting

    def _ready(self, slot: Slot) -> bool:
        """Whether a worker can take a call. One that ended meanwhile has lost its environments."""
        ready = slot.worker.ready()
        if slot.worker.pid != slot.pid:
            self._lose_homes(slot)
            slot.pid, slot.began = slot.worker.pid, time.monotonic()
        if not ready and time.monotonic() > slot.began + self._patience:
            raise EpisodeError(
                f"an environment worker was started again, and needs more than {self._patience:g} s to load its files; "
                "let them do less when they are imported, or raise --rl-wait-timeout"
            )
        return ready

    def _start(self, slot: Slot, call: Call, calls: int = 1) -> None:
        """Make a call, or the next one by which its environment is made again. calls: of the user's code in it."""
        message, home = call.message, call.home
        if home is not None:
            if home.slot is None:
                home.slot, home.known = slot, 0
                slot.homes.add(home)
            if home.known < len(home.asked):
                message, _ = home.asked[home.known]
        slot.running, slot.began = call, time.monotonic()
        slot.worker.call(message, calls * self._timeout, GRACE)

    def _answered(self, call: Call, home: Home, answer: Answer) -> Answer | Lost | None:
        """What comes of a call that an environment answered; None where it was asked once more what it answered
        before."""
        if home.known == len(home.asked):
            home.asked.append((call.message, answer))
            home.known += 1
            return answer
        message, before = home.asked[home.known]
        if _same(answer, before):
            home.known += 1
            self._queue(call).appendleft(call)
            return None
        return Lost(
            f"cannot be made: its environment is not deterministic under replay. A process ended, and in a new one "
            f"{message[0]} gave {_shown(answer)}, not {_shown(before)} as before; let answers depend on seed, data row "
            "and calls alone",
            answer.seconds,
            unmade=True,
        )

    def _cancelled(self, call: Call, seconds: float) -> Lost:
        """What comes of a coroutine that ran too long: its environment, in which it may have done half, is closed."""
        again = _replays(call)
        if call.home is not None:
            self.close_home(call.home)
        return _lost(f"ran longer than {self._timeout:g} s and was cancelled", seconds, again)

    def _ended(self, slot: Slot, call: Call, how: str) -> Lost | None:
        """What comes of a call whose process ended; None where it had not read it: it is made again."""
        again = _replays(call)
        self._lose_homes(slot)
        if not slot.worker.unread:
            return _lost(how, time.monotonic() - slot.began, again)
        if slot.worker.unread > RESTARTS:
            raise EpisodeError(
                f"an environment worker {how} before it read its call, {slot.worker.unread} times in a row; look at "
                "what its files start when they are imported, and at the machine's free memory"
            )
        if call.owner is not None:
            self._waiting.appendleft(call)
        return None

    def _lose_homes(self, slot: Slot) -> None:
        """The process of a worker ended."""
        for home in slot.homes:
            home.slot = None
        self._waiting.extendleft(reversed(slot.waiting))
        for kept in (slot.homes, slot.waiting, slot.closing):
            kept.clear()

    def _parts(self, slot: Slot, told: set[Slot], end: float) -> bool:
        """Whether a worker still ends its call, or closes its environments."""
        worker, busy = slot.worker, slot in told or slot.running is not None
        if busy and (answer := worker.answer()) is None:
            return True
        if slot in told or (busy and isinstance(answer, str)):
            return False
        told.add(slot)
        worker.call(("close",), max(end - time.monotonic(), 0.0))
        return True


def _replays(call: Call) -> bool:
    """Whether its environment is still being made again."""
    return call.home is not None and call.home.known < len(call.home.asked)


def _lost(why: str, seconds: float, again: bool) -> Lost:
    return Lost(f"{why} when it was replayed" if again else why, seconds, again)


def _same(one: Answer, other: Answer) -> bool:
    """Whether two answers agree, in all but time and place."""
    return one._replace(seconds=0.0, error=None) == other._replace(seconds=0.0, error=None)


def _shown(answer: Answer) -> str:
    if answer.brief is not None:
        return answer.brief
    rest = (", over" if answer.done else "") + (f", reward {answer.reward:g}" if answer.reward else "")
    return f"{' '.join(answer.texts) if answer.texts else None!r:.120}{rest}"
