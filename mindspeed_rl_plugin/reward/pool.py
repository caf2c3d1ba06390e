"""Grades responses in worker processes, each call within a time limit, and never silently as 0."""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from mindspeed_rl_plugin.reward.calling import lacking
from mindspeed_rl_plugin.reward.items import Grade, GradeItem, RewardError
from mindspeed_rl_plugin.reward.process import WorkerProcess, ready
from mindspeed_rl_plugin.reward.specs import ON_ERROR, parse_specs, time_limits

GRACE = 1.0  # seconds beyond which an asynchronous call that should have been cancelled is stuck
TICK = 1.0  # longest sleep between looks at the workers
CHUNK = 64  # most samples of one job
ATTEMPTS = 3  # of a job whose worker died before it took it
SHARE_OF_WAIT = 0.9  # of the ranks' patience with each other that grading may take, so that its own error comes first


@dataclass
class _Job:
    """Samples (indices into the batch) for one grader; `waiting`: not yet answered; `began`: a worker took it."""

    grader: int
    waiting: list[int]
    indices: tuple[int, ...] = ()
    attempts: int = 0
    began: bool = False

    def __post_init__(self) -> None:
        self.indices = tuple(self.waiting)


@dataclass
class _Slot:
    """Place of one worker; `deadline` is that of its start or of its running call."""

    worker: WorkerProcess
    deadline: float
    ready: bool = False
    job: _Job | None = None


