"""A worker of a pool: what it is asked, and what its process keeps between calls."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_rl_plugin.workers.process import WROTE, Worker

GRACE = 1.0  # seconds beyond its limit after which a call that should have been cancelled is stuck
RESTARTS = 2  # of a worker that ends before it reads its call
CALL_DIVISOR = 16  # by which the number of calls that are made together is divided where their process ended
AGAIN = object()  # in the place of an answer: the call is to be made again


class Session:
    """What a user's code keeps in one process from call to call, which its first call begins. It has one call at a
    time.

    key: names it in messages.
    worker: that has it, None before its first call and after the end of the process.
    """

    _keys = itertools.count()

    def __init__(self) -> None:
        self.key = next(self._keys)
        self.worker: PoolWorker | None = None

    def move(self, worker: PoolWorker | None) -> None:
        """It begins in the process of a worker, or was lost with its process, or is over."""
        self.worker = worker

    def next_for(self, call: WorkerCall) -> WorkerCall:
        """What its process is asked next for the sake of a call: that call, or one that must come before."""
        return call


@dataclass(eq=False)
class WorkerCall:
    """A call of a user's code.

    message: what the process gets.
    seconds: its limit.
    concurrent: whether it is a coroutine's.
    most: of a coroutine: how many may be in the making in a process while this one is.
    owner: who asks; None of a call of the pool's own.
    session: in which it is made.
    grace: seconds beyond the limit until its process is killed, where what is awaited is cancelled at the limit.
    number: in the order of calls.
    began, end: when its process got it, and until when it must answer, on the monotonic clock.
    """

    message: tuple
    seconds: float
    concurrent: bool
    most: int
    owner: Any = None
    session: Session | None = None
    grace: float = 0.0
    number: int = -1
    began: float = 0.0
    end: float = 0.0

    @property
    def next(self) -> WorkerCall:
        """See `Session.next_for`."""
        return self if self.session is None else self.session.next_for(self)

    @property
    def together(self) -> int:
        """How many calls may be in the making in its process, with this one."""
        return self.most if self.next.concurrent else 1


class PoolWorker(Worker):
    """A worker whose process has a `CallLoop`. Its program's answers are (number, answer), the latter a text where a
    coroutine was cancelled at its limit.

    calls: in the making, by their numbers.
    sessions: that its process has.
    closing: keys of sessions that are over, and not closed yet.
    """

    def __init__(self, *given: Any) -> None:
        self.calls: dict[int, WorkerCall] = {}
        self.sessions: set[Session] = set()
        self.closing: list[int] = []
        self._begun, self._most = 0, 1
        super().__init__(*given)

    @property
    def load(self) -> tuple[int, int]:
        """By which calls are spread."""
        return len(self.sessions), len(self.calls)

    def close(self) -> None:
        """End the process group, and with it all sessions. Idempotent."""
        super().close()
        for session in self.sessions:
            session.move(None)
        self.sessions.clear()
        self.closing.clear()

    def end(self, session: Session) -> None:
        """A session of its process is over: it is closed when the worker next gets a call."""
        self.sessions.remove(session)
        self.closing.append(session.key)
        session.move(None)

    def next_of(self, waiting: Sequence[WorkerCall]) -> WorkerCall | None:
        """Which of the calls that wait it takes next, None for none: the first one, if no call is in the making; else
        one that may be made together with those. Before a call that is no coroutine, no more than `_most` of those
        behind it begin."""

        def mine() -> Iterator[WorkerCall]:
            return (c for c in waiting if c.session is None or c.session.worker in (None, self))

        if not self.calls:
            self._begun = 0
            return next(mine(), None)
        if len(self.calls) >= self._most or (self._begun >= self._most and any(c.together == 1 for c in mine())):
            return None
        return next((call for call in mine() if call.together > len(self.calls)), None)

    def begin(self, call: WorkerCall) -> None:
        """Let the process make a call."""
        asked, together, session = call.next, call.together, call.session
        if session is not None and session.worker is None:
            session.move(self)
            self.sessions.add(session)
        self._begun += 1
        self._most = min(together, self._most) if self.calls else together
        self.calls[call.number] = call
        call.began = time.monotonic()
        call.end = call.began + call.seconds + call.grace
        self.call((call.number, asked.message), call.seconds, call.grace)
        self._expect()

    def answers(self) -> Iterator[tuple[WorkerCall, Any]]:
        """Calls that are over, each with its answer: a text where it is lost, AGAIN where it is to be made again.
        A session is over, too, where its call was cancelled: half of what the call does may be done.

        Raises the program's error where the process ends before it reads its call again and again."""
        while self.calls and (answer := self.answer()) is not None:
            if isinstance(answer, str) or answer[0] not in self.calls:
                yield from self._ended(answer)
                continue
            number, value = answer
            call = self.calls.pop(number)
            self._expect()
            if isinstance(value, str) and call.session is not None:
                self.end(call.session)
            yield call, value

    def _ended(self, how: Any) -> Iterator[tuple[WorkerCall, Any]]:
        """What becomes of the calls of a process that ended. how: as messages say it; else an answer that nobody asked
        for."""
        if not isinstance(how, str):
            self.close()
            how = WROTE
        lost = [*self.calls.values()]
        self.calls.clear()
        if self.unread > RESTARTS:
            raise self._program.raises(
                f"{self._program.who} {how} before it read its call, {self.unread} times in a row; look at what "
                f"the files of {self._loads} start when they are imported, and at the machine's free memory"
            )
        again = len(lost) > 1 or self.unread
        for call in lost:
            if again:
                call.most = max(1, len(lost) // CALL_DIVISOR)
            yield call, AGAIN if again else how

    def _expect(self) -> None:
        """Which limit the worker waits for next."""
        first = min(self.calls.values(), key=lambda call: call.end, default=None)
        self.until, self._limit = (None, 0.0) if first is None else (first.end, first.seconds)
