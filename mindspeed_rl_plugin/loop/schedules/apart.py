"""The asynchronous schedule: other ranks generate the next rollouts while these train.

Rollouts are admitted ahead of training as far as `Admission` allows, and consumed in the order of admission. Rows come
from engines that this job's ranks never wait for in a collective: they take prompts from the dock and write responses
into it. Everything behind generation is as in the other schedules.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mindspeed_rl_plugin.dock import VersionBound
from mindspeed_rl_plugin.environment import flush_output, last_words
from mindspeed_rl_plugin.generators.external_engines import ExternalEngines
from mindspeed_rl_plugin.loop.rollout_plan import of_epoch
from mindspeed_rl_plugin.loop.schedules.admission import Admission
from mindspeed_rl_plugin.loop.schedules.lags import Engines
from mindspeed_rl_plugin.loop.schedules.longest_first import LongestFirst
from mindspeed_rl_plugin.loop.schedules.schedule import Job, RolloutSchedule
from mindspeed_rl_plugin.loop.schedules.waiting import GradeWait
from mindspeed_rl_plugin.monitor.run_files import PUBLISHED, WEIGHTS
from mindspeed_rl_plugin.prompts import Offers
from mindspeed_rl_plugin.ranks import on_rank_0
from mindspeed_rl_plugin.rows import Group
from mindspeed_rl_plugin.service.job_service import JobService
from mindspeed_rl_plugin.stages import generate
from mindspeed_rl_plugin.stages.evaluate import EvaluateApart
from mindspeed_rl_plugin.stages.grading import Grader
from mindspeed_rl_plugin.stages.groups import GroupStats
from mindspeed_rl_plugin.stages.measure import Rollout
from mindspeed_rl_plugin.stages.stage import Stages
from mindspeed_rl_plugin.stages.trainer import Trainer

RAISE_SECONDS = 3.0  # for the main thread to raise what ended the grader's


class AsyncSchedule(RolloutSchedule):
    """trainer: of this rank, which publishes its weights and keeps the `kept` newest; strict: whether each
    rollout must be sampled by the newest version at its admission; whole: whether a checkpoint waits until all that is
    admitted is graded; evaluation: None without data; members: most rows of a group; external_engines: on the leader;
    published: versions that engines may have, for who checks their rows; offers: prompts that come before the data's,
    those of the leader."""

    def __init__(
        self,
        job: Job,
        stages: Stages,
        rounds: int,
        *,
        service: JobService,
        admission: Admission,
        trainer: Trainer,
        kept: int,
        strict: bool,
        whole: bool,
        evaluation: EvaluateApart | None,
        members: int,
        external_engines: ExternalEngines | None,
        published: set[int],
        offers: Offers,
    ) -> None:
        super().__init__(job, stages, rounds)
        self.service, self.admission, self.trainer, self.kept = service, admission, trainer, kept
        self.strict, self.whole = strict, whole
        self.evaluation, self.grader = evaluation, Grader(stages["reward"], members, self._end)
        self.external_engines, self.published, self.offers = external_engines, published, offers
        self._closing = threading.Event()
        self._published: dict[str, float] = {}
        self._versions: list[int] = []  # that this process has published, and the trainer keeps
        self._numbers: dict[int, int] = {}  # version -> publication, of rows that are still to come
        self._overdue = False  # an evaluation
        self._evaluated = -1  # the last version of which one began
        self._settled = -1  # the last iteration behind which a checkpoint was written
        self._longest = LongestFirst(job.plan.sizes.global_batch // job.plan.sizes.members)
        reclaim = None if strict else partial(service.reclaim, generate.SPEC.name)
        self._engines = Engines(service.reports, reclaim, job.ranks.deadline)
        self._wait = GradeWait(job.ranks, stages["reward"], self.grader, self._look_at_engines, self._who_generates)
        self._collected = time.monotonic()  # when the last rollout was ready
        self._starved = 0.0  # seconds since then without rows to train on

    def collect(self, done: int) -> Rollout:
        """A rollout that is ready to train on. Publishes, admits and begins an evaluation where these are due."""
        if not self._versions:
            self._publish(done, self.admission.next_number(done))
        self._look_at_evaluation()
        sampling = self._sample()
        self._tell_spans()
        apart = {**self._published, **self._engines.metrics(), "idle/trainers_starved": self._take_starved()}
        old = self._lags(self.admission.lag, self.admission.staleness)
        return self._prepare(done, None, {**sampling, **old, **apart})

    def used_up(self, done: int, last: bool) -> None:
        """After the last step of a rollout: the weights go out, unless nobody will need them."""
        if not last or self.job.due(done):
            self._publish(done, self.admission.published + 1)
        if last and self.evaluation is not None:
            self._finish_evaluation()

    def evaluate(self, done: int) -> None:
        """An evaluation while no rollout is due waits for the next publication; after the last step of the run, which
        may be in the middle of a rollout, there is none, so these weights go out under the number of the last one."""
        self._overdue = done != self._evaluated
        if self._overdue and done == self.job.plan.sizes.train_iters:
            self._publish(done, self.admission.published)
            self._finish_evaluation()

    def settle(self) -> None:
        """A checkpoint follows. An evaluation that is under way goes on, and a resume begins another. Where the
        checkpoint is to be whole, that ends first, and all that is admitted is sampled and graded; under a strict order
        there would be no weights after a resume to sample the rest with. What a resume in the middle of a rollout finds
        not sampled stays so until that is used up, when engines get weights. Raises BrokenWeights."""
        self._settled = self.job.monitor.clock.iteration
        self.trainer.refuse_broken()
        if self.whole:
            self._finish_evaluation()
            for epoch, groups in self.job.plan.queue if self._versions else ():
                self._wait.until_graded(self.job.plan.ids(of_epoch(epoch, groups)))

    def state(self) -> dict[str, Any]:
        """The counts of admission, and prompts that were offered and not admitted."""
        overdue = self._overdue or bool(self._evaluating)
        admission = {**self.admission.state(), "strict": self.strict, "overdue": overdue}
        return {"admission": admission, "offers": self.offers.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take the counts over; a run that was synchronous before has none."""
        if "admission" in state:
            self.admission.load(state["admission"])
            self._overdue = state["admission"]["overdue"]
        if "offers" in state:
            on_rank_0(lambda: self.offers.load(state["offers"]))

    def stop(self) -> None:
        """End the thread that grades; nobody can join any more."""
        self._closing.set()
        self._tell_spans()
        self.grader.stop()
        if self.external_engines is not None:
            self.external_engines.close()

    def close(self) -> None:
        """Engines of the launcher that are still on their way hear that they are too late."""
        if self.external_engines is not None:
            self.external_engines.ended()

    # inside

    def _end(self, error: BaseException) -> None:
        """In the grader's thread: the main one may wait for other ranks, which wait for these grades."""
        end, clock = time.monotonic() + self.job.ranks.deadline, self.job.monitor.clock
        while not (closing := self._closing.wait(RAISE_SECONDS)) and self._settled == clock.iteration:
            if time.monotonic() > end:
                break  # else a checkpoint that is being written comes to its end
        if not closing:
            last_words(f"rank {self.job.topology.rank} stops: {type(error).__name__}: {error}")
            flush_output()
            os._exit(1)

    def _publish(self, done: int, number: int) -> None:
        """Weights of `done` steps are publication `number`; an evaluation of them begins where one is due."""
        job = self.job
        if not self._versions:
            self.grader.start()
            if not job.plan.queue:  # sizes may have changed since a former start
                self.admission.begin(number, len(job.plan.deferred))
        if not self._keeps_evaluated():
            self._finish_evaluation()
        self.published.add(done)  # before any rank has published it
        with job.monitor.stage("publish"):
            published = self.trainer.publish(done)
        self.admission.publish(done, number)
        self.admission.rollouts = number + -(-(job.plan.sizes.train_iters - done) // job.plan.sizes.steps)
        self._versions = [*self._versions[1 - self.kept :], done]
        of_rows = {**self._numbers, done: number}.items()
        self._numbers = {v: n for v, n in of_rows if n >= number - self.admission.staleness or v in self._versions}
        self.published.intersection_update([*self._numbers, *self._evaluating])
        job.monitor.log_apart(WEIGHTS, f"{PUBLISHED}{done}", (now := time.time()), now)
        self._published = {"weights/bytes_published": published.nbytes}
        if self.evaluation is not None and (job.due(done) or self._overdue):
            self._finish_evaluation()
            self.evaluation.begin(done)
            self._overdue, self._evaluated = False, done
        self._admit()
        self.service.announce(done)

    def _keeps_evaluated(self) -> bool:
        """Whether the trainer still has the weights under evaluation after the next publication."""
        return self.evaluation is None or self.evaluation.version in (-1, *self._versions[1 - self.kept :])

    def _admit(self) -> None:
        """As many groups as may be in flight enter the dock."""
        plan, admission = self.job.plan, self.admission
        while groups := admission.next_epoch:
            admission.admitted += groups
            epoch = plan.open_next(groups)
            newest, offered = self._versions[-1], self.job.ranks.broadcast(self.offers.take(groups))
            if self.strict:
                self.job.prompts.run(epoch, groups, VersionBound(newest, newest), offered=offered)
            else:
                self.job.prompts.run(epoch, groups, VersionBound(newest), self._longest.order, offered)
            plan.queue.append((epoch, groups))

    def _drop(self, groups: Sequence[Group]) -> None:
        self.job.forget(groups)
        self.admission.dropped += len(groups)

    def _round(self) -> Mapping[Group, GroupStats]:
        """Wait for the grades of the oldest epoch that is admitted. Its statistics."""
        plan, began = self.job.plan, time.monotonic()
        plan.take_round()
        with self.job.monitor.stage("generate"):
            self._wait.until_graded(plan.ids(plan.round))
            stats = self._compare(plan.round)
        self._starved += time.monotonic() - began
        self._longest.finished({group: of_group.lengths for group, of_group in stats.items()})
        return stats

    def _take_starved(self) -> float:
        """Share of the time since the last rollout in which there was nothing to train on."""
        before, self._collected = self._collected, time.monotonic()
        starved, self._starved = self._starved, 0.0
        return starved / max(self._collected - before, 1e-9)

    def _tell_spans(self) -> None:
        """What engines apart did, into the run's files."""
        for name, what, start, end in self.service.take_spans():
            self.job.monitor.log_apart(name, what, start, end)

    def _look_at_engines(self) -> None:
        """Who generates; raises where there will be no engines any more."""
        if self.external_engines is not None:
            self.external_engines.check()
        self._engines.look()

    def _who_generates(self) -> str:
        """For an error."""
        return self._engines.text() + (self.external_engines.text() if self.external_engines is not None else "")

    @property
    def _evaluating(self) -> list[int]:
        """The version under evaluation, if there is one."""
        return [self.evaluation.version] if self.evaluation is not None and self.evaluation.version >= 0 else []

    def _look_at_evaluation(self) -> None:
        """Log an evaluation whose responses are all graded by now."""
        if not self._evaluating:
            return
        if self.job.ranks.broadcast(self.job.topology.leader and not self._wait.ungraded(self.evaluation.ids)):
            self.evaluation.finish()

    def _finish_evaluation(self) -> None:
        """Training stands still until its last response is graded."""
        if self._evaluating:
            began = time.monotonic()
            with self.job.monitor.stage("evaluate"):
                self._wait.until_graded(self.evaluation.ids)
                self.evaluation.finish()
            self._starved += time.monotonic() - began
