"""The asynchronous schedule: engines in other processes generate the next rollouts while ranks train.

Rollouts are admitted ahead of training as far as `Admission` allows, and trained in the order of admission. Engines
take prompts from the dock and write responses into it; trainers never wait for engines in a collective. The stages
after generation are those of the other schedules.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from mindspeed_rl_plugin.dock import VersionBound
from mindspeed_rl_plugin.environment import flush_output, last_words
from mindspeed_rl_plugin.generators.external_engines import ExternalEngines
from mindspeed_rl_plugin.loop.rollout_plan import of_epoch
from mindspeed_rl_plugin.loop.schedules.lags import Engines
from mindspeed_rl_plugin.loop.schedules.longest_first import LongestFirst
from mindspeed_rl_plugin.loop.schedules.publications import Evaluations, Publications
from mindspeed_rl_plugin.loop.schedules.schedule import Job, RolloutSchedule
from mindspeed_rl_plugin.loop.schedules.waiting import GradeWait
from mindspeed_rl_plugin.monitor.run_files import PUBLISHED, WEIGHTS_PROCESS
from mindspeed_rl_plugin.prompts import Offers
from mindspeed_rl_plugin.ranks import on_rank_0
from mindspeed_rl_plugin.rows import Group
from mindspeed_rl_plugin.service.job_service import JobService
from mindspeed_rl_plugin.stages import generate
from mindspeed_rl_plugin.stages.evaluate import EvaluateApart
from mindspeed_rl_plugin.stages.grading import GradingThread
from mindspeed_rl_plugin.stages.groups import GroupStats
from mindspeed_rl_plugin.stages.measure import Rollout
from mindspeed_rl_plugin.stages.stage import Stages
from mindspeed_rl_plugin.status.status_file import also

RAISE_SECONDS = 3.0  # time for the main thread to raise an error of the grading thread


class AsyncSchedule(RolloutSchedule):
    """Trains on one rollout after the other while engines sample the next ones.

    service: serves processes outside of the job.
    publications: of the weights.
    evaluate: starts evaluations; it may have no prompts.
    strict: whether a row must be sampled with the weights that are the newest at its admission.
    whole: whether a checkpoint waits until all admitted rows are graded.
    external_engines: supervisors of engines outside of this job's ranks; None except on the leader.
    offers: prompts from other programs, used before those of the data; only the leader has any.
    """

    def __init__(
        self,
        job: Job,
        stages: Stages,
        rounds: int,
        *,
        service: JobService,
        publications: Publications,
        evaluate: EvaluateApart,
        strict: bool,
        whole: bool,
        external_engines: ExternalEngines | None,
        offers: Offers,
    ) -> None:
        super().__init__(job, stages, rounds)
        self.service, self.publications, self.admission = service, publications, publications.admission
        self.strict, self.whole, self.external_engines, self.offers = strict, whole, external_engines, offers
        self.grader = GradingThread(stages["reward"], max(job.plan.sizes.members, evaluate.samples + 1), self._end)
        self._longest = LongestFirst(job.plan.sizes.global_batch // job.plan.sizes.members)
        reclaim = None if strict else partial(service.reclaim, generate.SPEC.name)
        self._engines = Engines(service.reports, reclaim, job.ranks.deadline)
        also("engines", self._engines.told)
        self._wait = GradeWait(job.ranks, stages["reward"], self.grader, self._look_at_engines, self._who_generates)
        self.evaluations = Evaluations(job, evaluate, self._wait)
        self._closing = threading.Event()
        self._settled = -1  # the last iteration after which a checkpoint was begun
        self._collected = time.monotonic()  # when the last rollout was ready
        self._starved = 0.0  # seconds since then without rows to train on

    def collect(self, done: int) -> Rollout:
        """A rollout that is ready to train on. Before the first one, publishes weights, so that prompts are
        admitted."""
        if not self.publications.versions:
            self._publish(done, self.admission.next_number(done))
        self.evaluations.log_graded()
        sampling = self._sample()
        self._log_spans()
        sampling |= {"weights/bytes_published": self.publications.nbytes, **self._engines.metrics()}
        sampling |= {"idle/trainers_starved": self._take_starved()}
        return self._prepare(done, None, sampling | self._lags(self.admission.lag, self.admission.staleness))

    def used_up(self, done: int, last: bool) -> None:
        """After the last step of a rollout: publish the weights, unless no engine will need them."""
        if not last or self.job.due(done):
            self._publish(done, self.admission.published + 1)
        if last:
            self._finish_evaluation()

    def evaluate(self, done: int) -> None:
        """In the middle of a rollout, let the next publication be evaluated. After the last step of the run there is no
        next one: then these weights are published now, with the number of the last publication."""
        self.evaluations.postpone(done)
        if self.evaluations.overdue and done == self.job.plan.sizes.train_iters:
            self._publish(done, self.admission.published)
            self._finish_evaluation()

    def settle(self) -> None:
        """Called before a checkpoint. Without `whole`, a running evaluation continues, and a resume begins another one.
        With `whole`, the checkpoint waits until the evaluation has ended and all admitted rows are graded: under a
        strict order a resumed run does not have the weights that must sample these rows. But after a resume in the
        middle of a rollout there are no published weights until this rollout is trained; before that, the checkpoint
        does not wait for rows. Raises BrokenWeights."""
        self._settled = self.job.monitor.clock.iteration
        self.publications.trainer.refuse_broken()
        if self.whole:
            self._finish_evaluation()
            for epoch, groups in self.job.plan.queue if self.publications.versions else ():
                self._wait.until_graded(self.job.plan.ids(of_epoch(epoch, groups)))

    def state(self) -> dict[str, Any]:
        """The counts of admission, and offered prompts that are not admitted yet."""
        overdue = self.evaluations.overdue or bool(self.evaluations.versions)
        admission = {**self.admission.state(), "strict": self.strict, "overdue": overdue}
        return {"admission": admission, "offers": self.offers.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the counts; a checkpoint of a synchronous run has none."""
        if "admission" in state:
            self.admission.load(state["admission"])
            self.evaluations.overdue = state["admission"]["overdue"]
        if "offers" in state:
            on_rank_0(lambda: self.offers.load(state["offers"]))

    def stop(self) -> None:
        """End the thread that grades. No engine can join from now on."""
        self._closing.set()
        self._log_spans()
        self.grader.stop()
        if self.external_engines is not None:
            self.external_engines.close()

    def close(self) -> None:
        """Tell the launcher's engines, in case some have not joined yet, that the job has ended."""
        if self.external_engines is not None:
            self.external_engines.ended()

    # the parts of `collect`

    def _publish(self, done: int, number: int) -> None:
        """Publish the weights of `done` steps as publication `number`, begin an evaluation if one is due, and admit
        prompts that these weights may sample."""
        job, sizes = self.job, self.job.plan.sizes
        if not self.publications.versions:
            self.grader.start()
            if not job.plan.queue:  # sizes may differ from those of an earlier start
                self.admission.begin(number, len(job.plan.deferred))
        if not self.publications.outlast_next(self.evaluations.versions):
            self._finish_evaluation()
        with job.monitor.stage("publish"):
            self.publications.add(done, number, self.evaluations.versions)
        self.admission.rollouts = number + -(-(sizes.train_iters - done) // sizes.steps)
        job.monitor.log_apart(WEIGHTS_PROCESS, f"{PUBLISHED}{done}", (now := time.time()), now)
        with self._starving():
            self.evaluations.begin_where_due(done)
        self._admit()
        self.service.announce(done)

    def _admit(self) -> None:
        """Put as many groups into the dock as may be admitted now."""
        plan, newest = self.job.plan, self.publications.versions[-1]
        how = (VersionBound(newest, newest),) if self.strict else (VersionBound(newest), self._longest.order)
        while groups := self.admission.next_epoch:
            self.admission.admitted += groups
            epoch = plan.open_next(groups)
            offered = self.job.ranks.broadcast(self.offers.take(groups))
            self.stages["prompts"].run(epoch, groups, *how, offered=offered)
            plan.queue.append((epoch, groups))

    def _round(self) -> Mapping[Group, GroupStats]:
        """Make the oldest admitted epoch the round, and wait for its grades. Returns its statistics."""
        plan = self.job.plan
        plan.take_round()
        with self._starving(), self.job.monitor.stage("generate"):
            self._wait.until_graded(plan.ids(plan.round))
            stats = self._compare(plan.round)
        self._longest.finished({group: of_group.lengths for group, of_group in stats.items()})
        return stats

    def _drop(self, groups: Sequence[Group]) -> None:
        super()._drop(groups)
        self.admission.dropped += len(groups)

    def _finish_evaluation(self) -> None:
        with self._starving():
            self.evaluations.finish()

    # metrics, and the end

    @contextmanager
    def _starving(self) -> Iterator[None]:
        """Within the context, time counts as time without rows to train on."""
        began = time.monotonic()
        yield
        self._starved += time.monotonic() - began

    def _take_starved(self) -> float:
        """Share of the time since the last rollout in which there were no rows to train on."""
        before, self._collected = self._collected, time.monotonic()
        starved, self._starved = self._starved, 0.0
        return starved / max(self._collected - before, 1e-9)

    def _log_spans(self) -> None:
        """Write what engines in other processes did into the run's files."""
        for name, what, start, end in self.service.take_spans():
            self.job.monitor.log_apart(name, what, start, end)

    def _look_at_engines(self) -> None:
        """Log which engines generate. Raises if no engine can join any more."""
        if self.external_engines is not None:
            self.external_engines.check()
        self._engines.look()

    def _who_generates(self) -> str:
        """Which engines generate, for an error."""
        return self._engines.text() + (self.external_engines.text() if self.external_engines is not None else "")

    def _end(self, error: BaseException) -> None:
        """End this process after an error in the grader's thread: the main thread may wait for other ranks, which wait
        for these grades."""
        end, clock = time.monotonic() + self.job.ranks.deadline, self.job.monitor.clock
        while not (closing := self._closing.wait(RAISE_SECONDS)) and self._settled == clock.iteration:
            if time.monotonic() > end:
                break  # until then, a checkpoint that is being written may be completed
        if not closing:
            last_words(f"rank {self.job.topology.rank} stops: {type(error).__name__}: {error}")
            flush_output()
            os._exit(1)
