"""Grades responses in worker processes, each call within a time limit, and never silently as 0."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mindspeed_rl_plugin.reward.calling import lacking
from mindspeed_rl_plugin.reward.items import Grade, GradeItem, RewardError, opening
from mindspeed_rl_plugin.reward.specs import parse_specs, time_limits
from mindspeed_rl_plugin.reward.worker import Kind
from mindspeed_rl_plugin.workers.calls import CallWorker, load_all
from mindspeed_rl_plugin.workers.process import LATE, SHARE_OF_WAIT, Program, wait_for

if TYPE_CHECKING:
    from mindspeed_rl_plugin.rows import Prompt
    from mindspeed_rl_plugin.workers.child import Outcome

GRACE = 1.0  # seconds beyond which an asynchronous call that should have been cancelled is stuck
TOGETHER = 64  # most calls of asynchronous graders that are in the making in a worker
WORKER = Program(
    main="mindspeed_rl_plugin.reward.worker:main",
    first=tuple[Kind, ...],
    then=tuple[int, list[tuple[float | None, str | None]]],
    who="a reward worker",
    raises=RewardError,
)


class Batch:
    """Items, and the results so far. names: of the graders, as errors show them; weights, on_error: of the graders;
    failures: where the first of each grader is noted; where: what errors say of an item's place, None for its sample.

    texts: what workers get of each item; left: grades that are missing; end: until when all must be there, on the
    monotonic clock.
    """

    def __init__(
        self,
        items: Sequence[GradeItem],
        names: Sequence[str],
        weights: Sequence[float],
        on_error: Sequence[str],
        failures: dict[str, str],
        where: str | None = None,
    ) -> None:
        self.items, self.failures, self.left, self.end = items, failures, 0, math.inf
        self._names, self._weights, self._on_error, self._where = names, weights, on_error, where
        self.texts = [vars(item) | {"record": dict(item.record), "id": None} for item in items]
        self._parts = [[0.0] * len(names) for _ in items]
        self._errors: list[list[str]] = [[] for _ in items]
        self._dropped = [False] * len(items)

    def record(self, index: int, grader: int, value: float | None, error: str | None) -> None:
        """One grade, or why there is none. Raises RewardError for an error that stops the run."""
        self.left -= 1
        if error is None:
            self._parts[index][grader] = value
            return
        limit = " (--rl-reward-timeout)" if error.startswith(LATE) else ""
        text = f"reward {self._names[grader]!r} {error}{limit}\n  {self.place(index)}"
        text += "\n  (the grade is 0, and reward/errors counts it)" * (self._on_error[grader] == "zero")
        self.failures.setdefault(self._names[grader], text)
        self._errors[index].append(text)
        self._dropped[index] |= self._on_error[grader] == "drop"
        if self._on_error[grader] == "stop":
            raise RewardError(f"{text}\n  (--rl-reward-on-error zero or drop: the run goes on and counts such samples)")

    def place(self, index: int) -> str:
        """Which item, with its texts."""
        item = self.items[index]
        rollout = "the evaluation" if item.id.epoch < 0 else f"rollout {item.id.epoch}"  # as `stages.evaluate` numbers
        where = self._where or f"on {rollout}, prompt {item.id.group}, response {item.id.member}"
        texts = (f"{name} {_shortened(getattr(item, name))}" for name in ("prompt", "response", "answer"))
        return f"{where}: {', '.join(texts)}"

    def grades(self) -> list[Grade]:
        """The results in the order of the items, parts weighted into totals."""
        totals = [sum(w * p for w, p in zip(self._weights, parts, strict=True)) for parts in self._parts]
        return [
            Grade(total, tuple(parts), "\n".join(errors) or None, dropped)
            for total, parts, errors, dropped in zip(totals, self._parts, self._errors, self._dropped, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a grader. items: (batch, number of the item in it); most: of a coroutine: see `CallWorker.next_of`."""

    grader: int
    items: Sequence[tuple[Batch, int]]
    most: int = TOGETHER


