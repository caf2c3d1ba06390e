"""The loop: RL behind Megatron's `train_step`.

Megatron's own train loop calls `Loop.train_step` once an iteration. One Megatron iteration is one optimizer step. When
no rows remain to train on, the schedule collects a rollout for the next steps. Every rank runs the same calls in the
same order.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from mindspeed_rl_plugin.loop.colocation import Colocation
from mindspeed_rl_plugin.loop.schedules.schedule import Job, Schedule
from mindspeed_rl_plugin.stages.measure import IterationLog, Rollout
from mindspeed_rl_plugin.stages.update import TrainStep, Update


@dataclass
class Loop:
    """The loop of a job on this rank."""

    args: argparse.Namespace
    job: Job
    schedule: Schedule
    update: Update
    log: IterationLog
    colocation: Colocation | None = None  # None if these ranks generate nothing
    warmup: int = 0  # number of first iterations in which only the critic is trained
    rollout: Rollout | None = None  # the rollout that is being trained
    trained: bool = False  # whether the policy has taken a step (not while the critic warms up)
    version: int = 0  # of the trainer's weights: number of optimizer steps

    def __post_init__(self) -> None:
        self.job.monitor.clock.trace.place = self._place

    def train_step(self, call: TrainStep) -> tuple:
        """One optimizer step, with a rollout before it when one is due; returns what Megatron's step returns."""
        done = self.args.curr_iteration  # optimizer steps so far, including those before a resume
        self.version = done
        self.job.monitor.begin(done + 1)
        if not self.job.plan.steps:
            self.rollout = self.schedule.collect(done)
        elif self.job.due(done):
            self.schedule.evaluate(done)
        result = self._optimize(done, call)
        if done + 1 == self.args.train_iters and self.job.due(done + 1):
            self.schedule.evaluate(done + 1)
        return result

    def _optimize(self, done: int, call: TrainStep) -> tuple:
        """Megatron's own train_step on the dock's rows, with our forward step."""
        plan, last = self.job.plan, self.args.train_iters
        batches, taken, last_pass = plan.next_step(self.job.topology.dp_rank)
        with self.job.monitor.stage("update"):
            if self.colocation is not None:
                self.colocation.onload()
            version = done - taken  # of the trainer's weights before the rollout's first step
            result, metrics = self.update.run(batches, call, done=done, version=version, last_pass=last_pass)
            self.trained |= done >= self.warmup
            self.version = done + 1
            if not plan.steps:
                self.job.forget(plan.groups)
        if not plan.steps:
            self.schedule.used_up(done + 1, last=done + 1 == last)
        self.log.write(done + 1, self.rollout, metrics, last_step=not plan.steps)
        return result

    def _place(self) -> str:
        rollout = max(self.job.plan.epoch, 0)  # before the first one: what is done is done for it
        return f"iteration {self.job.monitor.clock.iteration}, rollout {rollout}, weights {self.version}"
