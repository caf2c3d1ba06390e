"""The first rank of an engine: takes rows, decides turn by turn what all its ranks do, and writes responses."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from mindspeed_rl_plugin.dock import Dock, Lease
from mindspeed_rl_plugin.dock.messages import Announced
from mindspeed_rl_plugin.generators.background_task import BackgroundTask
from mindspeed_rl_plugin.generators.description import Description
from mindspeed_rl_plugin.generators.engine_state import Bound, EngineState
from mindspeed_rl_plugin.rows import Completion, GenerateRequest
from mindspeed_rl_plugin.stages.generate import SPEC, completion_rows, requests_of

LOOK_SECONDS = 1.0  # that an engine without weights waits for news at a time
LEASE_SECONDS = 86400.0  # an engine that is gone is known by its connection, and a long response is no reason
REPORT_SECONDS = 0.5  # between two reports of what was counted
ROWS_SECONDS = 0.25  # that an engine without rows waits for some at a time
EMPTY_SECONDS = 0.02  # before it asks again where all rows are done
Span = tuple[str, float, float]  # what, and from when to when, seconds since 1970
GAP_SECONDS = 0.02  # between two spans of a kind that are one
LONGEST_SECONDS = 4.0  # of one that goes on, before it is told
MOST = 2000  # spans that are kept until they are told; then the oldest are lost


@dataclass(frozen=True)
class Turn:
    """What all ranks of the engine do next. requests: to submit, each with the replica that takes it; pull, apply:
    versions to pull beside the engine's steps, and to put into the engine now, -1 for none; end: whether to leave."""

    requests: tuple[tuple[int, GenerateRequest], ...] = ()
    pull: int = -1
    apply: int = -1
    end: bool = False


@dataclass
class _Row:
    """A leased row. replica: that samples it."""

    lease: Lease
    bound: Bound
    request: GenerateRequest
    replica: int = -1


