"""A worker of a pool, its calls, and its sessions: state that its process keeps between calls."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_rl_plugin.workers.process import WROTE, Worker

GRACE = 1.0  # seconds in which a coroutine that was cancelled at its limit must end; later it counts as hanging
RESTARTS = 2  # how often in a row a process may end before it reads its call
CALL_DIVISOR = 16  # after a process ended during n calls, n / CALL_DIVISOR of them may run together
AGAIN = object()  # instead of an answer: the call must be made again


class Session:
    """State that a user's code keeps in one process between calls. Its first call begins the session; it has one call
    at a time.

    key: its number, in messages.
    worker: its worker, None before the first call and after the end of the session or of its process.
    """

    _keys = itertools.count()

    def __init__(self) -> None:
        self.key = next(self._keys)
        self.worker: PoolWorker | None = None

    def move(self, worker: PoolWorker | None) -> None:
        """Begin the session in a worker's process; None: the session was lost with its process, or has ended."""
        self.worker = worker

    def next_for(self, call: WorkerCall) -> WorkerCall:
        """The next call to its process: `call` itself, or another call that must come before `call`."""
        return call


@dataclass(eq=False)
class WorkerCall:
    """A call of a user's code."""

    message: tuple  # what the process gets
    seconds: float  # its time limit
    concurrent: bool  # whether it is a coroutine
    most: int  # how many coroutines, with this one, may run in the process while it runs
    owner: Any = None  # for the pool's user: where the answer goes; None: the pool itself made the call
    session: Session | None = None  # its session, if any
    grace: float = 0.0  # seconds between the limit, at which a coroutine is cancelled, and the kill of its process
    number: int = -1  # in the order of calls
    began: float = 0.0  # when its process got it, on the monotonic clock
    end: float = 0.0  # deadline of its answer, on the monotonic clock

    @property
    def next(self) -> WorkerCall:
        """See `Session.next_for`."""
        return self if self.session is None else self.session.next_for(self)

    @property
    def together(self) -> int:
        """How many calls may run in its process, with this one."""
        return self.most if self.next.concurrent else 1


class PoolWorker(Worker):
    """A worker whose process has a `CallLoop`. Its program's answers are (number, answer); the answer is a text if a
    coroutine was cancelled at its limit.

    calls: running ones, by number.
    sessions: those in its process.
    closing: keys of sessions that have ended and are not closed yet.
    """

    def __init__(self, *given: Any) -> None:
        self.calls: dict[int, WorkerCall] = {}
        self.sessions: set[Session] = set()
        self.closing: list[int] = []
        self._begun, self._most = 0, 1  # calls begun since no call was running; most that may run together now
        super().__init__(*given)

    @property
    def load(self) -> tuple[int, int]:
        """How busy it is: the least busy worker gets the next call."""
        return len(self.sessions), len(self.calls)

    def close(self) -> None:
        """End the process group, and with it all sessions. Idempotent."""
        super().close()
        for session in self.sessions:
            session.move(None)
        self.sessions.clear()
        self.closing.clear()

    def end(self, session: Session) -> None:
        """End a session of its process: the worker's next call closes it."""
        self.sessions.remove(session)
        self.closing.append(session.key)
        session.move(None)

    def next_of(self, waiting: Sequence[WorkerCall]) -> WorkerCall | None:
        """The waiting call that it takes next, or None. If no call is running, it is the first waiting call, else the
        first that may run together with the running calls. But at most `_most` calls begin before a waiting call that
        must run alone."""

        def mine() -> Iterator[WorkerCall]:
            return (c for c in waiting if c.session is None or c.session.worker in (None, self))

        if not self.calls:
            self._begun = 0
            return next(mine(), None)
        if len(self.calls) >= self._most or (self._begun >= self._most and any(c.together == 1 for c in mine())):
            return None
        return next((call for call in mine() if call.together > len(self.calls)), None)

    def begin(self, call: WorkerCall) -> None:
        """Send a call to the process."""
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
        """Ended calls, each with its answer: a text if the call is lost, AGAIN if it must be made again. If a call was
        cancelled, its session ends too, because the call may have done only a part of its work.

        Raises the program's error if several times in a row the process ends before it reads its call."""
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
        """Answers for the calls of a process that ended. how: how it ended, as a text; any other value is an answer to
        an unknown call, and the process is killed."""
        if not isinstance(how, str):
            self.close()
            how = WROTE
        lost = [*self.calls.values()]
        self.calls.clear()
        if self.unread > RESTARTS:
            raise self._program.raises(
                f"{self._program.who} {how} before it read its call, {self.unread} times in a row; check what "
                f"the files of {self._loads} start when they are imported, and the machine's free memory"
            )
        again = len(lost) > 1 or self.unread
        for call in lost:
            if again:
                call.most = max(1, len(lost) // CALL_DIVISOR)
            yield call, AGAIN if again else how

    def _expect(self) -> None:
        """Set the worker's next deadline."""
        first = min(self.calls.values(), key=lambda call: call.end, default=None)
        self.until, self._limit = (None, 0.0) if first is None else (first.end, first.seconds)
