"""Grading beside other stages: a thread of each rank grades groups as they become ready."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from mindspeed_rl_plugin.dock import Lease
from mindspeed_rl_plugin.reward.batch import Batch
from mindspeed_rl_plugin.stages.reward import Reward, grade_rows

IDLE_SECONDS = 0.5  # a lease waits for a group, where nothing is in grading
LOOK_SECONDS = 0.02  # between looks for further groups, where graders are idle
STOP_SECONDS = 10.0  # for the thread to end, beside a call of the dock


@dataclass
class Graded:
    """groups: graded by this rank so far; seconds: with a group in grading."""

    groups: int = 0
    seconds: float = 0.0


class Grader:
    """Leases whole groups from the state of `stage`, whichever are ready, grades many at once, and commits each.

    stage: of this rank; its pool is the thread's from `start` to `finish` or `stop`. members: rows of a group.
    done: what this rank graded so far.
    """

    def __init__(self, stage: Reward, members: int) -> None:
        dock = stage.dock.beside()
        self.stage = Reward(stage.spec, dock, stage.deadline, stage.graders, stage.decode)
        self.members, self.done = members, Graded()
        self._leases: dict[Batch, Lease] = {}
        self._left, self._since = -1, 0.0  # rows that are not graded, and since when they are as many
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._finishing, self._stopping = threading.Event(), threading.Event()

    def __enter__(self) -> Grader:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to grade."""
        self._finishing.clear()
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="grader", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what has ended the thread: RewardError of a grader, errors of the dock."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Wait until every row of all open epochs is graded, on whichever rank, and end. Raises as `check` does; and
        TimeoutError where no further row is graded anywhere within the stage's deadline."""
        self._finishing.set()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(IDLE_SECONDS)
        self.check()

    def stop(self) -> None:
        """End, and hand back what is not graded. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
            self._thread = None

    def _run(self) -> None:
        try:
            self._work()
            for lease in self._leases.values():  # of who stops early
                self.stage.dock.release(lease)
        except BaseException as error:  # noqa: BLE001 - raised in the main thread by `check`
            self._failure = error
        finally:
            self._leases.clear()
            self.stage.graders.give_up()

    def _work(self) -> None:
        pool, last = self.stage.graders, time.monotonic()
        while not self._stopping.is_set():
            busy, now = bool(self._leases), time.monotonic()
            self.done.seconds += now - last if busy else 0.0
            last, hungry = now, pool.hungry
            if hungry and not self._take() and not busy:  # every row is graded
                if self._finishing.is_set():
                    return
                self._stopping.wait(LOOK_SECONDS)
            for batch in pool.poll(LOOK_SECONDS if hungry else IDLE_SECONDS):
                lease = self._leases.pop(batch)
                self.stage.commit(lease, grade_rows(lease.rows.ids, batch.grades()))
                self.done.groups += 1

    def _take(self) -> bool:
        """Begin with a group that is ready. Returns False where there is none; unless some are in grading here, that
        says that all are graded."""
        try:
            deadline = 0.0 if self._leases else IDLE_SECONDS
            lease = self.stage.lease(None, max_rows=self.members, deadline=deadline)
        except TimeoutError as error:
            self._check_progress(str(error))
            return True
        if len(lease):
            self._leases[self.stage.graders.submit(self.stage.items(lease.rows))] = lease
        return len(lease) > 0

    def _check_progress(self, waiting: str) -> None:
        """Raise TimeoutError where this rank only waits, and nobody grades anything, for too long."""
        left, now = self.stage.dock.remaining(self.stage.spec.name), time.monotonic()
        if not self._finishing.is_set() or left != self._left:
            self._left, self._since = left, now
        elif now - self._since > self.stage.deadline:
            raise TimeoutError(f"no group was graded for {self.stage.deadline:g} s (--rl-wait-timeout): {waiting}")
