"""What every schedule has: the job, its stages, and how the rounds of a rollout are admitted, selected and prepared.
And that of pairs, which samples nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_rl_plugin.dock import Dock
from mindspeed_rl_plugin.loop.rollout_plan import RolloutPlan, by_epoch
from mindspeed_rl_plugin.loop.schedules.lags import lags
from mindspeed_rl_plugin.loop.topology import Topology
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.monitor.names import Metric
from mindspeed_rl_plugin.ranks import Collectives
from mindspeed_rl_plugin.rows import Group, Rows, SampleId
from mindspeed_rl_plugin.stages.advantages import Advantages
from mindspeed_rl_plugin.stages.evaluate import Due, Evaluate, EvaluatePairs
from mindspeed_rl_plugin.stages.generate import Generate
from mindspeed_rl_plugin.stages.logprobs import TokenPass
from mindspeed_rl_plugin.stages.measure import Measure, Rollout
from mindspeed_rl_plugin.stages.prompts import Prompts
from mindspeed_rl_plugin.stages.reward import FailureLog, Reward
from mindspeed_rl_plugin.stages.select import GroupStats, Rounds, Select, group_stats
from mindspeed_rl_plugin.stages.user import UserStage
from mindspeed_rl_plugin.weights.resharder import Transfer


@dataclass(frozen=True)
class Job:
    """What every schedule works with. dock: whose groups are cleared; prompts: the stage that a round begins with."""

    plan: RolloutPlan
    topology: Topology
    ranks: Collectives
    monitor: Monitor
    dock: Dock
    prompts: Prompts
    due: Due

    def admit(self) -> Rows:
        self.plan.epoch = self.plan.open_next()
        return self.prompts.run(self.plan.epoch, self.plan.sizes.prompts)

    def forget(self, groups: Sequence[Group]) -> None:
        for epoch, part in by_epoch(groups).items():
            if self.dock.clear(epoch, part):
                self.plan.rounds.pop(epoch, None)


class Schedule:
    """In which order, and at the same time as what, the stages work. Every method is called by all ranks."""

    def collect(self, done: int) -> Rollout:
        """A rollout that is ready to train on, after `done` iterations, and an evaluation where one is due."""
        raise NotImplementedError

    def evaluate(self, done: int) -> None:
        """An evaluation while no rollout is due."""
        raise NotImplementedError

    def used_up(self, done: int, last: bool) -> None:
        """The last step of a rollout was taken, after `done` iterations. last: of the run."""

    def settle(self) -> None:
        """A checkpoint follows. Raises where it would not be whole."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the schedule. Called by all ranks."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take `state` over."""

    def stop(self) -> None:
        """The process ends, well or not: end threads, without waiting for other ranks."""

    def close(self) -> None:
        """The run has ended well: end what the schedule has beside this rank's training."""


class PairSchedule(Schedule):
    """Pairs come whole: each round is a rollout."""

    def __init__(self, job: Job, evaluation: EvaluatePairs | None) -> None:
        self.job, self.evaluation = job, evaluation

    def collect(self, done: int) -> Rollout:
        """The next rollout, and an evaluation before it where one is due."""
        job, plan = self.job, self.job.plan
        if job.due(done):
            self.evaluate(done)
        with job.monitor.stage("prompts"):
            rows = job.admit()
        plan.use(plan.round, plan.plan(plan.round))
        return Rollout({}, int(rows["tokens"].offsets[-1]))

    def evaluate(self, done: int) -> None:
        with self.job.monitor.stage("evaluate"):
            self.evaluation.run(done)


@dataclass(frozen=True)
class Stages:
    """The stages of a rollout that is generated, in their order; own: a user's; passes: old and reference log-probs,
    values; generate, evaluation: None where other processes generate."""

    generate: Generate | None
    reward: Reward
    own: Sequence[UserStage]
    select: Select
    passes: Sequence[TokenPass]
    advantages: Advantages
    measure: Measure
    evaluation: Evaluate | None


class RolloutSchedule(Schedule):
    """Rollouts are sampled in rounds, of which groups are selected; then the passes of the trainer follow. rounds: that
    dynamic sampling may take for one rollout, 0 without it."""

    def __init__(self, job: Job, stages: Stages, rounds: int) -> None:
        self.job, self.stages, self.rounds = job, stages, rounds

    def _round(self, failures: FailureLog) -> Mapping[Group, GroupStats]:
        """Sample and grade a round. Its statistics."""
        raise NotImplementedError

    def _admit(self) -> None:
        """The next round enters the dock."""
        raise NotImplementedError

    def _drop(self, groups: Sequence[Group]) -> None:
        """Groups that will not be trained leave the dock."""
        self.job.forget(groups)

    def _sample(self) -> dict[str, float]:
        """Sample and grade, in as many rounds as selection asks for. Returns metrics of that."""
        job, plan = self.job, self.job.plan
        rounds, failures = Rounds(plan.deferred, plan.sizes.prompts, self.rounds, plan.plan), FailureLog()
        while True:
            graded = self._round(failures)
            plan.lengths |= {group: of_group.lengths for group, of_group in graded.items()}
            whole, selection = rounds.add(graded), rounds.selection
            self._drop(selection.dropped)
            plan.deferred = selection.deferred
            if whole:
                plan.use(selection.trained, rounds.steps)
                return rounds.metrics()
            if rounds.dropped and job.topology.leader:
                print(f"[rl] rollout {plan.epoch} is dropped: {rounds.dropped}", flush=True)
            self._drop(selection.trained)
            self._admit()

    def _compare(
        self, groups: Sequence[Group], graded: Callable[[Sequence[SampleId]], Rows], failures: FailureLog
    ) -> Mapping[Group, GroupStats]:
        """A user's stages see each rank's share of some groups, then the statistics of all of them. graded: the grades
        of rows."""
        job = self.job
        mine = job.plan.graded_by(job.topology.rank, groups)
        rows = graded(mine)
        for stage in self.stages.own:
            rows = rows.with_columns(**stage.run(mine).columns)
        parts = job.ranks.gather((group_stats(rows), self.stages.reward.graders.take_failures()))
        failures.add([failed for _, failed in parts], show=job.topology.leader)
        return {group: of_group for stats, _ in parts for group, of_group in stats.items()}

    def _lags(self, lag: Callable[[int], int], most: int) -> dict[str, float]:
        """How old the tokens of the rollout are; on the leader, which logs it. lag, most: as of `lags`."""
        plan = self.job.plan
        return lags(self.stages.measure.dock, plan.ids(plan.groups), lag, most) if self.job.topology.leader else {}

    def _prepare(self, done: int, transfer: Transfer | None, sampling: Mapping[str, Metric]) -> Rollout:
        """The passes over a rollout that is sampled and selected. transfer, sampling: as of `Measure.run`."""
        job, plan, stages, clock = self.job, self.job.plan, self.stages, self.job.monitor.stage
        if (seconds := stages.reward.graders.take_seconds()) is not None:
            sampling = {**sampling, **dict(zip(("reward/call_seconds", "reward/worker_seconds"), seconds, strict=True))}
        job.ranks.barrier("log-probs")
        batches = plan.batches(job.topology.dp_rank)
        for forward in stages.passes:
            with clock(forward.spec.name):
                forward.run([i for ids in batches for i in ids], batches)
        with clock("advantage"):
            mine = plan.graded_by(job.topology.rank, plan.groups)
            stages.select.run(mine, plan.one_pass)
            stages.advantages.run(mine)
        return stages.measure.run(plan.ids(plan.groups), done, transfer, sampling)
