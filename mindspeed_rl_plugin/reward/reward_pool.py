"""Grades responses in worker processes. Each call has a time limit; an error is never a silent 0."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from mindspeed_rl_plugin.reward.batch import Batch
from mindspeed_rl_plugin.reward.calling import lacking
from mindspeed_rl_plugin.reward.grader_process import Kind
from mindspeed_rl_plugin.reward.items import Grade, GradeItem, GradingTooLate, RewardError
from mindspeed_rl_plugin.reward.specs import parse_specs, time_limits
from mindspeed_rl_plugin.workers.pool import WorkerPool
from mindspeed_rl_plugin.workers.pool_worker import GRACE, WorkerCall
from mindspeed_rl_plugin.workers.process import SHARE_OF_WAIT, Program

if TYPE_CHECKING:
    from mindspeed_rl_plugin.rows import Prompt
    from mindspeed_rl_plugin.workers.child import ValueOrError

MAX_ASYNC_CALLS = 64  # most running calls of asynchronous graders in a worker
WORKER = Program(
    main="mindspeed_rl_plugin.reward.grader_process:main",
    first=tuple[Kind, ...] | None,
    then=tuple[int, list[tuple[float | None, str | None]] | str],
    who="a reward worker",
    raises=RewardError,
)


class RewardPool:
    """Graders in `workers` processes, which make one call at a time, or several asynchronous calls. Not thread-safe.

    `submit` takes a batch of responses, and `poll` returns batches as they are finished. So several batches are graded
    together, and a slow batch does not delay others. `grade` waits for a single batch.

    specs: as in `specs.parse_specs`; `calling.py` defines how a function is called.
    device: of reward models.
    trust_remote_code: whether code of reward models may run.
    regex: pattern of the regex grader.
    timeout: limit of one grading call [seconds], one for all graders or one for each.
    wait_timeout: seconds that other ranks wait for this rank; a batch may take SHARE_OF_WAIT of it, and so may loading.
    on_error: "stop" raises RewardError; "zero" makes the failed part 0.0; "drop" also marks the sample dropped. A
    failure of math, exact or regex is always "zero": ground truths were checked, so the response is the cause.
    names, weights: of the graders, in the order of `Grade.parts`.

    The constructor raises ValueError for invalid arguments, RewardError for graders that cannot be loaded.
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
        trust_remote_code: bool = False,
    ) -> None:
        self._specs = parse_specs(specs, regex)
        self._timeouts = time_limits(timeout, len(self._specs), wait_timeout)
        self._wait_timeout, self._limit, self._on_error = wait_timeout, SHARE_OF_WAIT * wait_timeout, on_error
        self._on_errors = ["zero" if s.compares else on_error for s in self._specs]
        self.names = tuple(s.name for s in self._specs)
        self.weights = tuple(s.weight for s in self._specs)
        self._device = device
        self._failures: dict[str, str] = {}
        self._said: set[str] = set()  # graders (math, exact, regex) whose first failure was returned
        self._closed = False
        self._spent = [0.0, 0.0, 0]  # since `take_seconds`: its two sums, and number of graded responses
        self._batches: dict[Batch, None] = {}  # unfinished ones, in the order of their deadlines
        self._finished: list[Batch] = []
        setup = self._specs, self._timeouts, regex, device, trust_remote_code
        began = time.monotonic()
        self._pool = WorkerPool(WORKER, setup, ", ".join(self.names), workers, wait_timeout)
        self._loading = time.monotonic() - began
        self._kinds: Sequence[Kind] = self._pool.loaded

    def check_fields(self, rows: Mapping[str, Set[str]]) -> None:
        """Raises ValueError if a grader cannot be called for some row; rows: place in the data -> fields."""
        for spec, kind in zip(self._specs, self._kinds, strict=True):
            if problem := lacking(kind.fields, rows):
                raise ValueError(f"reward {spec.given!r} {problem}")

    def try_once(self, prompt: Prompt, where: str, members: int, more: Mapping[str, Any] | None = None) -> list[str]:
        """Call each grader once on a data row, with the row's answer as the response; a batch grader on `members`
        copies. Reward models on an accelerator are not called: they would take its memory before the policy does.

        where: the row's place in the data; more: further fields of the item. Returns the failures; if `on_error` is
        "stop", raises RewardError for the first one.
        """
        from mindspeed_rl_plugin.rows import SampleId

        fields = prompt.text, prompt.answer, prompt.answer, prompt.record, SampleId(0, 0, 0), prompt.messages
        item = GradeItem(*fields, **(more or {}))
        names = [f"{s.file}:{s.function}" if s.function else s.given for s in self._specs]
        on_error = [self._on_error] * len(names)
        batch = Batch([item] * members, names, self.weights, on_error, {}, f"when it was tried on {where}")
        calls = [
            self._call(grader, batch, range(members if kind.batch else 1))
            for grader, kind in enumerate(self._kinds)
            if self._device == "cpu" or not self._specs[grader].is_model
        ]
        self._complete(batch, calls)
        return list(batch.failures.values())

    def grade(self, items: Sequence[GradeItem]) -> list[Grade]:
        """Grades in the order of `items`.

        Raises RewardError if a grader fails and `on_error` is "stop"; with any `on_error`, if the batch takes longer
        than SHARE_OF_WAIT of `wait_timeout`.
        """
        batch = Batch(items, self.names, self.weights, self._on_errors, self._failures)
        self._complete(batch, self._calls(batch))
        return batch.grades()

    def submit(self, items: Sequence[GradeItem]) -> Batch:
        """Begin to grade a batch, which has at least one item; `poll` returns it."""
        batch = Batch(items, self.names, self.weights, self._on_errors, self._failures)
        self._begin(batch, self._calls(batch))
        return batch

    def poll(self, seconds: float) -> list[Batch]:
        """Finished batches of `submit`, each once. Waits at most `seconds` for one if there is none.

        Raises RewardError as `grade` does; then all other batches are dropped, too.
        """
        end = time.monotonic() + seconds
        while self._batches and not self._finished:
            self._turn(end)
            if time.monotonic() >= end:
                break
        finished, self._finished = self._finished, []
        return finished

    def give_up(self) -> None:
        """Drop all batches and their running calls."""
        self._pool.give_up()
        self._batches.clear()
        self._finished.clear()

    @property
    def by_group(self) -> bool:
        """Whether some grader is called with complete groups."""
        return any(kind.batch for kind in self._kinds)

    @property
    def wanted(self) -> int:
        """How many further responses keep the workers busy; a rank that takes only these leaves work to other ranks."""
        together = [1 if k.batch else _together(k) for k in self._kinds]
        waiting = sum(1 / together[_grader(call)] for call in self._pool.waiting)
        return max(0, math.ceil((len(self._pool.workers) - waiting) * min(together)))

    def most(self, members: int) -> int:
        """How many further responses, in groups of `members`, can be graded in time even if each call reaches its limit
        and its process must be started again."""
        costs = [timeout + self._loading for timeout in self._timeouts]
        shares = [members if k.batch else _together(k) for k in self._kinds]
        left = self._limit - sum(costs) * (3 if self._batches else 1)  # other batches come first
        each = sum(cost / share for cost, share in zip(costs, shares, strict=True))
        return max(0, int(len(self._pool.workers) * left / each))

    def take_seconds(self) -> tuple[float, float] | None:
        """Means over the responses graded since this was last called: seconds of all calls for a response; and seconds
        of a worker for it (a call's seconds / its responses / calls that may run together). None without responses."""
        (calls, worker, responses), self._spent = self._spent, [0.0, 0.0, 0]
        return (calls / responses, worker / responses) if responses else None

    def take_failures(self) -> dict[str, str]:
        """Grader -> message of its first failure since `take_failures` was last called. Of math, exact and regex, whose
        failures are caused by responses, only the first failure of each in a run is returned."""
        taken = {name: self._failures.pop(name) for name in list(self._failures)}
        new = {name: text for name, text in taken.items() if name not in self._said}
        self._said |= {spec.name for spec in self._specs if spec.compares and spec.name in taken}
        return new

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._closed = True
        self._pool.close()

    def _calls(self, batch: Batch) -> Iterator[WorkerCall]:
        """The calls for a batch: a batch grader gets a complete group, another grader one item."""
        groups: dict[tuple[int, int], list[int]] = {}
        for index, item in enumerate(batch.items):
            groups.setdefault((item.id.epoch, item.id.group), []).append(index)
        for grader, kind in enumerate(self._kinds):
            cuts = groups.values() if kind.batch else ([i] for i in range(len(batch.items)))
            yield from (self._call(grader, batch, cut) for cut in cuts)

    def _call(self, grader: int, batch: Batch, cut: Sequence[int]) -> WorkerCall:
        """A call of a grader for the items `cut` (indices) of a batch. Its owner is a list of (batch, index)."""
        concurrent = self._kinds[grader].asynchronous
        return WorkerCall(
            (grader, [batch.texts[i] for i in cut]),
            self._timeouts[grader],
            concurrent,
            MAX_ASYNC_CALLS,
            owner=[(batch, i) for i in cut],
            grace=GRACE if concurrent else 0.0,
        )

    def _begin(self, batch: Batch, calls: Iterable[WorkerCall]) -> None:
        if self._closed:
            raise RewardError("the reward pool is closed")
        calls = list(calls)
        batch.left, batch.end = sum(len(call.owner) for call in calls), time.monotonic() + self._limit
        for call in calls:
            self._pool.put(call)
        self._batches[batch] = None

    def _complete(self, batch: Batch, calls: Iterable[WorkerCall]) -> None:
        """Wait for one batch. Raises RewardError for the first failure that stops the run, and if the batch takes too
        long."""
        self._begin(batch, calls)
        while batch.left:
            self._turn(math.inf)
        self._batches.pop(batch, None)
        self._finished = [other for other in self._finished if other is not batch]

    def _turn(self, end: float) -> None:
        """Give calls to idle workers, wait for an answer until `end` at most, and take the answers. After an error no
        call is running."""
        if self._closed:
            raise RewardError("the reward pool is closed")
        first = next(iter(self._batches))  # the one with the earliest deadline
        try:
            self._pool.give()
            self._pool.wait(min(end, first.end))
            if time.monotonic() >= first.end:
                raise GradingTooLate(self._too_late(first))
            for call, outcomes in self._pool.take():
                self._record(call, outcomes)
        except BaseException:
            self.give_up()
            raise

    def _record(self, call: WorkerCall, outcomes: Sequence[ValueOrError] | str) -> None:
        grader, items, took = _grader(call), call.owner, time.monotonic() - call.began
        self._spent[0] += took * len(items)
        self._spent[1] += took / call.together
        if isinstance(outcomes, str):
            outcomes = [(None, outcomes)] * len(items)
        for (batch, index), outcome in zip(items, outcomes, strict=True):
            batch.record(index, grader, *outcome)
        for batch in dict.fromkeys(batch for batch, _ in items):
            if not batch.left:
                self._spent[2] += len(batch.items)
                del self._batches[batch]
                self._finished.append(batch)

    def _too_late(self, batch: Batch) -> str:
        calls = self._pool.unfinished
        left = [(_grader(call), index) for call in calls for whose, index in call.owner if whose is batch]
        grader, index = left[0]
        return (
            f"grading took longer than {self._limit:g} s, with {len({i for _, i in left})} of {len(batch.items)} "
            f"responses left; one missing grade: reward {self.names[grader]!r} {batch.place(index)}\n"
            f"  (the limit is {SHARE_OF_WAIT} of --rl-wait-timeout {self._wait_timeout:g}; raise "
            "that timeout, add --rl-reward-workers, or lower --rl-reward-timeout "
            f"{' '.join(f'{t:g}' for t in dict.fromkeys(self._timeouts))})"
        )


def _grader(call: WorkerCall) -> int:
    return call.message[0]


def _together(kind: Kind) -> int:
    """Most running calls of a grader in a worker."""
    return MAX_ASYNC_CALLS if kind.asynchronous else 1