class RewardPool:
    """Graders by spec, run by `workers` processes.

    specs: as `specs.parse_specs` takes them; how a function is called says `calling.py`. device: where reward models
    run. regex: pattern of the regex grader. timeout: seconds of one grading call, one for all graders or one for each.
    wait_timeout: seconds that other ranks wait for this one; one `grade`, and loading the graders, may take
    SHARE_OF_WAIT of it. on_error: "stop" raises RewardError; "zero" makes the failed part 0.0; "drop" also marks the
    sample dropped. `names` and `weights`: of the graders, in order of `Grade.parts`.

    Raises ValueError at construction for anything that cannot work: the graders are loaded before it returns.
    """

    def __init__(
        self,
        specs: Sequence[str],
        *,
        regex: str | None = None,
        timeout: float | Sequence[float] = 10.0,
        wait_timeout: float = 1800.0,
        workers: int = 2,
        on_error: str = "stop",
        device: str = "cpu",
    ) -> None:
        if workers < 1:
            raise ValueError(f"rewards need at least 1 worker, got {workers}")
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error {on_error!r} is unknown; known: {', '.join(ON_ERROR)}")
        self._specs = parse_specs(specs, regex)
        self._timeouts = time_limits(timeout, len(self._specs))
        self._limit = SHARE_OF_WAIT * wait_timeout
        if max(self._timeouts) > self._limit:
            raise ValueError(
                f"one grading call may take {max(self._timeouts):g} s (--rl-reward-timeout), all of a rank "
                f"{self._limit:g} s ({SHARE_OF_WAIT} of --rl-wait-timeout {wait_timeout:g}); lower the first or raise "
                "the second"
            )
        self._wait_timeout, self._on_error = wait_timeout, on_error
        self.names = tuple(s.name for s in self._specs)
        self.weights = tuple(s.weight for s in self._specs)
        self._failures: dict[str, str] = {}
        self._setup = {
            "specs": [[s.name, s.file, s.function, s.given] for s in self._specs],
            "regex": regex,
            "timeouts": self._timeouts,
            "device": device,
        }
        self._modes: list[tuple[bool, bool]] = []
        self._fields: list[list[str]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._slots: list[_Slot] = []
        try:
            self._slots += [self._start() for _ in range(workers)]
            while not all(s.ready for s in self._slots):
                self._wait()
                for slot in self._slots:
                    self._load(slot)
        except RewardError as error:
            self.close()
            raise ValueError(str(error)) from error
        except BaseException:
            self.close()
            raise

    def check_fields(self, rows: Mapping[str, Set[str]]) -> None:
        """Raises ValueError where a grader cannot be called on some row; rows: place in the data -> its fields."""
        for spec, fields in zip(self._specs, self._fields, strict=True):
            if problem := lacking(fields, rows):
                raise ValueError(f"reward {spec.given!r} {problem}")

    def grade(self, items: Sequence[GradeItem]) -> list[Grade]:
        """Grades in the order of `items`.

        Raises RewardError when a grader fails and `on_error` is "stop", and, whatever `on_error` says, when all of it
        takes longer than other ranks would wait.
        """
        with self._lock:
            if self._closed:
                raise RewardError("the reward pool is closed")
            self._slots = [self._start() if s.worker.closed else s for s in self._slots]
            batch = _Batch(self, items)
            try:
                while batch.jobs or any(s.job for s in self._slots):
                    self._check_time(batch)
                    self._assign(batch)
                    self._wait()
                    for slot in self._slots:
                        self._collect(slot, batch)
            finally:
                for slot in self._slots:  # after an error; what they would answer belongs to this batch
                    if slot.job is not None:
                        slot.worker.kill()
                        slot.job = None
            return batch.grades()

    def take_failures(self) -> dict[str, str]:
        """Grader -> the first of its failures in words, of those that failed since the last call."""
        found, self._failures = self._failures, {}
        return found

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._closed = True
        for slot in self._slots:
            slot.worker.kill()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # workers

    def _start(self) -> _Slot:
        return _Slot(WorkerProcess(self._setup), time.monotonic() + self._limit)

    def _wait(self) -> None:
        """Sleep until a worker has something to say, or the nearest deadline."""
        left = min((s.deadline for s in self._slots if s.job or not s.ready), default=0.0) - time.monotonic()
        busy = [s.worker.fileno() for s in self._slots if s.job or not s.ready]
        ready(busy, select.POLLIN, min(left, TICK))

    def _check_time(self, batch: _Batch) -> None:
        """Raise RewardError once the batch has taken longer than the limit of one `grade`."""
        if time.monotonic() < batch.deadline:
            return
        jobs = [s.job for s in self._slots if s.job is not None] + list(batch.jobs)
        left = {index for job in jobs for index in job.waiting}
        raise RewardError(
            f"grading took longer than {self._limit:g} s, with {len(left)} of {len(batch.parts)} responses left; "
            f"reward {self.names[jobs[0].grader]!r} was {batch.where(jobs[0].waiting[0])}\n"
            f"  (the limit is {SHARE_OF_WAIT} of --rl-wait-timeout {self._wait_timeout:g}, for which other ranks wait; "
            f"raise it, add --rl-reward-workers, or lower --rl-reward-timeout {self._shown_timeouts()})"
        )

    def _shown_timeouts(self) -> str:
        return " ".join(f"{t:g}" for t in dict.fromkeys(self._timeouts))

    def _load(self, slot: _Slot) -> None:
        """Take the first line of a worker. Raises RewardError when it could not load its graders."""
        if slot.ready:
            return
        lines, alive = slot.worker.receive()
        if lines and "failed" in lines[0]:
            raise RewardError(lines[0]["failed"])
        if lines:
            self._modes = [(batch, asynchronous) for batch, asynchronous, _ in lines[0]["ready"]]
            self._fields = [fields for *_, fields in lines[0]["ready"]]
            slot.ready = True
        elif not alive:
            raise RewardError(f"a reward worker {slot.worker.kill()} while it loaded {', '.join(self.names)}")
        elif time.monotonic() > slot.deadline:
            raise RewardError(
                f"a reward worker needs more than {self._limit:g} s to load {', '.join(self.names)}; let their files "
                f"do less when they are imported, or raise --rl-wait-timeout {self._wait_timeout:g}, of which the "
                f"limit is {SHARE_OF_WAIT}"
            )

    def _assign(self, batch: _Batch) -> None:
        for slot in list(self._slots):
            if not batch.jobs or not slot.ready or slot.job is not None:
                continue
            slot.job, slot.deadline = batch.jobs.popleft(), batch.deadline
            message = {"grader": slot.job.grader, "items": [batch.texts[i] for i in slot.job.indices]}
            if not slot.worker.send(message, max(0.0, batch.deadline - time.monotonic())):
                self._lost(slot, batch, None)

    def _collect(self, slot: _Slot, batch: _Batch) -> None:
        if not slot.ready:
            self._load(slot)
            return
        job = slot.job
        if job is None:
            return
        lines, alive = slot.worker.receive()
        asynchronous, timeout = self._modes[job.grader][1], self._timeouts[job.grader]
        for line in lines:
            if "began" in line or not asynchronous:
                slot.deadline = time.monotonic() + timeout + (GRACE if asynchronous else 0.0)
            if "began" in line:
                job.began = True
                continue
            index = job.indices[line["at"]]
            job.waiting.remove(index)
            if "error" in line:
                batch.fail(index, job.grader, line["error"])
            else:
                batch.parts[index][job.grader] = line["value"]
        if not job.waiting:
            slot.job = None
        elif not alive or not slot.worker.running:
            self._lost(slot, batch, None)
        elif not lines and time.monotonic() > slot.deadline:
            self._lost(slot, batch, f"ran longer than {timeout:g} s and was killed")

    def _lost(self, slot: _Slot, batch: _Batch, why: str | None) -> None:
        """A worker died, or was stuck, in the middle of a job: blame who was being graded, do the others again."""
        job, end = slot.job, slot.worker.kill()
        assert job is not None
        in_batch, asynchronous = self._modes[job.grader]
        if not job.began:  # nobody's fault, unless it happens again and again
            job.attempts += 1
            if job.attempts == ATTEMPTS:
                raise RewardError(f"reward workers end before they take a job; the last one {end}")
            blamed, again = [], [job]
        elif in_batch:
            blamed, again = job.waiting, []
        elif asynchronous and len(job.waiting) > 1:  # any of them may have blocked the others: each alone
            blamed, again = [], [_Job(job.grader, [i]) for i in job.waiting]
        else:
            blamed, again = job.waiting[:1], [_Job(job.grader, job.waiting[1:])] if job.waiting[1:] else []
        for index in blamed:
            batch.fail(index, job.grader, why or f"ended its process, which {end}")
        batch.jobs.extend(again)
        self._slots[self._slots.index(slot)] = self._start()


class _Batch:
    """One call of `grade`: the jobs left and the results so far."""

    def __init__(self, pool: RewardPool, items: Sequence[GradeItem]) -> None:
        self._pool, self._items = pool, items
        self.deadline = time.monotonic() + pool._limit
        self.texts = [
            {
                "prompt": i.prompt,
                "response": i.response,
                "answer": i.answer,
                "record": dict(i.record),
                "messages": i.messages,
            }
            for i in items
        ]
        self.parts = [[0.0] * len(pool.names) for _ in items]
        self._errors: list[str | None] = [None] * len(items)
        self.jobs = deque(
            _Job(grader, chunk) for grader, mode in enumerate(pool._modes) for chunk in self._chunks(*mode)
        )

    def _chunks(self, in_batch: bool, asynchronous: bool) -> list[list[int]]:
        if in_batch:
            groups: dict[tuple[int, int], list[int]] = {}
            for index, item in enumerate(self._items):
                groups.setdefault((item.id.epoch, item.id.group), []).append(index)
            return list(groups.values())
        # Synchronous ones in several jobs a worker, so that a slow sample does not hold up its neighbours.
        shares = len(self._pool._slots) * (1 if asynchronous else 4)
        size = min(CHUNK, max(1, -(-len(self._items) // shares)))
        indices = list(range(len(self._items)))
        return [indices[i : i + size] for i in range(0, len(indices), size)]

    def fail(self, index: int, grader: int, why: str) -> None:
        """Record a failure; raises RewardError when it stops the run."""
        name = self._pool.names[grader]
        text = f"reward {name!r} {why}\n  {self.where(index)}"
        self._pool._failures.setdefault(name, text)
        if self._pool._on_error == "stop":
            raise RewardError(f"{text}\n  (--rl-reward-on-error zero or drop goes on and counts such samples)")
        self._errors[index] = text if self._errors[index] is None else f"{self._errors[index]}\n{text}"

    def where(self, index: int) -> str:
        """The sample in words."""
        item = self._items[index]
        return (
            f"on sample {tuple(item.id)}, prompt {_shortened(item.prompt)}, "
            f"response {_shortened(item.response)}, answer {_shortened(item.answer)}"
        )

    def grades(self) -> list[Grade]:
        """The results, parts weighted into totals."""
        weights = self._pool.weights
        drop = self._pool._on_error == "drop"
        return [
            Grade(sum(w * p for w, p in zip(weights, parts, strict=True)), tuple(parts), error, drop and bool(error))
            for parts, error in zip(self.parts, self._errors, strict=True)
        ]


def _shortened(text: str, limit: int = 160) -> str:
    """Head and tail: the question begins, the answer ends a text."""
    half = limit // 2
    return repr(text if len(text) <= limit else f"{text[:half]} [...] {text[-half:]}")
