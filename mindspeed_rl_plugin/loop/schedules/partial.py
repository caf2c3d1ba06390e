"""Partial rollouts: generation stops when enough groups are finished, even if others are still in flight.

Each rollout begins with more groups than it needs. Unfinished groups continue in the next rollout, with new weights,
or are dropped. All engines stop after the same number of engine steps, so that a run does not depend on clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mindspeed_rl_plugin.loop.inputs import Inputs
from mindspeed_rl_plugin.loop.rollout_plan import of_epoch
from mindspeed_rl_plugin.loop.schedules.in_flight import InFlight
from mindspeed_rl_plugin.loop.schedules.schedule import Job, SyncSchedule
from mindspeed_rl_plugin.loop.schedules.waiting import GradeWait
from mindspeed_rl_plugin.monitor.names import Metric
from mindspeed_rl_plugin.ranks import Stall
from mindspeed_rl_plugin.rows import Completion, Group, Ragged, SampleId
from mindspeed_rl_plugin.stages.grading import GradingThread
from mindspeed_rl_plugin.stages.groups import GroupStats
from mindspeed_rl_plugin.stages.measure import Rollout
from mindspeed_rl_plugin.stages.stage import Stages
from mindspeed_rl_plugin.weights.resharder import Transfer

WINDOWS = 64  # wanted number of checks for finished groups during the longest response
MOST_STEPS = 16  # most steps of an engine between two checks; so a long response has more checks than WINDOWS


class PartialSchedule(SyncSchedule):
    """in_flight: groups in flight; carries: whether unfinished groups continue (else they are dropped); longest:
    limit of a response [tokens]."""

    def __init__(
        self,
        job: Job,
        stages: Stages,
        rounds: int,
        *,
        in_flight: InFlight,
        carries: bool,
        longest: int,
        **more: Any,
    ) -> None:
        super().__init__(job, stages, rounds, **more)
        self.in_flight, self.carries = in_flight, carries
        self.steps = min(max(longest // WINDOWS, 1), MOST_STEPS)
        self.grader = GradingThread(stages["reward"], job.plan.sizes.members)
        self._wait = GradeWait(job.ranks, stages["reward"], self.grader)
        self._rollouts: int | None = None  # rollouts that the run still has; for `InFlight.wanted`
        self._sampled: dict[SampleId, int] = {}  # tokens of each response that has finished in this round
        self._dropped: list[int] = []  # tokens of each response that this rollout dropped

    @classmethod
    def of(cls, inputs: Inputs, job: Job, stages: Stages, rounds: int, **more: Any) -> PartialSchedule:
        """Build it by the flags. more: named parameters of `SyncSchedule`."""
        flags, sizes = inputs.config.schedule, inputs.sizes
        staleness = flags.max_staleness if flags.carry_unfinished else 0
        in_flight = InFlight(sizes.prompts, sizes.members, flags.in_the_making(sizes.prompts), staleness)
        longest = inputs.config.rollout.max_response_length
        return cls(job, stages, rounds, in_flight=in_flight, carries=flags.carry_unfinished, longest=longest, **more)

    def collect(self, done: int) -> Rollout:
        """A rollout that is ready to train on, and an evaluation if one is due."""
        sizes = self.job.plan.sizes
        self.in_flight.begin(done)
        self._rollouts = -(-(sizes.train_iters - done) // sizes.steps) if self.carries else None
        self.grader.start()
        return super().collect(done)

    def state(self) -> dict[str, Any]:
        """The groups in flight, with the tokens of unfinished responses."""
        generate = self.stages["generate"]
        begun = generate.begun if generate.engine.leader else {}
        mine = {sample: c for sample, c in begun.items() if c.resumable}
        begun = [_packed(c) for part in self.job.ranks.gather(mine) for c in part.values()]
        return {"making": {**self.in_flight.state(), "begun": begun}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state`. Groups that another schedule deferred count as begun before the first rollout."""
        job, in_flight, engine = self.job, self.in_flight, self.job.topology.engine
        if "making" not in state:
            in_flight.started = dict.fromkeys(job.plan.deferred, in_flight.rollout)
            return
        in_flight.load(state["making"], job.plan.deferred, job.topology.engines)
        begun = [_unpacked(c) for c in state["making"]["begun"]]
        self.stages["generate"].begun = {c.id: c for c in begun if in_flight.engine_of[c.id] == engine}

    def stop(self) -> None:
        self.grader.stop()

    # the parts of `collect`

    def _admit(self) -> None:
        job, plan, in_flight = self.job, self.job.plan, self.in_flight
        with job.monitor.stage("prompts"):
            while groups := min(in_flight.wanted(self._rollouts), plan.sizes.prompts):
                plan.epoch = plan.open_next(groups)
                self.stages["prompts"].run(plan.epoch, groups)
                in_flight.start(of_epoch(plan.epoch, groups), job.topology.engines)

    def _drop(self, groups: Sequence[Group]) -> None:
        self.job.forget(groups)
        self.in_flight.end(groups)

    def _sample(self) -> dict[str, float]:
        """Sample and grade; see `RolloutSchedule`."""
        self._dropped = []
        metrics, in_flight = super()._sample(), self.in_flight
        in_flight.end(self.job.plan.groups)
        groups, responses = len(in_flight.started), len(in_flight.engine_of)
        metrics |= {"making/groups": float(groups), "making/responses": float(responses)}
        if not self.carries:
            count = len(self._dropped)
            metrics |= {"dropped/responses": float(count)}
            metrics |= {"dropped/length_mean": sum(self._dropped) / count} if count else {}
        return metrics

    def _round(self) -> Mapping[Group, GroupStats]:
        """Generate until enough groups are finished, and grade finished ones meanwhile. Returns statistics of the
        groups to train; with dynamic sampling, of all finished groups."""
        clock, in_flight = self.job.monitor.stage, self.in_flight
        with clock("generate"):
            cut = None if in_flight.enough() else self._generate()
        groups = in_flight.take(None if self.rounds else in_flight.prompts)
        with clock("reward"):
            self._wait.until_graded(self.job.plan.ids(groups))
            stats = self._compare(groups)
        if cut is not None and not self.carries:  # `cut` is None if nothing was left to generate
            self._drop_rest(cut)
        return stats

    def _generate(self) -> dict[SampleId, int]:
        """Generate until enough groups are finished. Returns the tokens of each unfinished response."""
        job, generate, in_flight = self.job, self.stages["generate"], self.in_flight
        stall = Stall(generate.deadline)

        def enough(finished: Sequence[Completion]) -> bool:
            self.grader.check()
            mine = [(c.id, c.sampled) for c in finished] if generate.engine.leader else []
            parts = job.ranks.gather((mine, generate.engine.progress))
            rows = {sample: tokens for part, _ in parts for sample, tokens in part}
            in_flight.finish(rows)
            self._sampled |= {} if self.carries else rows
            if stall.seen((len(in_flight.engine_of), *(progress for _, progress in parts))):
                raise TimeoutError(
                    f"generation: {len(in_flight.engine_of)} responses are not finished, and none made progress in "
                    f"{generate.deadline:g} s; raise --rl-wait-timeout or lower --rl-max-response-length"
                )
            return in_flight.enough()

        cut = generate.until(in_flight.rows_of(job.topology.engine), self.steps, enough)
        parts = job.ranks.gather(cut if generate.engine.leader else {})
        return {sample: tokens for part in parts for sample, tokens in part.items()}

    def _drop_rest(self, cut: Mapping[SampleId, int]) -> None:
        """Drop the groups that `take` did not return. cut: tokens of each unfinished response."""
        rest = tuple(self.in_flight.unfinished)
        tokens = {**self._sampled, **cut}
        self._dropped += [tokens[sample] for sample in self.job.plan.ids(rest)]
        self._drop(rest)
        self._sampled.clear()
        self.stages["generate"].begun.clear()

    def _evaluate(self, done: int) -> None:
        """Evaluate while the grading thread rests, since it uses the same graders."""
        self.grader.rest()
        super()._evaluate(done)
        self.grader.start()

    def _prepare(self, done: int, transfer: Transfer | None, sampling: Mapping[str, Metric]) -> Rollout:
        old = self._lags(self.in_flight.lag, self.in_flight.staleness) if self.carries else {}
        return super()._prepare(done, transfer, {**sampling, **old})


def _packed(completion: Completion) -> dict[str, Any]:
    """A response in the form in which a checkpoint has it. Its columns have one row each, which is saved."""
    tensors = {"tokens": torch.tensor(completion.tokens), "logps": torch.tensor(completion.logps, dtype=torch.float64)}
    columns = {name: column.row(0).clone() for name, column in completion.columns.items()}
    segments = list(map(list, completion.segments))
    return {"id": list(completion.id), **tensors, "segments": segments, "columns": columns}


def _unpacked(saved: Mapping[str, Any]) -> Completion:
    return Completion(
        SampleId(*saved["id"]),
        tuple(saved["tokens"].tolist()),
        tuple(saved["logps"].tolist()),
        "abort",
        tuple(map(tuple, saved["segments"])),
        columns={name: Ragged.from_rows([row]) for name, row in saved.get("columns", {}).items()},
    )