class Scheduler:
    """slots: responses that a replica samples at once; replicas: engines that share experts, and work for the job as
    one, else 1; share: of each rollout under a strict order, (i, n); leaving: set where the engine is to leave.

    counts: since the engine joined: responses, tokens, seconds of work, seconds without by cause, and what weights
    cost. spans: when that was. announced: the newest weights, as the job has answered last.
    """

    def __init__(
        self,
        dock: Dock,
        job: Description,
        slots: int,
        replicas: int,
        share: tuple[int, int] | None,
        leaving: threading.Event,
    ) -> None:
        self.dock, self.job, self.share, self.leaving = dock, job, share, leaving
        self.replicas = replicas
        self.work = EngineState(slots * replicas, job.inflight == "drain", job.strict)
        self.announced = Announced()
        self.counts: dict[str, float] = {}
        self.spans = Spans()
        self._writing = BackgroundTask("write")
        self._pulled = threading.Event()
        self._began = self._pull_began = time.monotonic()
        self._reported = -REPORT_SECONDS  # at once: who hangs in its first step is known, too

    # a turn

    def next(self) -> Turn:
        """The next turn; waits a moment where there is nothing to do. Raises ConnectionError where the job is lost."""
        try:
            return self._leave() if self.leaving.is_set() or self.dock.ended else self._next()
        except ConnectionError:
            if not self.dock.has_left():
                raise
            return self._leave()

    def _next(self) -> Turn:
        self._report()
        if not self.work.running:
            self._written()
        pulling = self.work.pulling >= 0
        choice = self.work.choose(self.announced.version)
        if choice.apply >= 0:
            return Turn(apply=choice.apply)
        if choice.pull >= 0:
            self._pulled.clear()
            self.work.pull(choice.pull)
            self._pull_began = time.monotonic()
            return Turn(pull=choice.pull)
        if choice.wait:
            self._wait(pulling)
            return Turn()
        rows = self.work.resumed(choice.resume)
        self._deal(rows)
        if choice.take:
            new = self._taken(choice.take, idle=not self.work.running)
            self._deal(new)
            rows += new
        return Turn(tuple((row.replica, row.request) for row in rows))

    def done(self, completions: Iterable[Completion], digest: str | None) -> None:
        """Finished responses go into the dock, beside the engine's next steps. A job that has left needs none."""
        self._written()
        finished: dict[int, list[tuple[_Row, Completion]]] = {}
        for completion in completions:
            row = self.work.running.pop(completion.id)
            self.count("responses", 1)
            self.count("tokens", completion.sampled)
            finished.setdefault(row.lease.token, []).append((row, completion))
        if finished:
            self._writing.begin(partial(self._write, finished.values(), digest, self.work.version))

    def count(self, name: str, value: float) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + value

    def spend(self, what: str, began: float) -> None:
        """The time since `began`, by the clock of `time.monotonic`, went into something."""
        ended = time.monotonic()
        self.count(what, ended - began)
        self.spans.add(what, began, ended)

    def pull_ended(self, version: int) -> None:
        """A pull is over, well or not; called in its thread."""
        self.spans.add("pull", self._pull_began, time.monotonic())
        self.work.pull_ended(version)
        self._pulled.set()

    def applied(self, version: int) -> None:
        self.work.applied(version)

    def missed(self, version: int, error: Exception) -> None:
        """Weights that were wanted are no longer to be had. Raises `error` where rows must be sampled by them, unless
        others have done that while this engine was silent."""
        if any(row.bound.newest == version for row in self.work.running.values()):
            raise error
        if ids := [row.request.id for row in self.work.held if row.bound.newest == version]:
            if self.dock.remaining(SPEC.name, ids):
                raise error
            self.work.held = deque(row for row in self.work.held if row.request.id not in ids)
        self.work.pulled = -1

    # inside

    def _write(self, finished: Iterable[Sequence[tuple[_Row, Completion]]], digest: str | None, version: int) -> None:
        """Rows and their responses, by lease; the version that was in the engine when they were done."""
        for part in finished:
            requests, responses = [row.request for row, _ in part], [completion for _, completion in part]
            # A response of a server may come after newer weights.
            whose = digest if all(response.version == version for response in responses) else None
            self.dock.commit_part(part[0][0].lease, completion_rows(requests, responses, whose))

    def _written(self) -> None:
        """What was done is in the dock. Raises why it is not, unless the job has left."""
        error = self._writing.finish()
        if error is not None and not (isinstance(error, ConnectionError) and self.dock.has_left()):
            raise error

    def _deal(self, rows: Sequence[_Row]) -> None:
        """Each row to the replica with the most free slots."""
        work = Counter(row.replica for row in self.work.running.values())
        for row in rows:
            row.replica = min(range(self.replicas), key=lambda replica: work[replica])
            work[row.replica] += 1
            self.work.running[row.request.id] = row

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported >= REPORT_SECONDS:
            self._reported = now
            counts = {**self.counts, "seconds": now - self._began}
            self.announced = self.dock.exchange.report(counts, self.spans.take(now))
        elif any(row.bound.oldest > self.announced.version for row in self.work.held):  # the job admits, then announces
            self.announced = self.dock.exchange.news(self.announced.number, 0.0)

    def _leave(self) -> Turn:
        """Hand back what is not finished."""
        self._written()
        leases = {row.lease.token: row.lease for row in (*self.work.running.values(), *self.work.held)}
        for lease in leases.values():
            if not self.dock.ended:
                self.dock.release(lease)
        return Turn(end=True)

    def _taken(self, most: int, idle: bool) -> list[_Row]:
        """New rows that these weights may sample; the others are held. idle: whether the engine has nothing to do, and
        waits for some."""
        began = time.monotonic()
        rows = self._whole_share(idle) if self.job.strict else self._leased(most, ROWS_SECONDS if idle else 0.0)
        if not rows and idle:
            if time.monotonic() - began < EMPTY_SECONDS:  # all rows are done: the dock does not wait for more
                time.sleep(EMPTY_SECONDS)
            self.spend("back-pressure", began)
        mine = {row.request.id: row for row in (*self.work.running.values(), *self.work.held)} if rows else {}
        for row in rows:
            if row.request.id in mine:  # the lease before ran out, or was taken back
                mine[row.request.id].lease = row.lease
        return self.work.fitting([row for row in rows if row.request.id not in mine])

    def _leased(self, most: int, deadline: float, **of: object) -> list[_Row]:
        """Rows that are ready; none where there are none within the deadline."""
        try:
            lease = self.dock.lease(SPEC.name, max_rows=most, deadline=deadline, **of)
        except TimeoutError:
            return []
        if not len(lease):
            return []
        requests = requests_of(lease.rows, self.job.sampling, self.job.seed)
        orders = lease.rows["order"][:, :2].tolist()
        return [_Row(lease, Bound(*order), request) for order, request in zip(orders, requests, strict=True)]

    def _whole_share(self, idle: bool) -> list[_Row]:
        """This engine's part of the next rollout, whole, in the order of ids."""
        rows = self._leased(1, ROWS_SECONDS if idle else 0.0, share=self.share)
        if not rows:
            return []
        groups, members = rows[0].lease.rows["order"][0, 2:].tolist()
        part, parts = self.share
        count = (part + 1) * groups * members // parts - part * groups * members // parts
        of, end = {"epoch": rows[0].request.id.epoch, "share": self.share}, time.monotonic() + self.job.deadline
        while len(rows) < count:  # all of it is on its way
            more = self._leased(count - len(rows), end - time.monotonic(), **of)
            if not more and not self.dock.ended and time.monotonic() < end:
                time.sleep(EMPTY_SECONDS)
            elif not more and self.dock.ended:
                return []
            elif not more:
                raise TimeoutError(
                    f"{count - len(rows)} of {count} prompts of rollout {of['epoch']} did not come within "
                    f"{self.job.deadline:g} s (--rl-wait-timeout)"
                )
            rows += more
        return rows

    def _wait(self, pulling: bool) -> None:
        """A moment, for weights: until the pull that is under way ends, or others are announced. Nothing runs."""
        began = time.monotonic()
        if pulling:
            self._pulled.wait(LOOK_SECONDS)
        else:
            self.announced = self.dock.exchange.news(self.announced.number, LOOK_SECONDS)
        self.spend("version", began)


class Spans:
    """When an engine did what, for the job's timeline: few spans, of which neighbours of one kind are one. Filled by
    the threads of an engine, emptied by its reports."""

    def __init__(self) -> None:
        self._since_epoch = time.time() - time.monotonic()
        self._lock = threading.Lock()
        self._going: dict[str, tuple[float, float]] = {}  # what -> the last of its kind, which may go on
        self._over: deque[Span] = deque(maxlen=MOST)

    def add(self, what: str, began: float, ended: float) -> None:
        """A span by the clock of `time.monotonic`."""
        with self._lock:
            first, last = self._going.get(what, (began, began))
            if began - last > GAP_SECONDS:
                self._end(what)
                first = began
            self._going[what] = first, ended
            if ended - first > LONGEST_SECONDS:
                self._end(what)

    def take(self, now: float) -> list[Span]:
        """Those that are over, which are taken away."""
        with self._lock:
            for what in [what for what, (_, last) in self._going.items() if now - last > GAP_SECONDS]:
                self._end(what)
            taken = list(self._over)
            self._over.clear()
        return taken

    def _end(self, what: str) -> None:
        if what in self._going:
            first, last = self._going.pop(what)
            self._over.append((what, first + self._since_epoch, last + self._since_epoch))
