"""The first rank of an engine: decides what all its ranks do next, leases rows, and writes responses."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from mindspeed_rl_plugin.dock import Lease, Rows, VersionBound
from mindspeed_rl_plugin.generators.description import Description
from mindspeed_rl_plugin.generators.engine_state import Action, EngineState, choose
from mindspeed_rl_plugin.processes import in_background
from mindspeed_rl_plugin.rows import Completion, GenerateRequest
from mindspeed_rl_plugin.service.guest_dock import GuestDock
from mindspeed_rl_plugin.service.notes import Announced
from mindspeed_rl_plugin.stages.generate import SPEC, completion_rows, requests_of

NEWS_SECONDS = 1.0  # longest single wait for weights
LEASE_SECONDS = 86400.0  # long: a lost engine is noticed by its connection, and a response may take long
REPORT_SECONDS = 0.5  # between two reports of counts
ROWS_SECONDS = 0.25  # longest single wait for rows
EMPTY_SECONDS = 0.02  # pause before the next question for rows if the dock has given none and did not wait
Span = tuple[str, float, float]  # (what, begin, end), seconds since 1970
GAP_SECONDS = 0.02  # most time between two spans of one kind that are joined
LONGEST_SECONDS = 4.0  # a span that has lasted longer is reported, and its rest is a new span
MOST = 2000  # most spans that wait to be reported; above it the oldest are lost


@dataclass
class _Leased:
    """A leased row."""

    lease: Lease
    bound: VersionBound
    request: GenerateRequest
    replica: int = -1  # the replica that samples it


class Scheduler:
    """slots: most responses that a replica samples at once.
    replicas: number of engines that share experts and work as one; 1: the engine shares none.
    share: (i, n): under a strict order this engine samples part i of n of each rollout.
    leaving: set when the engine must leave.
    counts: since the engine joined: responses, tokens, seconds of work, idle seconds by cause, and costs of weights.
    spans: when the engine worked, had no work, or pulled.
    """

    def __init__(
        self,
        dock: GuestDock,
        job: Description,
        slots: int,
        replicas: int,
        share: tuple[int, int] | None,
        leaving: threading.Event,
    ) -> None:
        self.dock, self.job, self.share, self.leaving = dock, job, share, leaving
        self.replicas = replicas
        self.state = EngineState(slots * replicas, job.inflight == "drain", job.strict)
        self.counts: dict[str, float] = {}
        self.spans = Spans()
        self._lost: tuple[int, Exception | None] = (-1, None)  # wanted version that was overwritten, and the error
        self._writing: Future[None] | None = None
        self._pulled = threading.Event()
        self._began = self._pull_began = time.monotonic()
        self._reported = -REPORT_SECONDS  # so that it reports before the first step, and a hang there is noticed
        self._news = 0  # number of the last announcement

    # what comes next

    def next(self) -> Action:
        """What all ranks do next; waits a moment if there is no work. Raises ConnectionError if the job is lost."""
        try:
            return self._leave() if self.leaving.is_set() or self.dock.ended else self._next()
        except ConnectionError:
            if not self.dock.has_left():
                raise
            return self._leave()

    def _next(self) -> Action:
        self._report()
        if not self.state.running:
            self._written()
        now = replace(self.state)  # a pull may end meanwhile
        action = choose(now)
        if action.pull >= 0:
            self._pulled.clear()
            self.state.pull_begins(action.pull)
            self._pull_began = time.monotonic()
        elif action.wait:
            self._wait(pulling=now.pulling >= 0)
        elif action.take:
            return action._replace(requests=self._take(action.take))
        return action

    def done(self, completions: Iterable[Completion], digest: str | None) -> None:
        """Begin to write finished responses into the dock; this continues during the engine's next steps."""
        self._written()
        finished: dict[int, list[tuple[_Leased, Completion]]] = {}
        for completion in completions:
            row = self.state.running.pop(completion.id)
            self.count("responses", 1)
            self.count("tokens", completion.sampled)
            finished.setdefault(row.lease.token, []).append((row, completion))
        if finished:
            self._writing = in_background("write", partial(self._write, finished.values(), digest, self.state.version))

    def count(self, name: str, value: float) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + value

    def spend(self, what: str, began: float) -> None:
        """Count the time since `began`, by `time.monotonic`, under a name."""
        ended = time.monotonic()
        self.count(what, ended - began)
        self.spans.add(what, began, ended)

    def pull_ended(self, version: int) -> None:
        """Note that a pull has ended, maybe with an error; called in the thread of the pull."""
        self.spans.add("pull", self._pull_began, time.monotonic())
        self.state.pull_ended(version)
        self._pulled.set()

    def missed(self, version: int, error: Exception) -> None:
        """Note that wanted weights were overwritten. `next` raises `error` if the next rows allow no other weights."""
        self.state.pulled, self.state.needs, self._lost = -1, None, (version, error)

    # inside

    def _write(self, finished: Iterable[list[tuple[_Leased, Completion]]], digest: str | None, version: int) -> None:
        """Write rows and their responses, by lease. version: of the engine's weights when they finished."""
        for part in finished:
            requests, responses = [row.request for row, _ in part], [completion for _, completion in part]
            # A server's response may arrive when the engine already has newer weights.
            whose = digest if all(response.version == version for response in responses) else None
            self.dock.commit_part(part[0][0].lease, completion_rows(requests, responses, whose))

    def _written(self) -> None:
        """Wait until finished responses are in the dock. Raises the error of the write, unless the job has left."""
        error = self._writing and self._writing.exception()
        if error is not None and not (isinstance(error, ConnectionError) and self.dock.has_left()):
            raise error

    def _report(self) -> None:
        now, needs = time.monotonic(), self.state.needs
        if now - self._reported >= REPORT_SECONDS:
            self._reported = now
            counts = {**self.counts, "seconds": now - self._began, "weights": float(self.state.version)}
            self._hear(self.dock.report(counts, self.spans.take(now)))
        elif needs is not None and needs.oldest > self.state.announced:  # rows may need weights announced just now
            self._hear(self.dock.news(self._news, 0.0))

    def _hear(self, announced: Announced) -> None:
        """Store the job's last answer about the newest weights."""
        self._news, self.state.announced = announced.number, announced.version

    def _leave(self) -> Action:
        """Give back unfinished rows."""
        self._written()
        leases = {row.lease.token: row.lease for row in self.state.running.values()}
        for lease in leases.values():
            if not self.dock.ended:
                self.dock.release(lease)
        return Action(end=True)

    def _take(self, most: int) -> tuple[tuple[int, GenerateRequest], ...]:
        """(replica, request) of new rows that these weights may sample; the replica has the most free slots."""
        running, began = self.state.running, time.monotonic()
        lease = self._leased(most, 0.0 if running else ROWS_SECONDS)
        self.state.needs = lease.needs
        lost, error = self._lost
        if error is not None and lease.needs is not None and lease.needs.newest == lost:
            raise error
        if not running and not len(lease) and lease.needs is None:
            if time.monotonic() - began < EMPTY_SECONDS:  # without a wait: the job has left the dock
                time.sleep(EMPTY_SECONDS)
            self.spend("back-pressure", began)
        requests = requests_of(lease.rows, self.job.sampling, self.job.seed)
        new, busy = [], Counter(row.replica for row in running.values())
        for request in requests:
            if request.id in running:  # the earlier lease of this row has expired, or the job has ended it
                running[request.id].lease = lease
                continue
            replica = min(range(self.replicas), key=lambda replica: busy[replica])
            busy[replica] += 1
            running[request.id] = _Leased(lease, self.dock.version_bound(request.id.epoch), request, replica)
            new.append((replica, request))
        return tuple(new)

    def _leased(self, most: int, deadline: float) -> Lease:
        """Lease ready rows; under a strict order this engine's share of a rollout. Empty if none are ready within the
        deadline."""
        part = {"share": self.share} if self.job.strict else {"max_rows": most}
        try:
            return self.dock.lease(SPEC.name, deadline=deadline, version=self.state.version, **part)
        except TimeoutError:
            return Lease(0, SPEC.name, Rows((), {}))

    def _wait(self, pulling: bool) -> None:
        """Wait a moment for the running pull's end, or for newer weights. Meanwhile no response is sampled."""
        began = time.monotonic()
        if pulling:
            self._pulled.wait(NEWS_SECONDS)
        else:
            self._hear(self.dock.news(self._news, NEWS_SECONDS))
        self.state.needs = None  # other engines may have taken those rows
        self.spend("version", began)


class Spans:
    """Spans of time; spans of one kind are joined if they follow each other closely. Threads may share it."""

    def __init__(self) -> None:
        self._since_epoch = time.time() - time.monotonic()
        self._lock = threading.Lock()
        self._going: dict[str, tuple[float, float]] = {}  # what -> the last span of its kind, which may continue
        self._over: deque[Span] = deque(maxlen=MOST)

    def add(self, what: str, began: float, ended: float) -> None:
        """Add a span, by the clock of `time.monotonic`."""
        with self._lock:
            first, last = self._going.get(what, (began, began))
            if began - last > GAP_SECONDS:
                self._end(what)
                first = began
            self._going[what] = first, ended
            if ended - first > LONGEST_SECONDS:
                self._end(what)

    def take(self, now: float) -> list[Span]:
        """Return and remove the spans that have ended."""
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
