"""The base of all schedules: the job, its stages, and how rounds of a rollout are admitted, selected and prepared. Also
two schedules with engines on the ranks that train: `sync`, one stage after the other; `streamed`, which grades during
generation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_rl_plugin.dock import Dock
from mindspeed_rl_plugin.forward import router_replay
from mindspeed_rl_plugin.loop.colocation import Colocation
from mindspeed_rl_plugin.loop.rollout_plan import RolloutPlan, by_epoch
from mindspeed_rl_plugin.loop.schedules.lags import lags
from mindspeed_rl_plugin.loop.topology import Topology
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.monitor.names import Metric
from mindspeed_rl_plugin.ranks import Collectives
from mindspeed_rl_plugin.rows import Group, Rows
from mindspeed_rl_plugin.stages.evaluate import Evaluate
from mindspeed_rl_plugin.stages.grading import GradingThread
from mindspeed_rl_plugin.stages.groups import GroupStats, Rounds
from mindspeed_rl_plugin.stages.measure import Rollout
from mindspeed_rl_plugin.stages.prompts import Prompts
from mindspeed_rl_plugin.stages.stage import Stages, Work
from mindspeed_rl_plugin.weights.resharder import Transfer


@dataclass(frozen=True)
class Due:
    """When to evaluate: before the first iteration, after every `every` iterations and after the last one; never
    without held-out prompts."""

    data: bool  # whether there are held-out prompts
    every: int  # iterations between evaluations
    total: int  # iterations of the run

    def __call__(self, done: int) -> bool:
        """Whether to evaluate after `done` iterations."""
        return self.data and (done % self.every == 0 or done == self.total)


@dataclass(frozen=True)
class Job:
    """The objects that every schedule uses."""

    plan: RolloutPlan  # of rollouts
    topology: Topology  # as this rank sees it
    ranks: Collectives  # of the job
    monitor: Monitor  # of this rank
    dock: Dock  # the view with which groups are cleared
    due: Due  # whether to evaluate after so many iterations

    def admit(self, prompts: Prompts) -> Rows:
        """Open a round of as many groups as a rollout has. prompts: the stage that puts them into the dock."""
        self.plan.epoch = self.plan.open_next()
        with self.monitor.stage("prompts"):
            return prompts.run(self.plan.epoch, self.plan.sizes.prompts)

    def forget(self, groups: Sequence[Group]) -> None:
        """Clear groups from the dock."""
        for epoch, part in by_epoch(groups).items():
            if self.dock.clear(epoch, part):
                self.plan.rounds.pop(epoch, None)


class Schedule:
    """In which order the stages work, and which of them work at the same time. All ranks call every method."""

    def collect(self, done: int) -> Rollout:
        """A rollout that is ready to train on, after `done` iterations; also evaluates if that is due."""
        raise NotImplementedError

    def evaluate(self, done: int) -> None:
        """Evaluate after `done` iterations, when no rollout is collected."""
        raise NotImplementedError

    def used_up(self, done: int, last: bool) -> None:
        """Called after the last step of a rollout. done: iterations so far; last: whether that step ends the run."""

    def settle(self) -> None:
        """Called before a checkpoint. Raises if the checkpoint would be incomplete or contain NaN or infinity."""

    def state(self) -> dict[str, Any]:
        """The schedule's state for a checkpoint."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""

    def stop(self) -> None:
        """Called when the process ends, maybe by an error: end threads, without waiting for other ranks."""

    def close(self) -> None:
        """Called after `stop` if there was no error: end the engines and services of the schedule."""


