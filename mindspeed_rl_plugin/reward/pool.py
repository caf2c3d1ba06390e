"""Grades responses in worker processes, each call within a time limit, and never silently as 0."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING

from mindspeed_rl_plugin.reward.batch import Batch
from mindspeed_rl_plugin.reward.calling import lacking
from mindspeed_rl_plugin.reward.items import Grade, GradeItem, RewardError
from mindspeed_rl_plugin.reward.process import Worker, wait_for
from mindspeed_rl_plugin.reward.specs import SHARE_OF_WAIT, parse_specs, time_limits

if TYPE_CHECKING:
    from mindspeed_rl_plugin.reward.worker import Outcome
    from mindspeed_rl_plugin.rows import Prompt

GRACE = 1.0  # seconds beyond which an asynchronous call that should have been cancelled is stuck
RESTARTS = 2  # of a worker that ends before it reads its call
TOGETHER = 64  # most samples of which an asynchronous grader is called at once
Call = tuple[int, Sequence[int]]  # number of the grader, and of the items


class RewardPool:
    """Graders by spec, run by `workers` processes, one call at a time in each; one thread grades.

    specs: as `specs.parse_specs` takes them; how a function is called says `calling.py`. device: where reward models
    run. regex: pattern of the regex grader. timeout: seconds of one grading call, one for all graders or one for each.
    wait_timeout: seconds that other ranks wait for this one; one `grade`, and loading the graders, may take
    SHARE_OF_WAIT of it. on_error: "stop" raises RewardError; "zero" makes the failed part 0.0; "drop" also marks the
    sample dropped. `names` and `weights`: of the graders, in order of `Grade.parts`.

    Raises ValueError at construction for anything that cannot work, RewardError for graders that do not load.
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
        self._specs = parse_specs(specs, regex)
        self._timeouts = time_limits(timeout, len(self._specs), wait_timeout)
        self._wait_timeout, self._limit, self._on_error = wait_timeout, SHARE_OF_WAIT * wait_timeout, on_error
        self.names = tuple(s.name for s in self._specs)
        self.weights = tuple(s.weight for s in self._specs)
        self._device = device
        self._failures: dict[str, str] = {}
        self._closed = False
        self._workers = [Worker((self._specs, self._timeouts, regex, device)) for _ in range(workers)]
        try:
            self._load()
        except BaseException:
            self.close()
            raise
        self._kinds = self._workers[0].kinds

    def check_fields(self, rows: Mapping[str, Set[str]]) -> None:
        """Raises ValueError where a grader cannot be called on some row; rows: place in the data -> its fields."""
        for spec, kind in zip(self._specs, self._kinds, strict=True):
            if problem := lacking(kind.fields, rows):
                raise ValueError(f"reward {spec.given!r} {problem}")

    def try_once(self, prompt: Prompt, where: str, members: int) -> list[str]:
        """Call each grader once on a data row, with its own answer as the response, a batch grader on `members` of
        them; reward models on a device are left out, for they would need its memory before the policy has its own.

        where: the row's place in the data. Returns what failed; under `on_error` "stop" raises RewardError with it.
        """
        from mindspeed_rl_plugin.rows import SampleId

        item = GradeItem(prompt.text, prompt.answer, prompt.answer, prompt.record, SampleId(0, 0, 0), prompt.messages)
        names = [f"{s.file}:{s.function}" if s.function else s.given for s in self._specs]
        batch = Batch([item] * members, names, self._on_error, f"when it was tried on {where}")
        calls = [
            (grader, range(members if kind.batch else 1))
            for grader, kind in enumerate(self._kinds)
            if self._device == "cpu" or not self._specs[grader].is_model
        ]
        self._run(batch, calls)
        return list(batch.failures.values())

    def grade(self, items: Sequence[GradeItem]) -> list[Grade]:
        """Grades in the order of `items`.

        Raises RewardError when a grader fails and `on_error` is "stop", and, whatever `on_error` says, when all of it
        takes longer than other ranks would wait.
        """
        batch = Batch(items, self.names, self._on_error)
        try:
            self._run(batch, self._calls(items))
        finally:
            self._failures = batch.failures | self._failures
        return batch.grades(self.weights)

    def take_failures(self) -> dict[str, str]:
        """Grader -> the first of its failures as a message, of those that failed since the last call."""
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

    def _load(self) -> None:
        end = time.monotonic() + self._limit
        while not all([worker.ready() for worker in self._workers]):
            if not wait_for(self._workers, end):
                raise RewardError(
                    f"a reward worker needs more than {self._limit:g} s to load {', '.join(self.names)}; let their "
                    "files do less when they are imported, or raise --rl-wait-timeout "
                    f"{self._wait_timeout:g}, of which the limit is {SHARE_OF_WAIT}"
                )

    def _calls(self, items: Sequence[GradeItem]) -> Iterator[Call]:
        """A batch grader is called with whole groups, an asynchronous one with many items, others with one."""
        every = range(len(items))
        groups: dict[tuple[int, int], list[int]] = {}
        for index, item in enumerate(items):
            groups.setdefault((item.id.epoch, item.id.group), []).append(index)
        together = min(TOGETHER, max(1, -(-len(items) // len(self._workers))))
        for grader, kind in enumerate(self._kinds):
            size = together if kind.asynchronous else 1
            cuts = groups.values() if kind.batch else (every[i : i + size] for i in every[::size])
            yield from ((grader, cut) for cut in cuts)

    def _run(self, batch: Batch, calls: Iterable[Call]) -> None:
        """Make all calls. Raises RewardError for the first failure that stops the run, and where all of it takes too
        long; no call is left in a worker."""
        if self._closed:
            raise RewardError("the reward pool is closed")
        end, waiting = time.monotonic() + self._limit, deque(calls)
        running: dict[Worker, Call] = {}
        try:
            while waiting or running:
                for worker in self._workers:
                    if worker.ready() and waiting:
                        running[worker] = grader, indices = waiting.popleft()
                        grace = GRACE if self._kinds[grader].asynchronous else 0.0
                        worker.call(grader, [batch.texts[i] for i in indices], self._timeouts[grader], grace)
                if not wait_for(self._workers, end):
                    raise RewardError(self._too_late(batch, [*running.values(), *waiting]))
                for worker, call in [*running.items()]:
                    if (outcomes := worker.answer()) is not None:
                        del running[worker]
                        again = [call] if self._unread(worker, outcomes) else self._record(batch, *call, outcomes)
                        waiting.extendleft(again)
        finally:
            for worker in running:
                worker.close()

    def _unread(self, worker: Worker, outcomes: Sequence[Outcome] | str) -> bool:
        """Whether the worker ended before it read its call, which is no sample's fault. Raises RewardError where it
        goes on doing so."""
        if worker.unread > RESTARTS:
            raise RewardError(
                f"a reward worker {outcomes} before it read its call, {worker.unread} times in a row; look at what the "
                f"files of {', '.join(self.names)} start when they are imported, and at the machine's free memory"
            )
        return worker.unread > 0

    def _record(
        self, batch: Batch, grader: int, indices: Sequence[int], outcomes: Sequence[Outcome] | str
    ) -> Iterable[Call]:
        """Note what came of a call. Returns those to make in its place, where one of its items blocked the others."""
        if isinstance(outcomes, str):
            kind = self._kinds[grader]
            if kind.asynchronous and not kind.batch and len(indices) > 1:
                return [(grader, [index]) for index in indices]
            outcomes = [(None, outcomes)] * len(indices)
        for index, outcome in zip(indices, outcomes, strict=True):
            batch.record(index, grader, *outcome)
        return ()

    def _too_late(self, batch: Batch, calls: Sequence[Call]) -> str:
        left = {index for _, indices in calls for index in indices}
        grader, indices = calls[0]
        return (
            f"grading took longer than {self._limit:g} s, with {len(left)} of {len(batch.texts)} responses left; "
            f"reward {self.names[grader]!r} was {batch.place(indices[0])}\n"
            f"  (the limit is {SHARE_OF_WAIT} of --rl-wait-timeout {self._wait_timeout:g}, for which other ranks wait; "
            "raise it, add --rl-reward-workers, or lower --rl-reward-timeout "
            f"{' '.join(f'{t:g}' for t in dict.fromkeys(self._timeouts))})"
        )
