"""Builds the loop of an algorithm that learns from pairs (DPO): its stages include no generation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mindspeed_rl_plugin.adapters.adapted_chunks import BaseModel, adapters_of
from mindspeed_rl_plugin.loop.inputs import Inputs
from mindspeed_rl_plugin.loop.loop import Loop
from mindspeed_rl_plugin.loop.megatron_trainer import MegatronTrainer
from mindspeed_rl_plugin.loop.rank_parts import RankParts
from mindspeed_rl_plugin.loop.schedules.schedule import Job, Schedule
from mindspeed_rl_plugin.loop.start import Start
from mindspeed_rl_plugin.ranks import on_rank_0, weights_digest
from mindspeed_rl_plugin.stages.evaluate import EvaluatePairs
from mindspeed_rl_plugin.stages.measure import IterationLog, Rollout
from mindspeed_rl_plugin.stages.pairs import PairScorer, cache_file, cache_key, read_cache, write_cache
from mindspeed_rl_plugin.stages.prompts import Prompts
from mindspeed_rl_plugin.stages.stage import Stages
from mindspeed_rl_plugin.update.pair_step import PairStep
from mindspeed_rl_plugin.weights.host_memory import HostWeights
from mindspeed_rl_plugin.weights.live import ADAPTERS


@dataclass(frozen=True)
class Reference:
    """The reference model: its log-probs of all pairs if they are on disk, else its weights."""

    folder: str  # of stored log-probs
    key: str  # identifies them, see `cache_key`
    logps: Tensor | None  # `[pairs, 2]`
    weights: HostWeights | BaseModel | None  # None if logps are known

    @classmethod
    def of_model(cls, inputs: Inputs, model: Any) -> Reference:
        """Read the reference's log-probs from disk, or else copy its weights, which the model has at this time."""
        folder = inputs.config.algorithm.dpo_reference_cache or str(Path(inputs.args.save) / "rl" / "reference")
        named = ((n, p) for chunk in model for n, p in chunk.named_parameters())
        digest = weights_digest((n, p) for n, p in named if f"{ADAPTERS}." not in n)
        fingerprint = inputs.data.fingerprint + (inputs.held_out.fingerprint if inputs.held_out else "")
        key = cache_key(digest, fingerprint, inputs.forward, inputs.args.params_dtype)
        count = len(inputs.data) + (len(inputs.held_out) if inputs.held_out else 0)
        logps = on_rank_0(lambda: read_cache(folder, key, count))
        weights = reference_of(inputs, model) if logps is None else None
        return cls(folder, key, logps, weights)

    def scored(self, scorer: PairScorer, model: Any, leader: bool) -> Tensor:
        """`[pairs, 2]` log-probs of all pairs, computed now if they were not on disk. model: the one that the scorer
        runs. Collective."""
        if self.logps is not None:
            if leader:
                print(f"[rl] log-probs of the reference are read from {cache_file(self.folder, self.key)}", flush=True)
            return self.logps
        with self.weights.swapped_into(model):
            logps = scorer.score(list(range(len(scorer))), "reference")
        if leader:
            path = write_cache(self.folder, self.key, logps)
            print(f"[rl] log-probs of the reference are kept in {path}", flush=True)
        return logps


def reference_of(inputs: Inputs, model: Any) -> HostWeights | BaseModel:
    """The reference's weights, which the model has now: a copy or, if adapters are trained, the model without them."""
    return BaseModel() if adapters_of(model) else HostWeights.capture(model, budget=inputs.host_memory_budget())


class PairSchedule(Schedule):
    """The schedule of pairs: each round is a rollout."""

    def __init__(self, job: Job, pairs: Prompts, evaluation: EvaluatePairs | None) -> None:
        self.job, self.pairs, self.evaluation = job, pairs, evaluation

    def collect(self, done: int) -> Rollout:
        """The next rollout; an evaluation comes first if one is due."""
        job, plan = self.job, self.job.plan
        if job.due(done):
            self.evaluate(done)
        rows = job.admit(self.pairs)
        plan.read(plan.round, rows)
        plan.use(plan.round, plan.plan(plan.round))
        return Rollout(plan.metrics(), int(rows["tokens"].offsets[-1]))

    def evaluate(self, done: int) -> None:
        with self.job.monitor.stage("evaluate"):
            self.evaluation.run(done)


def build_pair_loop(inputs: Inputs, model: Any, reference: Reference, start: Start) -> Loop:
    """model: this rank's chunks. Collective over all ranks."""
    at, config = RankParts.of(inputs, model, start), inputs.config.monitor
    job, topology = at.job, at.job.topology
    place = {"dp_rank": topology.dp_rank, "dp_size": topology.dp_size, "writer": topology.writer}
    streams = [inputs.data, *([inputs.held_out] if inputs.held_out else [])]
    step = PairStep(inputs.algorithm, inputs.forward, model, inputs.sizes.prompts)
    trainer = MegatronTrainer(model, inputs.forward, step)
    scorer = PairScorer(trainer.forward, streams, inputs.forward, job.ranks, job.monitor, **place)
    logps = reference.scored(scorer, model, topology.leader)
    held_out = range(len(inputs.data), len(scorer))[: config.eval_prompts or None]
    evaluation = EvaluatePairs(scorer, held_out, logps, inputs.algorithm, job.monitor) if inputs.held_out else None
    stages = Stages.of(inputs.table(), at.context(model, trainer=trainer, pair_references=logps))
    log = IterationLog(job.monitor, job.ranks, job.dock)
    return Loop(inputs.args, job, PairSchedule(job, stages["pairs"], evaluation), stages["update"], log)
