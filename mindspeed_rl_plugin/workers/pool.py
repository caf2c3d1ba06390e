"""A pool of worker processes with one queue, for all kinds of a user's code: graders, tools, environments, parsers.

A process makes one call at a time, or several coroutines together. A call that runs too long, or ends its process, is
lost. If a process ends during several calls, they are made again, fewer at a time, to find the call that ended it.
"""

from __future__ import annotations

import bisect
import itertools
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

from mindspeed_rl_plugin.processes import began, state_of
from mindspeed_rl_plugin.status.status_file import also
from mindspeed_rl_plugin.workers.pool_worker import AGAIN, GRACE, PoolWorker, Session, WorkerCall
from mindspeed_rl_plugin.workers.process import Program, wait_for

CLOSE = "close"  # kind of the message that closes sessions: those of given keys, or all


class WorkerPool:
    """`count` workers of a program, which have all loaded. Not thread-safe.

    setup, loads, wait: as in `Worker`; close_seconds: limit for a session to close. loaded: the program's first answer;
    waiting: calls that have not begun, in order. Raises the program's error if it cannot load.
    """

    def __init__(
        self, program: Program, setup: Any, loads: str, count: int, wait: float, close_seconds: float = 0.0
    ) -> None:
        self._close_seconds = close_seconds
        self.waiting: list[WorkerCall] = []
        self._numbers = itertools.count()
        self.workers = [PoolWorker(program, setup, loads, wait) for _ in range(count)]
        try:
            while not all([worker.ready() for worker in self.workers]):
                self.wait(math.inf)
        except BaseException:
            self.close()
            raise
        self.loaded = self.workers[0].loaded
        also(f"calls {id(self)}", self._told)

    @property
    def unfinished(self) -> Iterator[WorkerCall]:
        """Running calls, then waiting ones."""
        return itertools.chain(*(worker.calls.values() for worker in self.workers), self.waiting)

    def put(self, call: WorkerCall) -> None:
        """Add a call to the queue."""
        call.number = next(self._numbers)
        self.waiting.append(call)

    def put_again(self, call: WorkerCall) -> None:
        """Make an ended call again, at its former place in the queue."""
        bisect.insort(self.waiting, call, key=lambda other: other.number)

    def withdraw(self, call: WorkerCall) -> bool:
        """Remove a call from the queue if it has not begun. Returns whether it was removed."""
        if waits := call in self.waiting:
            self.waiting.remove(call)
        return waits

    def end(self, session: Session) -> None:
        """End a session that has no running call; its process closes it later."""
        if session.worker is not None:
            session.worker.end(session)

    def give(self) -> None:
        """Give calls to workers that can take one; new sessions go to workers with the fewest sessions. Raises the
        program's error if a worker cannot be started again."""
        while any([self._give(worker) for worker in sorted(self.workers, key=lambda worker: worker.load)]):
            pass

    def wait(self, end: float) -> bool:
        """See `wait_for`."""
        return wait_for(self.workers, end)

    def take(self) -> Iterator[tuple[WorkerCall, Any]]:
        """Ended calls, each with its answer (a text for a lost call). Raises as `PoolWorker.answers` does."""
        for worker in self.workers:
            for call, answer in worker.answers():
                if answer is not AGAIN:
                    yield call, answer
                elif call.owner is not None:  # else it is a call to close sessions that the process has lost
                    self.put_again(call)

    def give_up(self) -> None:
        """Drop all calls, also the running ones."""
        self.waiting.clear()
        for worker in self.workers:
            if worker.calls:
                worker.close()
                worker.calls.clear()

    def close(self, seconds: float = 0.0) -> None:
        """Close the sessions, within `seconds`, and end the processes. Idempotent."""
        also(f"calls {id(self)}", None)
        end = time.monotonic() + seconds
        left = [worker for worker in self.workers if worker.sessions or worker.closing]
        told: set[PoolWorker] = set()
        try:
            while left := [worker for worker in left if self._closes(worker, told, end)]:
                if not wait_for(left, end):
                    break
        finally:
            for worker in self.workers:
                worker.close()

    def _told(self) -> Iterator[tuple[str, float]]:
        """For the status of this process: each worker with a call, and the seconds of its oldest call."""
        now = time.monotonic()
        for worker in self.workers:
            if calls := [now - call.began for call in list(worker.calls.values())]:
                how = ", which a signal has stopped" if state_of(worker.pid, began(worker.pid)) == "stopped" else ""
                yield f"{worker.who} (process {worker.pid}){how}, {len(calls)} call{'s' * (len(calls) > 1)}", max(calls)

    def _give(self, worker: PoolWorker) -> bool:
        """Give a worker its next call. Returns whether there was one that it can take."""
        if not worker.calls and not worker.ready():
            return False
        waiting = [self._closing(worker)] if worker.closing else self.waiting
        call = worker.next_of(waiting)
        if call is None:
            return False
        if worker.closing:
            worker.closing.clear()
        else:
            self.waiting.remove(call)
        worker.begin(call)
        return True

    def _closing(self, worker: PoolWorker) -> WorkerCall:
        """The call that closes all ended sessions of a worker; it may run together with any number of calls."""
        seconds, number = len(worker.closing) * self._close_seconds, next(self._numbers)
        message = CLOSE, [*worker.closing]
        return WorkerCall(message, seconds, concurrent=True, most=sys.maxsize, grace=GRACE, number=number)

    def _closes(self, worker: PoolWorker, told: set[PoolWorker], end: float) -> bool:
        """Whether a worker still finishes its calls, or closes its sessions."""
        for _ in worker.answers():
            pass
        if worker.ended:
            return False
        if not worker.calls and worker not in told:
            told.add(worker)
            seconds = max(end - time.monotonic(), 0.0)
            worker.begin(WorkerCall((CLOSE,), seconds, concurrent=False, most=1, number=next(self._numbers)))
        return bool(worker.calls)
