"""Grades responses in worker processes, each call within a time limit, and never silently as 0."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent import futures
from typing import TYPE_CHECKING

from mindspeed_rl_plugin.reward.calling import lacking
from mindspeed_rl_plugin.reward.items import Grade, GradeItem, RewardError
from mindspeed_rl_plugin.reward.process import Worker
from mindspeed_rl_plugin.reward.specs import SHARE_OF_WAIT, check_choices, parse_specs, time_limits

if TYPE_CHECKING:
    from mindspeed_rl_plugin.rows import Prompt

GRACE = 1.0  # seconds beyond which an asynchronous call that should have been cancelled is stuck
CHUNK = 64  # most samples of one job


class RewardPool:
    """Graders by spec, run by `workers` processes, each driven by a thread while a batch is graded.

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
        check_choices(workers, on_error)
        self._specs = parse_specs(specs, regex)
        self._timeouts = time_limits(timeout, len(self._specs), wait_timeout)
        self._wait_timeout, self._limit, self._on_error = wait_timeout, SHARE_OF_WAIT * wait_timeout, on_error
        self.names = tuple(s.name for s in self._specs)
        self.weights = tuple(s.weight for s in self._specs)
        self._failures: dict[str, str] = {}
        self._closed = False
        self._setup = {
            "specs": [(s.name, s.file, s.function, s.given) for s in self._specs],
            "regex": regex,
            "timeouts": self._timeouts,
            "device": device,
        }
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        try:
            self._workers += [Worker(self._setup) for _ in range(workers)]
            for worker in self._workers:
                self._kinds = worker.load(self._limit)
                self._idle.put(worker)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise ValueError(
                    f"a reward worker needs more than {self._limit:g} s to load {', '.join(self.names)}; let their "
                    f"files do less when they are imported, or raise --rl-wait-timeout {wait_timeout:g}, of which the "
                    f"limit is {SHARE_OF_WAIT}"
                ) from None
            if isinstance(error, RewardError):
                raise ValueError(str(error)) from error
            raise

    def check_fields(self, rows: Mapping[str, Set[str]]) -> None:
        """Raises ValueError where a grader cannot be called on some row; rows: place in the data -> its fields."""
        for spec, (_, _, fields) in zip(self._specs, self._kinds, strict=True):
            if problem := lacking(fields, rows):
                raise ValueError(f"reward {spec.given!r} {problem}")

    def try_once(self, prompt: Prompt, where: str, members: int) -> list[str]:
        """Call each grader once on a data row, with its own answer as the response, a batch grader on `members` of
        them; reward models on a device are left out, for they would need its memory before the policy has its own.

        where: the row's place in the data. Returns what failed; under `on_error` "stop" raises ValueError with it.
        """
        from mindspeed_rl_plugin.rows import SampleId

        item = GradeItem(prompt.text, prompt.answer, prompt.answer, prompt.record, SampleId(0, 0, 0), prompt.messages)
        names = [f"{s.file}:{s.function}" if s.function else s.given for s in self._specs]
        batch = _Batch([item] * members, names, self._on_error, f"when it was tried on {where}")
        jobs = [
            (grader, list(range(members if in_batch else 1)))
            for grader, (in_batch, _, _) in enumerate(self._kinds)
            if self._setup["device"] == "cpu" or not self._specs[grader].is_model
        ]
        try:
            self._run(batch, jobs)
        except RewardError as error:
            raise ValueError(str(error)) from error
        return list(batch.failures.values())

    def grade(self, items: Sequence[GradeItem]) -> list[Grade]:
        """Grades in the order of `items`.

        Raises RewardError when a grader fails and `on_error` is "stop", and, whatever `on_error` says, when all of it
        takes longer than other ranks would wait.
        """
        batch = _Batch(items, self.names, self._on_error)
        try:
            self._run(batch, self._jobs(items))
        finally:
            self._failures = batch.failures | self._failures
        return batch.grades(self.weights)

    def take_failures(self) -> dict[str, str]:
        """Grader -> the first of its failures in words, of those that failed since the last call."""
        failures, self._failures = self._failures, {}
        return failures

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._closed = True
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _jobs(self, items: Sequence[GradeItem]) -> Iterator[tuple[int, list[int]]]:
        """(grader, indices of the items of one job). A batch grader gets whole groups; of other synchronous ones there
        are several jobs a worker, so that a slow sample does not hold up its neighbours."""
        everyone = list(range(len(items)))
        groups: dict[tuple[int, int], list[int]] = {}
        for index, item in enumerate(items):
            groups.setdefault((item.id.epoch, item.id.group), []).append(index)
        for grader, (in_batch, asynchronous, _) in enumerate(self._kinds):
            shares = len(self._workers) * (1 if asynchronous else 4)
            size = min(CHUNK, max(1, -(-len(items) // shares)))
            chunks = [everyone[i : i + size] for i in everyone[::size]]
            yield from ((grader, list(chunk)) for chunk in (groups.values() if in_batch else chunks))

    def _run(self, batch: _Batch, jobs: Iterable[tuple[int, list[int]]]) -> None:
        """Have all jobs done, one thread a worker. Raises RewardError for the first failure that stops the run, and
        where all of it takes too long."""
        with self._lock, futures.ThreadPoolExecutor(len(self._workers)) as threads:
            if self._closed:
                raise RewardError("the reward pool is closed")
            running = {threads.submit(self._do, batch, *job): job for job in jobs}
            try:
                done, late = futures.wait(running, self._limit, futures.FIRST_EXCEPTION)
                for job in done:
                    job.result()
                if late:
                    raise RewardError(self._too_late(batch, [running[job] for job in running if job in late]))
            finally:
                batch.stopped = True
                for job in running:
                    job.cancel()
                while futures.wait(running, 0.1).not_done:  # what they would answer belongs to this batch
                    for worker in self._workers:
                        worker.kill()

    def _do(self, batch: _Batch, grader: int, waiting: list[int]) -> None:
        """Have some items graded, each taken off `waiting` then. Where the worker is stuck or dies, who was being
        graded is blamed, and the others are graded by its successor."""
        in_batch, asynchronous, _ = self._kinds[grader]
        seconds, worker, size = self._timeouts[grader], self._idle.get(), len(waiting)
        try:
            while waiting and not batch.stopped:
                items = [batch.texts[index] for index in waiting[:size]]
                try:
                    for value, error in worker.answers(grader, items, seconds + (GRACE if asynchronous else 0.0)):
                        batch.record(waiting.pop(0), grader, value, error)
                except (TimeoutError, EOFError) as end:
                    if batch.stopped:
                        break
                    if asynchronous and not in_batch and len(items) > 1:
                        size = 1  # any of them may have blocked the others: each alone
                        continue
                    long = isinstance(end, TimeoutError)
                    why = f"ran longer than {seconds:g} s and was killed" if long else f"ended its process, which {end}"
                    for _ in range(len(waiting) if in_batch else 1):
                        batch.record(waiting.pop(0), grader, None, why)
        finally:
            if waiting:  # what the worker would still answer belongs to this job
                worker.close()
            self._idle.put(worker)

    def _too_late(self, batch: _Batch, jobs: Sequence[tuple[int, list[int]]]) -> str:
        left = {index for _, waiting in jobs for index in waiting}
        grader, waiting = next((job for job in jobs if job[1]), jobs[0])
        return (
            f"grading took longer than {self._limit:g} s, with {len(left)} of {len(batch.parts)} responses left; "
            f"reward {self.names[grader]!r} was {''.join(map(batch.place, waiting[:1]))}\n"
            f"  (the limit is {SHARE_OF_WAIT} of --rl-wait-timeout {self._wait_timeout:g}, for which other ranks wait; "
            "raise it, add --rl-reward-workers, or lower --rl-reward-timeout "
            f"{' '.join(f'{t:g}' for t in dict.fromkeys(self._timeouts))})"
        )


class _Batch:
    """The results so far of items that are graded. names: of the graders, as errors show them; where: what errors say
    of an item's place, None for its sample. failures: the first of each grader; stopped: nothing more is graded."""

    def __init__(
        self, items: Sequence[GradeItem], names: Sequence[str], on_error: str, where: str | None = None
    ) -> None:
        self._items, self._names, self._on_error, self._where = items, names, on_error, where
        fields = ("prompt", "response", "answer", "messages")
        self.texts = [{name: getattr(i, name) for name in fields} | {"record": dict(i.record)} for i in items]
        self.parts = [[0.0] * len(names) for _ in items]
        self._errors: list[list[str]] = [[] for _ in items]
        self.failures: dict[str, str] = {}
        self.stopped = False

    def record(self, index: int, grader: int, value: float | None, error: str | None) -> None:
        """One grade, or why there is none. Raises RewardError for an error that stops the run."""
        if error is None:
            self.parts[index][grader] = value
            return
        text = f"reward {self._names[grader]!r} {error}\n  {self.place(index)}"
        self.failures.setdefault(self._names[grader], text)
        self._errors[index].append(text)
        if self._on_error == "stop":
            raise RewardError(f"{text}\n  (--rl-reward-on-error zero or drop goes on and counts such samples)")

    def place(self, index: int) -> str:
        """Which item, with its texts."""
        item = self._items[index]
        return (
            f"{self._where or f'on sample {tuple(item.id)}'}, prompt {_shortened(item.prompt)}, "
            f"response {_shortened(item.response)}, answer {_shortened(item.answer)}"
        )

    def grades(self, weights: Sequence[float]) -> list[Grade]:
        """The results, parts weighted into totals."""
        totals = [sum(w * p for w, p in zip(weights, parts, strict=True)) for parts in self.parts]
        return [
            Grade(total, tuple(parts), "\n".join(errors) or None, self._on_error == "drop" and bool(errors))
            for total, parts, errors in zip(totals, self.parts, self._errors, strict=True)
        ]


def _shortened(text: str, limit: int = 160) -> str:
    """Head and tail: the question begins, the answer ends a text."""
    half = limit // 2
    return repr(text if len(text) <= limit else f"{text[:half]} [...] {text[-half:]}")
