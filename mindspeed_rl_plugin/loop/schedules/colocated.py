"""Engines on the ranks that train. `sync`: one stage after the other; `streamed`: grading during generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl_plugin.loop.colocation import Colocation
from mindspeed_rl_plugin.loop.schedules.schedule import Job, RolloutSchedule
from mindspeed_rl_plugin.rows import Group
from mindspeed_rl_plugin.stages.evaluate import Evaluate
from mindspeed_rl_plugin.stages.grading import GradingThread
from mindspeed_rl_plugin.stages.groups import GroupStats
from mindspeed_rl_plugin.stages.measure import Rollout
from mindspeed_rl_plugin.stages.stage import Stages


class SyncSchedule(RolloutSchedule):
    """One stage after the other; the engine is awake for the stages that need it. evaluation: of its weights."""

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
        """An evaluation while no rollout is due. The engine wakes only for it, so all the time counts as evaluation."""
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
    """The same, but each response is graded as soon as it is finished. This changes neither the requests nor their
    order, so all results are those of `SyncSchedule`."""

    def __init__(self, job: Job, stages: Stages, rounds: int, **more: Any) -> None:
        super().__init__(job, stages, rounds, **more)
        self.grader = GradingThread(stages["reward"], job.plan.sizes.members)

    def _round(self) -> Mapping[Group, GroupStats]:
        """Generate a round, and grade what is finished meanwhile. Its statistics."""
        clock, mine = self.job.monitor.stage, self.job.plan.generated_by(self.job.topology.engine)
        with self.grader:
            with clock("generate"):
                self.stages["generate"].run(mine, self.grader.check)
            with clock("reward"):
                self.grader.finish()
                return self._compare(self.job.plan.round)


SCHEDULES = {"sync": SyncSchedule, "streamed": StreamedSchedule}