class RewardPool:
    """Graders by spec, run by `workers` processes: in each one call at a time, or asynchronous ones beside each other.
    For one thread at a time.

    `submit` takes a batch of responses and `poll` gives batches back as they are finished, so that many are graded at
    once and a slow one holds nobody up; `grade` waits for a single one.

    specs: as `specs.parse_specs` takes them; how a function is called says `calling.py`. device: where reward models
    run; trust_remote_code: whether their own code may. regex: pattern of the regex grader. timeout: seconds of one
    grading call, one for all graders or one for each. wait_timeout: seconds that other ranks wait for this one; one
    batch, and loading the graders, may take SHARE_OF_WAIT of it. on_error: "stop" raises RewardError; "zero" makes the
    failed part 0.0; "drop" also marks the sample dropped. A failure of a built-in grader is its response's, since
    ground truths were checked: always "zero". `names` and `weights`: of the graders, in order of `Grade.parts`.

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
        self._said: set[str] = set()  # built-in graders of which a failure was taken
        self._closed = False
        self._waiting: deque[Call] = deque()
        self._began: dict[Call, float] = {}  # of those in the making
        self._spent = [0.0, 0.0, 0]  # since `take_seconds`, see there; and responses that are graded
        self._batches: dict[Batch, None] = {}  # those with grades that are missing, by their ends
        self._finished: list[Batch] = []
        setup = self._specs, self._timeouts, regex, device, trust_remote_code
        began, loads = time.monotonic(), ", ".join(self.names)
        self._workers = [CallWorker(WORKER, setup, loads, wait_timeout) for _ in range(workers)]
        load_all(self._workers)
        self._loading = time.monotonic() - began
        self._kinds: Sequence[Kind] = self._workers[0].loaded

    def check_fields(self, rows: Mapping[str, Set[str]]) -> None:
        """Raises ValueError where a grader cannot be called on some row; rows: place in the data -> its fields."""
        for spec, kind in zip(self._specs, self._kinds, strict=True):
            if problem := lacking(kind.fields, rows):
                raise ValueError(f"reward {spec.given!r} {problem}")

    def try_once(self, prompt: Prompt, where: str, members: int, episodes: bool = False) -> list[str]:
        """Call each grader once on a data row, with its own answer as the response, a batch grader on `members` of
        them; reward models on a device are left out, for they would need its memory before the policy has its own.

        where: the row's place in the data; episodes: whether responses are some. Returns what failed; under `on_error`
        "stop" raises RewardError with it.
        """
        from mindspeed_rl_plugin.rows import SampleId

        item = GradeItem(prompt.text, prompt.answer, prompt.answer, prompt.record, SampleId(0, 0, 0), prompt.messages)
        if episodes:
            said = [
                *opening(prompt.messages, prompt.text),
                {"role": "assistant", "content": prompt.answer, "turn": [0, 1], "reward": 0.0},
            ]
            item = replace(item, conversation=said, environment=0.0)
        names = [f"{s.file}:{s.function}" if s.function else s.given for s in self._specs]
        on_error = [self._on_error] * len(names)
        batch = Batch([item] * members, names, self.weights, on_error, {}, f"when it was tried on {where}")
        calls = [
            Call(grader, [(batch, i) for i in range(members if kind.batch else 1)])
            for grader, kind in enumerate(self._kinds)
            if self._device == "cpu" or not self._specs[grader].is_model
        ]
        self._complete(batch, calls)
        return list(batch.failures.values())

    def grade(self, items: Sequence[GradeItem]) -> list[Grade]:
        """Grades in the order of `items`.

        Raises RewardError when a grader fails and `on_error` is "stop", and, whatever `on_error` says, when all of it
        takes longer than other ranks would wait.
        """
        batch = Batch(items, self.names, self.weights, self._on_errors, self._failures)
        self._complete(batch, self._calls(batch))
        return batch.grades()

    def submit(self, items: Sequence[GradeItem]) -> Batch:
        """Take a batch, at least one item, for `poll` to work on."""
        batch = Batch(items, self.names, self.weights, self._on_errors, self._failures)
        self._begin(batch, self._calls(batch))
        return batch

    def poll(self, seconds: float) -> list[Batch]:
        """Batches of `submit` that are graded, each once. Waits for one as long as there are any, `seconds` at most.

        Raises RewardError as `grade` does; then the other batches are given up, too.
        """
        end = time.monotonic() + seconds
        while self._batches and not self._finished:
            self._turn(end)
            if time.monotonic() >= end:
                break
        finished, self._finished = self._finished, []
        return finished

    def give_up(self) -> None:
        """Drop all batches; no call of them is left in a worker."""
        for worker in self._workers:
            if worker.calls:
                worker.close()
                worker.calls.clear()
        for kept in (self._began, self._waiting, self._batches, self._finished):
            kept.clear()

    @property
    def by_group(self) -> bool:
        """Whether some grader is called with whole groups."""
        return any(kind.batch for kind in self._kinds)

    @property
    def wanted(self) -> int:
        """How many further responses keep the workers busy: who shares responses with other pools takes no more."""
        together = [1 if k.batch else _together(k) for k in self._kinds]
        waiting = sum(1 / together[call.grader] for call in self._waiting)
        return max(0, math.ceil((len(self._workers) - waiting) * min(together)))

    def most(self, members: int) -> int:
        """How many further responses, in groups of `members`, are graded in time, though each call takes all of its
        time, and costs its process."""
        costs = [timeout + self._loading for timeout in self._timeouts]
        shares = [members if k.batch else _together(k) for k in self._kinds]
        left = self._limit - sum(costs) * (3 if self._batches else 1)  # others are before them, and may wait once
        return max(0, int(len(self._workers) * left / sum(c / share for c, share in zip(costs, shares, strict=True))))

    def take_seconds(self) -> tuple[float, float] | None:
        """Of a response, mean of those graded since the last call of this: seconds of the calls that graded it, added,
        and seconds that it took a worker, of which calls that may be made beside each other take a share. None where
        none was graded."""
        (calls, worker, responses), self._spent = self._spent, [0.0, 0.0, 0]
        return (calls / responses, worker / responses) if responses else None

    def take_failures(self) -> dict[str, str]:
        """Grader -> the first of its failures as a message, of those that failed since the last call; of a built-in
        grader only the first of all, since these are responses of a model."""
        taken = {name: self._failures.pop(name) for name in list(self._failures)}
        new = {name: text for name, text in taken.items() if name not in self._said}
        self._said |= {spec.name for spec in self._specs if spec.compares and spec.name in taken}
        return new

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._closed = True
        for worker in self._workers:
            worker.close()

    def _calls(self, batch: Batch) -> Iterator[Call]:
        """A batch grader is called with whole groups, others with one item."""
        groups: dict[tuple[int, int], list[int]] = {}
        for index, item in enumerate(batch.items):
            groups.setdefault((item.id.epoch, item.id.group), []).append(index)
        for grader, kind in enumerate(self._kinds):
            cuts = groups.values() if kind.batch else ([i] for i in range(len(batch.items)))
            yield from (Call(grader, [(batch, i) for i in cut]) for cut in cuts)

    def _begin(self, batch: Batch, calls: Iterable[Call]) -> None:
        if self._closed:
            raise RewardError("the reward pool is closed")
        calls = list(calls)
        batch.left, batch.end = sum(len(call.items) for call in calls), time.monotonic() + self._limit
        self._waiting.extend(calls)
        self._batches[batch] = None

    def _complete(self, batch: Batch, calls: Iterable[Call]) -> None:
        """Wait for one batch. Raises RewardError for the first failure that stops the run, and where all of it takes
        too long."""
        self._begin(batch, calls)
        while batch.left:
            self._turn(math.inf)
        self._batches.pop(batch, None)
        self._finished = [other for other in self._finished if other is not batch]

    def _turn(self, end: float) -> None:
        """Give calls to idle workers, wait for an answer until `end` at most, and take what was answered. After an
        error no call is left in a worker."""
        if self._closed:
            raise RewardError("the reward pool is closed")
        first = next(iter(self._batches))  # all have the same time
        try:
            while any([self._give(worker) for worker in self._workers]):  # in turns, so that they have equally many
                pass
            wait_for(self._workers, min(end, first.end))
            if time.monotonic() >= first.end:
                raise RewardError(self._too_late(first))
            for worker in self._workers:
                for call, outcomes in worker.answers():
                    took = time.monotonic() - self._began.pop(call)
                    if isinstance(outcomes, int):
                        self._waiting.appendleft(replace(call, most=outcomes))
                        continue
                    self._spent[0] += took * len(call.items)
                    self._spent[1] += took / self._most(call)
                    self._record(call, outcomes)
        except BaseException:
            self.give_up()
            raise

    def _give(self, worker: CallWorker) -> bool:
        """Let a worker begin a call; whether there was one that it can take."""
        call = worker.next_of(self._waiting, self._most)
        if call is not None:
            self._waiting.remove(call)
            self._began[call] = time.monotonic()
            grace = GRACE if self._kinds[call.grader].asynchronous else 0.0
            texts = [batch.texts[i] for batch, i in call.items]
            worker.make(call, (call.grader, texts), self._timeouts[call.grader], grace, self._most(call))
        return call is not None

    def _most(self, call: Call) -> int:
        return min(call.most, _together(self._kinds[call.grader]))

    def _record(self, call: Call, outcomes: Sequence[Outcome] | str) -> None:
        if isinstance(outcomes, str):
            outcomes = [(None, outcomes)] * len(call.items)
        for (batch, index), outcome in zip(call.items, outcomes, strict=True):
            batch.record(index, call.grader, *outcome)
        for batch in dict.fromkeys(batch for batch, _ in call.items):
            if not batch.left:
                self._spent[2] += len(batch.items)
                del self._batches[batch]
                self._finished.append(batch)

    def _too_late(self, batch: Batch) -> str:
        calls = (*self._began, *self._waiting)
        left = [(call.grader, index) for call in calls for whose, index in call.items if whose is batch]
        grader, index = left[0]
        return (
            f"grading took longer than {self._limit:g} s, with {len({i for _, i in left})} of {len(batch.items)} "
            f"responses left; reward {self.names[grader]!r} was {batch.place(index)}\n"
            f"  (the limit is {SHARE_OF_WAIT} of --rl-wait-timeout {self._wait_timeout:g}, for which other ranks wait; "
            "raise it, add --rl-reward-workers, or lower --rl-reward-timeout "
            f"{' '.join(f'{t:g}' for t in dict.fromkeys(self._timeouts))})"
        )


def _together(kind: Kind) -> int:
    """Most calls of a grader that are in the making in a worker."""
    return TOGETHER if kind.asynchronous else 1


def _shortened(text: str, limit: int = 160) -> str:
    """Head and tail: the question begins, the answer ends a text."""
    half = limit // 2
    return repr(text if len(text) <= limit else f"{text[:half]} [...] {text[-half:]}")