class RolloutSchedule(Schedule):
    """Goes through the stage table in three parts. First a round is sampled and graded, by each schedule differently;
    then the stages up to `groups` run on it. When enough rounds have made a rollout, the stages after `groups` run, up
    to `measure`.

    stages: in the table's order.
    rounds: most rounds of dynamic sampling for one rollout, 0 without it.
    """

    def __init__(self, job: Job, stages: Stages, rounds: int) -> None:
        self.job, self.stages, self.rounds = job, stages, rounds

    def _round(self) -> Mapping[Group, GroupStats]:
        """Sample and grade a round. Returns its statistics."""
        raise NotImplementedError

    def _admit(self) -> None:
        """Put the next round into the dock."""
        raise NotImplementedError

    def _drop(self, groups: Sequence[Group]) -> None:
        """Clear from the dock the groups that will not be trained."""
        self.job.forget(groups)

    def _sample(self) -> dict[str, float]:
        """Sample and grade as many rounds as the selection of groups needs. Returns metrics of sampling."""
        job, plan = self.job, self.job.plan
        rounds = Rounds(plan.deferred, plan.sizes.prompts, self.rounds, plan.plan)
        self.stages["groups"].begin()
        while True:
            graded = self._round()
            plan.measured(graded)
            complete, selection = rounds.add(graded), rounds.selection
            self._drop(selection.dropped)
            plan.deferred = selection.deferred
            if complete:
                plan.use(selection.trained, rounds.steps)
                return rounds.metrics()
            if rounds.dropped and job.topology.leader:
                print(f"[rl] rollout {plan.epoch} is dropped: {rounds.dropped}", flush=True)
            self._drop(selection.trained)
            self._admit()

    def _compare(self, groups: Sequence[Group], after: str = "reward") -> Mapping[Group, GroupStats]:
        """Run the stages after `after` up to `groups`, each rank on its share of `groups`. Returns the statistics of
        all groups."""
        work = Work(self.job.plan.graded_by(self.job.topology.rank, groups))
        for stage in self.stages.between(after, "groups"):
            stage.work(work)
        return self.stages["groups"].work(work)

    def _lags(self, lag: Callable[[int], int], most: int) -> dict[str, float]:
        """Metrics of the age of the rollout's tokens, on the leader. lag, most: as in `lags`."""
        plan = self.job.plan
        return lags(self.stages["measure"].dock, plan.ids(plan.groups), lag, most) if self.job.topology.leader else {}

    def _prepare(self, done: int, transfer: Transfer | None, sampling: Mapping[str, Metric]) -> Rollout:
        """Run the stages after `groups`, on a rollout whose groups are chosen. transfer, sampling: as in
        `Measure.run`."""
        job, plan, stages = self.job, self.job.plan, self.stages
        router_replay.weights_version[0] = done
        if (seconds := stages["reward"].graders.take_seconds()) is not None:
            sampling = {**sampling, **dict(zip(("reward/call_seconds", "reward/worker_seconds"), seconds, strict=True))}
        job.ranks.barrier("log-probs")
        share = plan.graded_by(job.topology.rank, plan.groups)
        work = Work(share, plan.batches(job.topology.dp_rank), plan.one_pass)
        behind = stages.between("groups", "measure")
        for name, together in itertools.groupby(behind, lambda stage: stage.timed_as or stage.spec.name):
            with job.monitor.stage(name):
                for stage in together:
                    stage.work(work)
        return stages["measure"].run(plan.ids(plan.groups), done, transfer, {**sampling, **plan.metrics()})


class SyncSchedule(RolloutSchedule):
    """One stage after the other; the engine is awake for the stages that need it. evaluation: evaluates its weights."""

    def __init__(
        self, job: Job, stages: Stages, rounds: int, *, colocation: Colocation, evaluation: Evaluate | None
    ) -> None:
        super().__init__(job, stages, rounds)
        self.colocation, self.evaluation = colocation, evaluation

    def collect(self, done: int) -> Rollout:
        self.colocation.start_offload()
        self._admit()
        with self.colocation.awake(done) as transfer:
            if self.job.due(done):
                with self.job.monitor.stage("evaluate"):
                    self._evaluate(done)
            sampling = self._sample()
        return self._prepare(done, transfer, sampling)

    def evaluate(self, done: int) -> None:
        """The engine wakes only for this evaluation, so the complete time counts as evaluation."""
        with self.job.monitor.stage("evaluate"):
            with self.colocation.awake(done):
                self._evaluate(done)
            self.colocation.onload()

    def used_up(self, done: int, last: bool) -> None:
        """Begin to offload state that the next transfer does not read, while this iteration is logged and saved."""
        if not last or self.job.due(done):
            self.colocation.start_offload()

    def settle(self) -> None:
        self.colocation.refuse_save()

    def close(self) -> None:
        self.colocation.close()

    def _evaluate(self, done: int) -> None:
        self.evaluation.run(done)

    def _admit(self) -> None:
        self.job.admit(self.stages["prompts"])

    def _round(self) -> Mapping[Group, GroupStats]:
        clock = self.job.monitor.stage
        with clock("generate"):
            self.stages["generate"].run(self.job.plan.generated_by(self.job.topology.engine))
        with clock("reward"):
            return self._compare(self.job.plan.round, after="generate")


class StreamedSchedule(SyncSchedule):
    """Like `SyncSchedule`, but each response is graded as soon as it is finished. This changes neither the requests nor
    their order, so all results are those of `SyncSchedule`."""

    def __init__(self, job: Job, stages: Stages, rounds: int, **more: Any) -> None:
        super().__init__(job, stages, rounds, **more)
        self.grader = GradingThread(stages["reward"], job.plan.sizes.members)

    def _round(self) -> Mapping[Group, GroupStats]:
        """Generate a round, and grade responses as they finish. Returns the statistics of the round."""
        clock, mine = self.job.monitor.stage, self.job.plan.generated_by(self.job.topology.engine)
        with self.grader:
            with clock("generate"):
                self.stages["generate"].run(mine, self.grader.check)
            with clock("reward"):
                self.grader.finish()
                return self._compare(self.job.plan.round)


SCHEDULES = {"sync": SyncSchedule, "streamed": StreamedSchedule}
