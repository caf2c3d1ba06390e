"""Calls of a user's code go to worker processes: in each one at a time, or coroutines beside each other; those of an
environment to the one that has it.

A call that runs too long, or ends its process, is lost; coroutines beside it are made again, fewer at a time. The
environments of that process are made again in the process that takes their next call: by all calls that they have
answered, whose answers must be the same. That of a lost call is then as it was before; a coroutine costs no process,
since it can be cancelled, but it costs its environment likewise.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mindspeed_rl_plugin.episodes.protocol import EpisodeError
from mindspeed_rl_plugin.episodes.tools import Answer
from mindspeed_rl_plugin.workers.calls import CallWorker
from mindspeed_rl_plugin.workers.process import LATE, wait_for

GRACE = 0.5  # seconds beyond which an asynchronous call that should have been cancelled is stuck
MOST = 256  # coroutines in the making in a process


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
    environment that is asked; number: in the order of calls; most: of a coroutine: see `CallWorker.next_of`;
    began: when."""

    message: tuple
    owner: Any = None
    home: Home | None = None
    number: int = 0
    most: int = MOST
    began: float = 0.0


class Lost(NamedTuple):
    """Why a call has no answer, and the seconds until then. unmade: its environment could not be made again for it."""

    why: str
    seconds: float
    unmade: bool = False


@dataclass(eq=False)
class Slot:
    """A worker. pid: of its process; homes: the environments in it; waiting: calls of these; closing: keys of those
    that are over."""

    worker: CallWorker
    pid: int
    homes: set[Home] = field(default_factory=set)
    waiting: deque[Call] = field(default_factory=deque)
    closing: deque[int] = field(default_factory=deque)

    @property
    def load(self) -> tuple[int, int]:
        """By which calls are spread: environments, and calls in the making."""
        return len(self.homes), len(self.worker.calls)


class Dispatcher:
    """workers: started already; timeout: seconds of one call; concurrent: names of calls that are coroutines, as
    `Offer` has them. answered: calls that are over, one that was replayed each time."""

    answered = 0

    def __init__(self, workers: Sequence[CallWorker], timeout: float, concurrent: Sequence[str] = ()) -> None:
        self._slots = [Slot(worker, worker.pid) for worker in workers]
        self._timeout, self._concurrent = timeout, {*concurrent, "close"}
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
        while any([self._give_one(slot) for slot in sorted(self._slots, key=lambda slot: slot.load)]):
            pass

    def wait(self, end: float) -> None:
        """Until something is answered, `end` at most, on the monotonic clock."""
        wait_for((slot.worker for slot in self._slots), end)

    def take(self) -> Iterator[tuple[Call, Answer | Lost]]:
        """Calls that are over. Raises EpisodeError where a worker goes on to end before it reads its call."""
        for slot in self._slots:
            try:
                over = slot.worker.answers()
            except EpisodeError:
                self._lose_homes(slot)
                raise
            for call, answer in over:
                if not isinstance(answer, Answer):
                    self._lose_homes(slot)
                if isinstance(answer, int):
                    call.most = answer
                    self._waiting.extendleft([call] if call.owner is not None else ())
                    continue
                self.answered += 1
                lost = isinstance(answer, str) or answer.late
                result = self._lost(call, answer) if lost else self._answered(call, answer)
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
            slot.pid = slot.worker.pid
        return ready

    def _give_one(self, slot: Slot) -> bool:
        """The next call for a worker; whether there was one that it can take."""
        if not slot.worker.calls and not self._ready(slot):
            return False
        waiting = sorted([*slot.waiting, *self._waiting], key=lambda call: call.number)
        waiting = [Call(("close", [*slot.closing]))] if slot.closing else waiting
        call = slot.worker.next_of(waiting, self._most)
        if call is None:
            return False
        calls, message, home, most = 1, self._message(call), call.home, self._most(call)
        if slot.closing:
            calls = len(slot.closing)
            slot.closing.clear()
        else:
            self._queue(call).remove(call)
        if home is not None and home.slot is None:
            home.slot, home.known = slot, 0
            slot.homes.add(home)
        call.began = time.monotonic()
        slot.worker.make(call, message, calls * self._timeout, GRACE, most)
        return True

    def _message(self, call: Call) -> tuple:
        """The next one of a call: the first that its environment has answered, and not yet in its process."""
        home = call.home
        known = 0 if home is None or home.slot is None else home.known
        return call.message if home is None or known == len(home.asked) else home.asked[known][0]

    def _most(self, call: Call) -> int:
        kind, *arguments = self._message(call)
        name = f"{kind} {arguments[-2]}" if kind in ("tool", "method") else kind
        return call.most if name in self._concurrent else 1

    def _answered(self, call: Call, answer: Answer) -> Answer | Lost | None:
        """What comes of a call that was answered; None where an environment was asked once more what it answered
        before."""
        if (home := call.home) is None:
            return answer
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

    def _lost(self, call: Call, answer: str | Answer) -> Lost:
        """What comes of a call whose process ended, or of a coroutine that ran too long: its environment, in which it
        may have done half, is closed."""
        home, why, seconds = call.home, answer, time.monotonic() - call.began
        unmade = home is not None and home.known < len(home.asked)
        if isinstance(answer, Answer):
            why, seconds = f"{LATE} {self._timeout:g} s and was cancelled", answer.seconds
            if home is not None:
                self.close_home(home)
        return Lost(f"{why} when it was replayed" if unmade else why, seconds, unmade)

    def _lose_homes(self, slot: Slot) -> None:
        """The process of a worker ended."""
        for home in slot.homes:
            home.slot = None
        self._waiting.extendleft(reversed(slot.waiting))
        for kept in (slot.homes, slot.waiting, slot.closing):
            kept.clear()

    def _parts(self, slot: Slot, told: set[Slot], end: float) -> bool:
        """Whether a worker still ends its calls, or closes its environments."""
        worker = slot.worker
        if not all([isinstance(answer, Answer) for _, answer in worker.answers()]):
            return False
        if not worker.calls and slot not in told:
            told.add(slot)
            worker.make(None, ("close",), max(end - time.monotonic(), 0.0), 0.0, 1)
        return bool(worker.calls)


def _same(one: Answer, other: Answer) -> bool:
    """Whether two answers agree, in all but time and place."""
    return one._replace(seconds=0.0, error=None) == other._replace(seconds=0.0, error=None)


def _shown(answer: Answer) -> str:
    if answer.brief is not None:
        return answer.brief
    rest = (", over" if answer.done else "") + (f", reward {answer.reward:g}" if answer.reward else "")
    return f"{' '.join(answer.texts) if answer.texts else None!r:.120}{rest}"
