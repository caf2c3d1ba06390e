"""The asynchronous schedule: other ranks generate the next rollouts while these train.

Rollouts are admitted ahead of training as far as `Admission` allows, and consumed in the order of admission. Rows come
from engines that this job's ranks never wait for in a collective: they take prompts from the dock and write responses
into it. Everything behind generation is as in the other schedules.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.environment import flush_output, last_words
from mindspeed_rl_plugin.loop.admission import Admission
from mindspeed_rl_plugin.loop.rollout_plan import of_epoch
from mindspeed_rl_plugin.loop.schedules import Job, RolloutSchedule, Stages
from mindspeed_rl_plugin.reshard.publish import Publisher
from mindspeed_rl_plugin.rows import Group, Rows, SampleId
from mindspeed_rl_plugin.stages.evaluate import EvaluateApart
from mindspeed_rl_plugin.stages.grading import Grader
from mindspeed_rl_plugin.stages.measure import Rollout
from mindspeed_rl_plugin.stages.reward import FailureLog
from mindspeed_rl_plugin.stages.select import GroupStats

RAISE_SECONDS = 3.0  # for the main thread to raise what ended the grader's
LOOK_SECONDS = 1.0  # between looks at the grader's thread, while this rank waits for rows


class Engines:
    """What engines apart have done since the last rollout. reports: what each has counted since it joined."""

    def __init__(self, reports: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        self._reports = reports
        self._before: dict[str, Mapping[str, float]] = {}

    def metrics(self) -> dict[str, float]:
        """Means over engines, named as in `monitor.names`; empty where none has reported."""
        now = dict(self._reports())
        sums: Counter[str] = Counter()
        for name, counts in now.items():
            before = self._before.get(name, {})
            sums.update({key: value - before.get(key, 0.0) for key, value in counts.items()})
        at_work = sum(counts != self._before.get(name) for name, counts in now.items())
        self._before = now
        if not sums["seconds"]:
            return {}
        result = {f"idle/engines_{cause}": sums[cause] / sums["seconds"] for cause in ("starved", "waited")}
        result |= {"engines": float(at_work), "engines/tokens_per_second": sums["tokens"] / sums["seconds"]}
        if sums["pauses"]:
            of_one = {"pull_seconds": "pull", "pause_seconds": "pause", "bytes_pulled": "pulled"}
            result |= {f"weights/{name}": sums[key] / sums["pauses"] for name, key in of_one.items()}
        return result


class AsyncSchedule(RolloutSchedule):
    """publisher: of this rank's weights, of which it keeps the `kept` newest; model: its chunks; strict: whether each
    rollout must be sampled by the newest version at its admission; evaluation: None without data; members: most rows of
    a group; secret_file: with which engines join, gone at the end."""

    def __init__(
        self,
        job: Job,
        stages: Stages,
        rounds: int,
        *,
        admission: Admission,
        publisher: Publisher,
        kept: int,
        model: Sequence[Any],
        strict: bool,
        evaluation: EvaluateApart | None,
        members: int,
        secret_file: Path,
    ) -> None:
        super().__init__(job, stages, rounds)
        self.admission, self.publisher, self.kept = admission, publisher, kept
        self.model, self.strict = model, strict
        self.evaluation, self.grader = evaluation, Grader(stages.reward, members, self._end)
        self.secret_file = secret_file
        self._closing = threading.Event()
        self._published: dict[str, float] = {}
        self._versions: list[int] = []  # that this process has published
        self._overdue = False  # an evaluation
        self._engines = Engines(job.dock.reports)

    def collect(self, done: int) -> Rollout:
        """A rollout that is ready to train on. Publishes, admits and begins an evaluation where these are due."""
        job = self.job
        if not self._versions:
            self._publish(done, max(self.admission.published, 0))
        with job.monitor.stage("prompts"):
            self._admit()
        self._look_at_evaluation()
        sampling = self._sample()
        return self._prepare(done, None, {**sampling, **self._lags(), **self._published, **self._engines.metrics()})

    def used_up(self, done: int, last: bool) -> None:
        """After the last step of a rollout: the weights go out, unless nobody will need them."""
        if not last or self.job.due(done):
            self._publish(done, self.admission.published + 1)
        if last and self.evaluation is not None:
            self._finish_evaluation()

    def evaluate(self, done: int) -> None:
        """An evaluation while no rollout is due waits for the next publication."""
        self._overdue = True

    def settle(self) -> None:
        """A checkpoint follows, without the evaluation that is under way. Under a strict order all that is admitted is
        sampled and graded first, for after a resume there are no weights to sample the rest with."""
        self._finish_evaluation()
        if self.strict:
            for epoch, groups in self.job.plan.queue:
                self._wait_for(self.job.plan.ids(of_epoch(epoch, groups)))
            self.job.ranks.barrier("the checkpoint")

    def state(self) -> dict[str, Any]:
        """The counts of admission."""
        return {"admission": self.admission.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take the counts over; a run that was synchronous before has trained what it admitted."""
        if "admission" in state:
            self.admission.load(state["admission"])

    def close(self) -> None:
        """End the thread that grades, and let nobody join any more."""
        self._closing.set()
        self.grader.stop()
        if self.job.topology.leader:
            self.secret_file.unlink(missing_ok=True)

    # inside

    def _end(self, error: BaseException) -> None:
        """In the grader's thread: the main one may wait for other ranks, which wait for these grades."""
        if not self._closing.wait(RAISE_SECONDS):
            last_words(f"rank {self.job.topology.rank} stops: {type(error).__name__}: {error}")
            flush_output()
            os._exit(1)

    def _publish(self, done: int, number: int) -> None:
        """Weights of `done` steps are publication `number`; an evaluation of them begins where one is due."""
        job = self.job
        if not self._versions:
            self.grader.start()
        if not self._keeps_evaluated():
            self._finish_evaluation()
        with job.monitor.stage("publish"):
            published = self.publisher.publish(self.model, done)
        self.admission.publish(done, number)
        self._versions.append(done)
        self._published = {"weights/publish_seconds": published.seconds, "weights/bytes_published": published.nbytes}
        if self.evaluation is not None and (job.due(done) or self._overdue):
            self._finish_evaluation()
            self.evaluation.begin(done)
            self._overdue = False
        self._admit()
        job.dock.announce(done)

    def _keeps_evaluated(self) -> bool:
        """Whether the publisher still has the weights under evaluation after the next publication."""
        kept = self._versions[1 - self.kept :]
        return self.evaluation is None or self.evaluation.version in (-1, *kept)

    def _admit(self) -> None:
        """As many groups as may be in flight enter the dock."""
        plan, admission = self.job.plan, self.admission
        while groups := admission.next_epoch:
            admission.admitted += groups
            epoch = plan.open_next(groups)
            newest = self._versions[-1]
            self.job.prompts.run(epoch, groups, by=(newest, newest if self.strict else -1))
            plan.queue.append((epoch, groups))

    def _drop(self, groups: Sequence[Group]) -> None:
        self.job.forget(groups)
        self.admission.dropped += len(groups)

    def _round(self, failures: FailureLog) -> Mapping[Group, GroupStats]:
        """Wait for the grades of the oldest epoch that is admitted. Its statistics."""
        self.job.plan.take_round()
        with self.job.monitor.stage("generate"):
            return self._compare(self._graded, failures)

    def _graded(self, ids: Sequence[SampleId]) -> Rows:
        self._wait_for(ids)
        return self.stages.reward.graded(ids)

    def _wait_for(self, ids: Sequence[SampleId]) -> None:
        """Until rows are graded. Raises TimeoutError that says what they wait for, and what has ended the grader."""
        select, end = self.stages.select, time.monotonic() + self.job.ranks.deadline
        while True:
            self.grader.check()
            seconds = min(LOOK_SECONDS, end - time.monotonic())
            try:
                lease = select.dock.lease(select.spec.name, ids=ids, columns=(), deadline=max(seconds, 0.0))
                return select.dock.release(lease)
            except TimeoutError:
                if seconds < LOOK_SECONDS:
                    raise

    def _lags(self) -> dict[str, float]:
        """How old this rollout's tokens are, in publications; on the leader, which logs it. Raises RuntimeError above
        the bound: admission is wrong then."""
        if not self.job.topology.leader:
            return {}
        plan, lag = self.job.plan, self.admission.lag
        rows = self.stages.measure.dock.read(plan.ids(plan.groups), ("version", "segments", "length"))
        lags = [lag(version) for version in rows["version"].tolist()]
        if max(lags) > self.admission.staleness:
            raise RuntimeError(
                f"a response is {max(lags)} publications old, --rl-max-staleness is {self.admission.staleness}"
            )
        return {
            "lag/mean": sum(lags) / len(lags),
            "lag/max": float(max(lags)),
            "lag/token_mean": token_lag(rows, lag),
            "segments/mean": float(rows["segments"].lengths.double().mean()),
        }

    def _look_at_evaluation(self) -> None:
        """Log an evaluation whose responses are all graded by now."""
        if self.evaluation is None or self.evaluation.version < 0:
            return
        if self.job.ranks.broadcast(self.job.topology.leader and not self._ungraded(self.evaluation.ids)):
            self.evaluation.finish()

    def _finish_evaluation(self) -> None:
        if self.evaluation is not None and self.evaluation.version >= 0:
            with self.job.monitor.stage("evaluate"):
                if self.job.topology.leader:
                    self._wait_for(self.evaluation.ids)
                self.evaluation.finish()

    def _ungraded(self, ids: Sequence[SampleId]) -> int:
        """How many of the rows are not graded yet."""
        return self.stages.reward.dock.remaining(self.stages.reward.spec.name, ids)


def token_lag(rows: Rows, lag: Callable[[int], int]) -> float:
    """Mean over all response tokens of the lag of their segment."""
    total = tokens = 0
    for segments, length in zip(rows["segments"].rows(), rows["length"].tolist(), strict=True):
        firsts, versions = segments.T.tolist()
        for first, end, version in zip(firsts, [*firsts[1:], length], versions, strict=True):
            total += lag(version) * (end - first)
            tokens += end - first
    return total / max(tokens, 1)
