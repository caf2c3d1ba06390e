"""A run in the model: the job's own plan, admission, selection and choice, driven by a virtual clock."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from mindspeed_rl_plugin.forward import TokenBudget
from mindspeed_rl_plugin.generators.choice import Bound
from mindspeed_rl_plugin.loop.placement import Placement, deal
from mindspeed_rl_plugin.loop.rollout_plan import RolloutPlan, of_epoch
from mindspeed_rl_plugin.loop.schedules.admission import Admission
from mindspeed_rl_plugin.loop.schedules.longest_first import LongestFirst
from mindspeed_rl_plugin.loop.timing.engine import Engine, Row
from mindspeed_rl_plugin.loop.timing.inputs import Costs, Responses, Setup
from mindspeed_rl_plugin.loop.timing.resources import Clock, Decoder, Graders
from mindspeed_rl_plugin.rows import Group, Prompt, SampleId
from mindspeed_rl_plugin.stages.select import GroupStats, Rounds

WARM_UP = 2  # rollouts that are not counted, more where more are sampled ahead; of these the last ones are not, too


@dataclass(frozen=True)
class Outcome:
    """What a run takes, once it goes on evenly.

    rollout: seconds from the end of one to the end of the next; iteration: of an optimizer step of it; trainers,
    engines: share of their time without work, by cause: "starved" (they wait for responses: of slower engines, or for
    grades), "version" (for weights), "back-pressure" (for admission). lag: publications after the weights that began a
    response, mean; tokens: of all responses a second.
    """

    rollout: float
    iteration: float
    trainers: Mapping[str, float]
    engines: Mapping[str, float]
    lag: float
    tokens: float


def simulate(setup: Setup, costs: Costs, responses: Responses, rollouts: int = 12) -> Outcome:
    """So many rollouts in the middle of a run. Raises RuntimeError where a token is older than the bound."""
    if setup.schedule != "async":
        job, ahead = _Colocated(setup, costs, responses, WARM_UP + rollouts), 0
    else:  # at the end nothing is left to sample ahead
        ahead = setup.staleness + 1
        job = _Apart(setup, costs, responses, WARM_UP + rollouts + 2 * ahead)
    job.run()
    return job.outcome(WARM_UP + ahead, rollouts)


class _Job:
    """What both kinds have: the plan of the rollout in use, the data, and what a rollout costs to train on."""

    def __init__(self, setup: Setup, costs: Costs, responses: Responses, rollouts: int) -> None:
        self.setup, self.costs, self.responses, self.rollouts = setup, costs, responses, rollouts
        ranks = range(setup.sizes.data_parallel)
        place = Placement((0,) * len(ranks), tuple(ranks), tuple(ranks))
        # Micro-batches by tokens balance the ranks; how many there are does not matter here.
        budget = TokenBudget(sys.maxsize, packed=True) if setup.sizes.max_tokens else None
        self.plan = RolloutPlan(setup.sizes, place, budget)
        self.lengths: dict[SampleId, int] = {}  # of responses
        self.ends: list[float] = []  # of rollouts
        self.marks: list[dict[str, float]] = []  # sums at these ends
        self.sums: Counter[str] = Counter()
        self._random = Random(responses.seed)
        self._data: deque[int] = deque()
        self._row = 0

    def run(self) -> None:
        raise NotImplementedError

    def outcome(self, first: int, count: int) -> Outcome:
        """Means over so many rollouts from the `first` on."""
        seconds = self.ends[first + count - 1] - self.ends[first - 1]
        gained = Counter(self.marks[first + count - 1])
        gained.subtract(self.marks[first - 1])
        per_engine = seconds * self.setup.sizes.engines

        def shares(who: str, of: float, causes: Sequence[str]) -> dict[str, float]:
            return {cause: gained[f"{who} {cause}"] / of for cause in causes}

        rollout = seconds / count
        return Outcome(
            rollout,
            rollout / self.setup.sizes.steps,
            shares("trainers", seconds, ("starved",)),
            shares("engines", per_engine, ("starved", "version", "back-pressure")),
            gained["lag"] / gained["responses"],
            gained["tokens"] / seconds,
        )

    # inside

    def _end_rollout(self, now: float) -> None:
        trained = self.plan.ids(self.plan.groups)
        self.sums.update({"responses": len(trained), "tokens": sum(map(self.lengths.pop, trained))})
        self.ends.append(now)
        self.marks.append(dict(self.sums))

    def _sample(self, epoch: int, prompts: Sequence[Prompt]) -> list[SampleId]:
        """The rows of an epoch, with the lengths of their responses."""
        ids = self.plan.ids(of_epoch(epoch, len(prompts)))
        for i in ids:
            self.lengths[i] = self.responses.length(prompts[i.group].row, i.member, self._random)
        return ids

    def _prompts(self, count: int) -> list[Prompt]:
        return [Prompt((), "", "", self._next_row()) for _ in range(count)]

    def _next_row(self) -> int:
        if not self.responses.rows:
            self._row += 1
            return self._row - 1
        if not self._data:
            rows = list(range(self.responses.rows))
            self._random.shuffle(rows)
            self._data.extend(rows)
        return self._data.popleft()

    def _stats(self, groups: Sequence[Group]) -> dict[Group, GroupStats]:
        """What grading says of a round."""
        members, prompt = range(self.setup.sizes.members), self.setup.prompt_tokens
        stats = {}
        for group in groups:
            lengths = tuple(prompt + self.lengths[SampleId(*group, m)] for m in members)
            stats[group] = GroupStats(False, self._random.random() < self.responses.informative, 0.0, lengths)
        return stats

    def _rounds(self) -> Rounds:
        return Rounds(self.plan.deferred, self.setup.sizes.prompts, self.setup.rounds, self.plan.plan)

    def _selected(self, rounds: Rounds, stats: Mapping[Group, GroupStats]) -> tuple[bool, Sequence[Group]]:
        """Whether the rollout is whole, and the groups that are dropped."""
        self.plan.lengths |= {group: of_group.lengths for group, of_group in stats.items()}
        whole, selection = rounds.add(stats), rounds.selection
        self.plan.deferred = selection.deferred
        if whole:
            self.plan.use(selection.trained, rounds.steps)
        for group in selection.dropped:
            for i in self.plan.ids([group]):
                del self.lengths[i]
        return whole, selection.dropped

    def _training(self) -> float:
        """Seconds of the passes over a rollout and of its updates: in each the rank with the most tokens is waited
        for."""

        by_rank = [
            [sum(self.plan.lengths[i[:2]][i.member] for batch in rank for i in batch) for rank in step.micro_batches]
            for step in self.plan.one_pass
        ]
        old = max(map(sum, zip(*by_rank, strict=True))) if self.setup.old_logps else 0
        costs = self.costs
        return costs.rollout + costs.old_token * old + costs.token * self.setup.sizes.epochs * sum(map(max, by_rank))


class _Colocated(_Job):
    """sync and streamed: the stages one after the other on the same devices, in the second one grading beside
    generation."""

    def run(self) -> None:
        now = 0.0
        for _ in range(self.rollouts):
            now += self.costs.reshard
            rounds, whole = self._rounds(), False
            while not whole:
                now = self._round(now)
                whole, _ = self._selected(rounds, self._stats(self.plan.round))
            now += self._training()
            self._end_rollout(now)

    def _round(self, begin: float) -> float:
        """Generate and grade a round; when it is graded."""
        sizes = self.setup.sizes
        self.plan.epoch = self.plan.open_next()
        ids = self._sample(self.plan.epoch, self._prompts(sizes.prompts))
        ends, done = {}, [begin] * sizes.engines
        parts = deal([0] * len(ids), [(0,)] * sizes.engines)
        for engine in range(sizes.engines):
            mine = [(i, self.lengths[i]) for i, part in zip(ids, parts, strict=True) if part == engine]
            decoder = Decoder(self.costs, self.setup.slots, begin)
            decoder.add(mine)
            ends.update((i, end) for end, i in decoder.drain())
            done[engine] = decoder.at
        graded = self._streamed(ends) if self.setup.schedule == "streamed" else self._one_by_one(ends, done)
        self.sums["engines starved"] += sum(graded - end for end in done)
        self.sums["trainers starved"] += sum(graded - end for end in done) / len(done)
        return graded

    def _streamed(self, ends: Mapping[SampleId, float]) -> float:
        graders = Graders(self.setup.graders)
        notice = self.costs.notice
        return max(graders.grade(end + notice, self._grading()) for end in sorted(ends.values())) + notice

    def _one_by_one(self, ends: Mapping[SampleId, float], done: Sequence[float]) -> float:
        """Each rank grades its part of the groups, with its part of the graders, when its engine is done and all
        responses of its groups are there."""
        groups, ranks = self.plan.round, len(done) * self.setup.engine_ranks
        parts, result = deal([0] * len(groups), [(0,)] * ranks), 0.0
        for rank in range(ranks):
            mine = self.plan.ids(g for g, part in zip(groups, parts, strict=True) if part == rank)
            ready = max([done[rank // self.setup.engine_ranks], *(ends[i] for i in mine)])
            graders = Graders(max(self.setup.graders // ranks, 1))
            result = max([result, ready, *(graders.grade(ready, self._grading()) for _ in mine)])
        return result

    def _grading(self) -> float:
        return self.responses.grading(self._random)


class _Apart(_Job):
    """async: engines beside the trainers, bound by admission."""

    def __init__(self, setup: Setup, costs: Costs, responses: Responses, rollouts: int) -> None:
        super().__init__(setup, costs, responses, rollouts)
        sizes = setup.sizes
        self.clock, self.graders = Clock(), Graders(setup.graders)
        self.admission = Admission(sizes.prompts, setup.staleness, rollouts)
        self.longest = LongestFirst(max(sizes.global_batch // sizes.members, 1))
        self.announced = -1
        self._ready: deque[Row] = deque()
        self._begun: dict[SampleId, int] = {}  # version that began each response
        self._ungraded: dict[int, int] = defaultdict(int)  # rows of each epoch
        self._shares: list[deque[list[Row]]] = [deque() for _ in range(sizes.engines)]  # under a strict order
        self._trainer, self._waits = self._train(), False
        self._over = False
        self.engines = [
            Engine(
                self.clock,
                Decoder(costs, setup.slots),
                setup,
                partial(self._share if setup.order == "strict" else self._take, n),
                self._done,
                lambda: self.announced,
            )
            for n in range(sizes.engines)
        ]

    def run(self) -> None:
        self._go_on()
        for engine in self.engines:
            engine.begin()
        self.clock.run(lambda: self._over)

    # the trainers

    def _train(self) -> Iterator[float | None]:
        """One after the other: seconds that pass, or None until something is graded."""
        yield from self._publish(0)
        for number in range(self.rollouts):
            began = self.clock.now
            yield from self._collect()
            self.sums["trainers starved"] += self.clock.now - began
            self._check_lag()
            yield self._training()
            if number + 1 < self.rollouts:
                yield from self._publish(number + 1)
            self._mark()
            self._end_rollout(self.clock.now)

    def _publish(self, number: int) -> Iterator[float]:
        yield self.costs.publish
        version = number * self.setup.sizes.steps
        self.admission.publish(version, number)
        self.announced = version
        self._admit()
        self._wake()

    def _admit(self) -> None:
        """As the job does: whatever admission allows."""
        plan, strict = self.plan, self.setup.order == "strict"
        while groups := self.admission.next_epoch:
            self.admission.admitted += groups
            epoch = plan.open_next(groups)
            prompts = self._prompts(groups)
            prompts = prompts if strict else self.longest.order(epoch, prompts)
            bound = Bound(self.announced, self.announced if strict else -1)
            rows = [Row(i, bound, self.lengths[i]) for i in self._sample(epoch, prompts)]
            self._ungraded[epoch] = len(rows)
            if strict:
                for n, share in enumerate(self._shares):
                    share.append(rows[n * len(rows) // len(self._shares) : (n + 1) * len(rows) // len(self._shares)])
            else:
                self._ready.extend(rows)
            plan.queue.append((epoch, groups))

    def _collect(self) -> Iterator[None]:
        """Wait for rounds until a rollout is whole."""
        rounds, whole = self._rounds(), False
        while not whole:
            self.plan.take_round()
            while self._ungraded[self.plan.epoch]:
                yield None
            stats = self._stats(self.plan.round)
            self.longest.finished({group: of_group.lengths for group, of_group in stats.items()})
            whole, dropped = self._selected(rounds, stats)
            self.admission.dropped += len(dropped)
            if not whole:
                self._admit()
                self._wake()

    def _check_lag(self) -> None:
        lags = [self.admission.lag(self._begun.pop(i)) for i in self.plan.ids(self.plan.groups)]
        if max(lags) > self.setup.staleness:
            raise RuntimeError(f"a response is {max(lags)} publications old, the bound is {self.setup.staleness}")
        self.sums["lag"] += sum(lags)

    def _go_on(self) -> None:
        self._waits = False
        for pause in self._trainer:
            if pause is None:
                self._waits = True
                return
            if pause > 0:
                self.clock.at(self.clock.now + pause, self._go_on)
                return
        self._over = True

    # the dock

    def _take(self, engine: int, most: int) -> list[Row]:
        return [self._ready.popleft() for _ in range(min(most, len(self._ready)))]

    def _share(self, engine: int, most: int) -> list[Row]:
        """This engine's part of the next epoch, whole."""
        return self._shares[engine].popleft() if self._shares[engine] else []

    def _done(self, row: SampleId, version: int) -> None:
        self._begun[row] = version
        notice = self.costs.notice
        end = self.graders.grade(self.clock.now + notice, self.responses.grading(self._random))
        self.clock.at(end + notice, self._graded, row)

    def _graded(self, row: SampleId) -> None:
        self._ungraded[row.epoch] -= 1
        if self._waits and not self._ungraded[row.epoch]:
            self._go_on()

    def _wake(self) -> None:
        for engine in self.engines:
            engine.wake()

    def _mark(self) -> None:
        for cause in ("version", "back-pressure"):
            self.sums[f"engines {cause}"] = sum(engine.idle_until(cause, self.clock.now) for engine in self.engines)
