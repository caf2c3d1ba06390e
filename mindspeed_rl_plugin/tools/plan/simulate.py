"""Simulates a run in virtual time, with the job's code for rollout plans, admission, selection and engines' actions."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from mindspeed_rl_plugin.dock import VersionBound
from mindspeed_rl_plugin.forward import TokenBudget
from mindspeed_rl_plugin.generators.engine_state import EngineState, choose
from mindspeed_rl_plugin.loop.placement import Placement, deal
from mindspeed_rl_plugin.loop.rollout_plan import RolloutPlan, of_epoch
from mindspeed_rl_plugin.loop.run_setup import Setup
from mindspeed_rl_plugin.loop.schedules.admission import Admission
from mindspeed_rl_plugin.loop.schedules.longest_first import LongestFirst
from mindspeed_rl_plugin.rows import Group, Prompt, SampleId
from mindspeed_rl_plugin.stages.groups import GroupStats, Rounds
from mindspeed_rl_plugin.tools.plan.virtual import Costs, Decoder, Graders, Responses

WARM_UP = 2  # rollouts at the start that are not measured; `simulate` adds more for async
# Seconds of decode steps after which an engine looks for rows and new weights, as in generators.engine_loop. A real
# engine without a free slot learns of new weights only by the job's answer to its reports: up to 0.5 s later than here.
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Outcome:
    """Times of a run in its steady state. A share is (time without work) / (total time), by cause: "starved" (waits for
    responses or grades), "version" (waits for weights), "back-pressure" (waits for admission)."""

    rollout: float  # seconds from the end of a rollout to the end of the next one
    iteration: float  # `rollout` / optimizer steps of a rollout
    trainers: Mapping[str, float]  # shares, see above
    engines: Mapping[str, float]  # shares, see above
    lag: float  # at the training of a response: mean number of publications after the weights that began it
    tokens: float  # response tokens per second


def simulate(setup: Setup, costs: Costs, responses: Responses, rollouts: int = 12) -> Outcome:
    """Simulate a run, and measure `rollouts` of it. Raises RuntimeError if a response is older than the bound."""
    if setup.schedule != "async":
        job, ahead = _Colocated(setup, costs, responses, WARM_UP + rollouts), 0
    else:  # not measured: `ahead` more rollouts at the start, and the last `ahead`, since engines run out of work then
        ahead = setup.staleness + 1
        job = _Async(setup, costs, responses, WARM_UP + rollouts + 2 * ahead)
    job.run()
    return job.outcome(WARM_UP + ahead, rollouts)


class _Simulation:
    """The base of both simulations: the plan of the current rollout, the data, and the costs of training."""

    def __init__(self, setup: Setup, costs: Costs, responses: Responses, rollouts: int) -> None:
        self.setup, self.costs, self.responses, self.rollouts = setup, costs, responses, rollouts
        ranks = range(setup.sizes.data_parallel)
        place = Placement((0,) * len(ranks), tuple(ranks), tuple(ranks))
        # A budget of tokens balances the ranks; the number of micro-batches only matters if each computes the prompt.
        most = max(setup.sizes.max_tokens or 0, setup.prompt_tokens + setup.limit) if setup.shared else sys.maxsize
        budget = TokenBudget(most, packed=True, shared=setup.shared) if setup.sizes.max_tokens else None
        self.plan = RolloutPlan(setup.sizes, place, budget)
        self.lengths: dict[SampleId, int] = {}  # tokens of each response
        self.sums: Counter[str] = Counter()
        self.marks: list[Counter[str]] = []  # copies of `sums` at the end of each rollout
        self._random = Random(responses.seed)
        self._data = self._rows_of_data()

    def outcome(self, first: int, count: int) -> Outcome:
        """Means over `count` rollouts, from the number `first` on."""
        gained = self.marks[first + count - 1] - self.marks[first - 1]
        seconds, sizes = gained["seconds"], self.setup.sizes
        return Outcome(
            seconds / count,
            seconds / count / sizes.steps,
            {"starved": gained["trainers starved"] / seconds},
            {c: gained[f"engines {c}"] / seconds / sizes.engines for c in ("starved", "version", "back-pressure")},
            gained["lag"] / gained["responses"],
            gained["tokens"] / seconds,
        )

    # inside

    def _end_rollout(self, now: float) -> None:
        trained = self.plan.ids(self.plan.groups)
        self.sums.update({"responses": len(trained), "tokens": sum(map(self.lengths.pop, trained))})
        self.sums["seconds"] = now
        self.marks.append(Counter(self.sums))

    def _rows_of_data(self) -> Iterator[int]:
        if not self.responses.rows:
            yield from itertools.count()
        while True:
            rows = list(range(self.responses.rows))
            self._random.shuffle(rows)
            yield from rows

    def _prompts(self, count: int) -> list[Prompt]:
        return [Prompt((), "", "", next(self._data)) for _ in range(count)]

    def _sample(self, epoch: int, prompts: Sequence[Prompt]) -> list[SampleId]:
        """Draw the lengths of the responses of an epoch. Returns the ids of its rows."""
        ids = self.plan.ids(of_epoch(epoch, len(prompts)))
        for i in ids:
            self.lengths[i] = self.responses.length(prompts[i.group].row, i.member, self._random)
        return ids

    def _graders(self, ranks: int = 1) -> Graders:
        """The graders of one rank, if `ranks` ranks share all graders."""
        return Graders(max(self.setup.graders * self.responses.together / ranks, 1.0))

    def _grading(self) -> float:
        return self.responses.grading(self._random)

    def _stats(self, groups: Sequence[Group]) -> dict[Group, GroupStats]:
        """Statistics of a graded round."""
        members, prompt = range(self.setup.sizes.members), self.setup.prompt_tokens
        stats = {}
        for group in groups:
            lengths = tuple(prompt + self.lengths[SampleId(*group, m)] for m in members)
            signal = self._random.random() < self.responses.informative
            common = tuple((m, prompt if m else 0) for m in members) if self.setup.shared else ()
            stats[group] = GroupStats(False, signal, 0.0, lengths, common=common)
        return stats

    def _rounds(self) -> Rounds:
        return Rounds(self.plan.deferred, self.setup.sizes.prompts, self.setup.rounds, self.plan.plan)

    def _selected(self, rounds: Rounds, stats: Mapping[Group, GroupStats]) -> tuple[bool, Sequence[Group]]:
        """Whether the rollout is complete, and the dropped groups."""
        self.plan.measured(stats)
        whole, selection = rounds.add(stats), rounds.selection
        self.plan.deferred = selection.deferred
        if whole:
            self.plan.use(selection.trained, rounds.steps)
        for group in selection.dropped:
            for i in self.plan.ids([group]):
                del self.lengths[i]
        return whole, selection.dropped

    def _training(self) -> float:
        """Seconds of all passes and updates of a rollout. Each takes as long as on the rank with the most tokens."""
        by_rank = [[sum(map(self.plan.tokens, rank)) for rank in step.micro_batches] for step in self.plan.one_pass]
        old = max(map(sum, zip(*by_rank, strict=True))) if self.setup.old_logps else 0
        costs = self.costs
        return costs.rollout + costs.old_token * old + costs.token * self.setup.sizes.epochs * sum(map(max, by_rank))


class _Colocated(_Simulation):
    """sync and streamed: stages run in turn on the same devices; in streamed, grading runs during generation."""

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
        """Generate and grade a round. Returns the time at which it is graded."""
        sizes = self.setup.sizes
        self.plan.epoch = self.plan.open_next()
        ids = self._sample(self.plan.epoch, self._prompts(sizes.prompts))
        ends, done = {}, [begin] * sizes.engines
        for engine, mine in enumerate(deal(ids, [0] * len(ids), [(0,)] * sizes.engines)):
            decoder = Decoder(self.costs, self.setup.slots, begin)
            decoder.add([(i, self.lengths[i]) for i in mine])
            ends.update((i, end) for end, i in decoder.drain())
            done[engine] = decoder.at
        graded = self._streamed(ends) if self.setup.schedule == "streamed" else self._one_by_one(ends, done)
        self.sums["engines starved"] += sum(graded - end for end in done)
        self.sums["trainers starved"] += sum(graded - end for end in done) / len(done)
        return graded

    def _streamed(self, ends: Mapping[SampleId, float]) -> float:
        graders = self._graders()
        notice = self.costs.notice
        return max(graders.grade(end + notice, self._grading()) for end in sorted(ends.values())) + notice

    def _one_by_one(self, ends: Mapping[SampleId, float], done: Sequence[float]) -> float:
        """Time at which all is graded. Each rank grades its part of the groups with its part of the graders. It begins
        when its engine has finished and all responses of its groups exist."""
        groups, ranks = self.plan.round, len(done) * self.setup.engine_ranks
        result = 0.0
        for rank, part in enumerate(deal(groups, [0] * len(groups), [(0,)] * ranks)):
            mine = self.plan.ids(part)
            ready = max([done[rank // self.setup.engine_ranks], *(ends[i] for i in mine)])
            graders = self._graders(ranks)
            result = max([result, ready, *(graders.grade(ready, self._grading()) for _ in mine)])
        return result


class AdmittedRow(NamedTuple):
    """A row of an admitted prompt; it gets one response."""

    id: SampleId
    bound: VersionBound  # versions that may sample it
    tokens: int  # length of its response
    version: int = -1  # of the weights that began its response


class ModelEngine:
    """An engine of async, which acts by `generators.engine_state.choose`. number: of the engine in the job. due: time
    of its next action; inf: it waits for news (rows or weights). idle: seconds without work by cause: "version" (waits
    for weights), "back-pressure" (waits for admission)."""

    def __init__(self, job: _Async, number: int) -> None:
        self.job, self.number, setup = job, number, job.setup
        self.decoder = Decoder(job.costs, setup.slots)
        self.state = EngineState(setup.slots, setup.inflight == "drain", setup.order == "strict")
        self.idle: Counter[str] = Counter()
        self.due = 0.0
        self._cause, self._since = "", 0.0  # cause and begin of its wait; "": it does not wait
        self._looked = 0.0  # time of its last look for news
        self._pull_end = math.inf  # end of its pull

    def hear(self) -> None:
        """There is news: act when the engine looks for it."""
        self.due = min(self.due, self._hears(self.job.now))

    def idle_so_far(self, cause: str) -> float:
        """`idle` of a cause, including a wait that has not ended."""
        return self.idle[cause] + (self.job.now - self._since if self._cause == cause else 0.0)

    def act(self) -> None:
        """Hand over finished responses, and do the next action."""
        job, state, decoder = self.job, self.state, self.decoder
        for row in decoder.advance(job.now):
            job.ended(row, state.running.pop(row).version)
        if self._cause:
            self.idle[self._cause] += job.now - self._since
            self._cause, state.needs = "", None
        if self._pull_end <= job.now:
            state.pull_ended(state.pulling)
            self._pull_end = math.inf
        self._looked, state.announced = job.now, job.announced
        while (action := choose(state)).pull >= 0:
            state.pull_begins(action.pull)
            self._pull_end = job.now + job.costs.pull
        if action.apply >= 0:
            decoder.pause(job.costs.apply)
            state.applied(action.apply)
            self.due = decoder.at
            return
        if action.take:
            rows, state.needs = job.take(self.number, action.take, state.version)
            state.running |= {row.id: row._replace(version=state.version) for row in rows}
            decoder.add((row.id, row.tokens) for row in rows)
        if state.running:
            self.due = min(decoder.next_end, self._hears(self._pull_end))
        elif not action.wait and state.needs is not None:
            self.due = job.now  # acts again now: `needs` has changed
        else:
            self._cause, self._since = "version" if action.wait else "back-pressure", job.now
            self.due = self._pull_end

    def _hears(self, when: float) -> float:
        """Time at which the engine sees news of the time `when`: `when` if it waits, else its next look."""
        if self._cause or when == math.inf:
            return when
        polls = math.ceil((when - self._looked) / POLL_SECONDS)
        return self.decoder.boundary(self._looked + polls * POLL_SECONDS)


class _Async(_Simulation):
    """async: engines on separate ranks, limited by admission. now: seconds since the start; announced: newest version
    of the weights, -1: none."""

    def __init__(self, setup: Setup, costs: Costs, responses: Responses, rollouts: int) -> None:
        super().__init__(setup, costs, responses, rollouts)
        sizes = setup.sizes
        self.now, self.graders = 0.0, self._graders()
        self.admission = Admission(sizes.prompts, setup.staleness, rollouts)
        self.longest = LongestFirst(max(sizes.global_batch // sizes.members, 1))
        self.announced = -1
        self._strict = setup.order == "strict"
        self._ready: deque[AdmittedRow] = deque()
        # under a strict order: rows of each engine, for each epoch
        self._shares: list[deque[list[AdmittedRow]]] = [deque() for _ in range(sizes.engines)]
        self._begun: dict[SampleId, int] = {}  # version that began each response
        self._running: Counter[int] = Counter()  # number of rows of each epoch whose responses have not ended
        self._graded: dict[int, float] = defaultdict(float)  # time at which all ended rows of an epoch are graded
        self.engines = [ModelEngine(self, n) for n in range(sizes.engines)]

    def run(self) -> None:
        self._publish(0)
        for number in range(self.rollouts):
            began = self.now
            self._collect()
            self.sums["trainers starved"] += self.now - began
            self._check_lag()
            self._pass(self._training())
            if number + 1 < self.rollouts:
                self._publish(number + 1)
            for cause in ("version", "back-pressure"):
                self.sums[f"engines {cause}"] = sum(engine.idle_so_far(cause) for engine in self.engines)
            self._end_rollout(self.now)

    def _pass(self, seconds: float) -> None:
        """Let time pass, in which the engines act."""
        end = self.now + seconds
        while min(engine.due for engine in self.engines) <= end:
            self._act()
        self.now = end

    def _act(self) -> None:
        """Let the engine that is due first act."""
        engine = min(self.engines, key=lambda engine: engine.due)
        if engine.due == math.inf:
            raise RuntimeError(f"at {self.now:g} s all engines wait, and nothing can wake them")
        self.now = engine.due
        engine.act()

    # the trainers

    def _publish(self, number: int) -> None:
        self._pass(self.costs.publish)
        self.announced = number * self.setup.sizes.steps
        self.admission.publish(self.announced, number)
        self._admit()

    def _admit(self) -> None:
        """Admit what admission allows, as the job does."""
        while groups := self.admission.next_epoch:
            self.admission.admitted += groups
            epoch = self.plan.open_next(groups)
            prompts = self._prompts(groups)
            prompts = prompts if self._strict else self.longest.order(epoch, prompts)
            bound = VersionBound(self.announced, self.announced if self._strict else -1)
            rows = [AdmittedRow(i, bound, self.lengths[i]) for i in self._sample(epoch, prompts)]
            self._running[epoch] = len(rows)
            if self._strict:
                for n, share in enumerate(self._shares):
                    share.append(rows[n * len(rows) // len(self._shares) : (n + 1) * len(rows) // len(self._shares)])
            else:
                self._ready.extend(rows)
            self.plan.queue.append((epoch, groups))
        for engine in self.engines:
            engine.hear()

    def _collect(self) -> None:
        """Wait for rounds until a rollout is complete."""
        rounds, whole = self._rounds(), False
        while not whole:
            self.plan.take_round()
            while self._running[self.plan.epoch]:
                self._act()
            self._pass(max(self._graded[self.plan.epoch] - self.now, 0.0))
            stats = self._stats(self.plan.round)
            self.longest.finished({group: of_group.lengths for group, of_group in stats.items()})
            whole, dropped = self._selected(rounds, stats)
            self.admission.dropped += len(dropped)
            if not whole:
                self._admit()

    def _check_lag(self) -> None:
        lags = [self.admission.lag(self._begun.pop(i)) for i in self.plan.ids(self.plan.groups)]
        if max(lags) > self.setup.staleness:
            raise RuntimeError(f"a response is {max(lags)} publications old, the bound is {self.setup.staleness}")
        self.sums["lag"] += sum(lags)

    # the dock

    def take(self, engine: int, most: int, version: int) -> tuple[list[AdmittedRow], VersionBound | None]:
        """Take at most `most` ready rows that weights of `version` may sample; under a strict order this engine's
        complete part of the next epoch. If the first row may not be sampled, take none and return its bound."""
        parts = self._shares[engine] if self._strict else self._ready
        bound = (parts[0][0] if self._strict else parts[0]).bound if parts else None
        if bound is not None and not bound.allows(version):
            return [], bound
        if self._strict:
            return (parts.popleft() if parts else []), None
        ready = itertools.takewhile(lambda row: row.bound.allows(version), itertools.islice(parts, most))
        return [parts.popleft() for _ in list(ready)], None

    def ended(self, row: SampleId, version: int) -> None:
        """A response has ended. version: of the weights that began it."""
        self._begun[row] = version
        self._running[row.epoch] -= 1
        graded = self.graders.grade(self.now + self.costs.notice, self._grading()) + self.costs.notice
        self._graded[row.epoch] = max(self._graded[row.epoch], graded)
