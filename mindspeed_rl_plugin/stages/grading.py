"""Grading in the background: a thread of each rank grades responses as they become ready."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mindspeed_rl_plugin.dock import Lease
from mindspeed_rl_plugin.ranks import Stall
from mindspeed_rl_plugin.reward.batch import Batch
from mindspeed_rl_plugin.stages.reward import Reward

IDLE_SECONDS = 0.5  # time that a lease waits for responses when none is being graded
PACE_SECONDS = 0.05  # shortest pause after a lease that is not full: each lease takes time from the engine
MOST_TIMES = 64  # limit of a lease, in multiples of the rows that keep the graders busy: leaves rows to other ranks
THREAD_STOP_SECONDS = 10.0  # time for the thread to end; it may be in a call of the dock


class GradingThread:
    """Leases ready responses from the state of `stage`, as many as keep the graders busy, and commits their grades. If
    a grader is called with groups, a lease has complete groups.

    stage: of this rank. From `start` to `finish`, `rest` or `stop`, only the thread uses the stage's graders.
    members: rows of a group.
    failed: called in the thread with the error that ended it.
    """

    def __init__(
        self, stage: Reward, members: int, failed: Callable[[BaseException], None] = lambda error: None
    ) -> None:
        self.stage = stage.for_thread()
        self.members = members
        self._leases: dict[Batch, Lease] = {}
        self._stall = Stall(stage.deadline)
        self._again, self._pause = 0.0, PACE_SECONDS  # time of the next lease, and seconds to the one after it
        self._times, self._more = 1, False  # multiple of the rows that keep graders busy; whether more may be ready
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._failed = failed
        self._finishing, self._stopping, self._resting = threading.Event(), threading.Event(), threading.Event()

    def __enter__(self) -> GradingThread:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the thread, if it does not run. Raises as `check` does."""
        self.check()
        if self._thread is not None and self._thread.is_alive():
            return
        self._stall, self._again, self._more = Stall(self.stage.deadline), 0.0, False
        for ending in (self._finishing, self._stopping, self._resting):
            ending.clear()
        self._thread = threading.Thread(target=self._run, name="grader", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error that has ended the thread: RewardError of a grader, or an error of the dock."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Wait until every row of all open epochs is graded, by any rank, and end the thread. Raises as `check`
        does, and TimeoutError if no rank grades a further row within the stage's deadline."""
        self._again = 0.0
        self._end_by(self._finishing)

    def rest(self) -> None:
        """End the thread when all leased rows are graded; `start` starts it again. Raises as `check` does."""
        self._end_by(self._resting)

    def stop(self) -> None:
        """End the thread, and give back rows that are not graded. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(THREAD_STOP_SECONDS)
            self._thread = None

    def _end_by(self, ending: threading.Event) -> None:
        ending.set()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(IDLE_SECONDS)
        self.check()

    def _run(self) -> None:
        try:
            self._work()
            for lease in self._leases.values():  # none, unless the thread was stopped early
                self.stage.dock.release(lease)
        except BaseException as error:  # noqa: BLE001 - raised in the main thread by `check`
            self._failure = error
        finally:
            self._leases.clear()
            self.stage.graders.give_up()
        if self._failure is not None:
            self._failed(self._failure)

    def _work(self) -> None:
        pool = self.stage.graders
        while not self._stopping.is_set():
            busy, now, finishing = bool(self._leases), time.monotonic(), self._finishing.is_set()
            if self._resting.is_set() and not busy:
                return
            due = (now >= self._again or (finishing and not busy)) and not self._resting.is_set()
            if due and pool.wanted and not self._take() and not busy and finishing:
                return  # every row is graded
            if not self._leases:
                self._finishing.wait(min(max(self._again - now, 0.0), PACE_SECONDS))
            for batch in pool.poll(PACE_SECONDS):
                self._commit(batch)

    def _take(self) -> bool:
        """Lease ready responses and begin to grade them. False: the lease is empty; then all rows are graded, unless
        some are being graded here."""
        # A larger lease, if the graders had nothing left to do before it and more rows may be ready.
        self._times = min(4 * self._times, MOST_TIMES) if self._more and not self._leases else 1
        pool, unit = self.stage.graders, self.members if self.stage.spec.whole_groups else 1
        most = pool.most(self.members) // unit * unit  # these are graded in time even if each call reaches its limit
        if self._leases and not most:
            return True
        rows = max(unit, min(self._times * (unit if unit > 1 else pool.wanted), most))
        try:
            lease = self.stage.lease(None, max_rows=rows, deadline=0.0 if self._leases else IDLE_SECONDS)
        except TimeoutError as error:
            if self._finishing.is_set() and self._stall.seen(self.stage.dock.remaining(self.stage.spec.name)):
                limit = f"{self.stage.deadline:g} s (--rl-wait-timeout)"
                raise TimeoutError(f"no response was graded for {limit}: {error}") from error
            return True  # other ranks may still write or grade rows
        if len(lease):
            self._leases[pool.submit(self.stage.items(lease.rows))] = lease
        self._more = len(lease) == rows
        if not self._more:
            self._pause = PACE_SECONDS if len(lease) else min(2 * self._pause, IDLE_SECONDS)
            self._again = time.monotonic() + self._pause
        return len(lease) > 0

    def _commit(self, batch: Batch) -> None:
        lease = self._leases.pop(batch)
        self.stage.commit(lease, self.stage.grades(lease.rows, batch.grades()))
