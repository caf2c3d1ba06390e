"""Evaluate: accuracy of greedy responses to held-out prompts, pass@k of sampled ones; of pairs, the margin."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.algorithms import Algorithm
from mindspeed_rl_plugin.dock import Dock, VersionBound
from mindspeed_rl_plugin.engine.rollout_engine import Engine, generate
from mindspeed_rl_plugin.engine.seeds import EPOCH, response_request
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.ranks import Collectives
from mindspeed_rl_plugin.reward import Grade, GradeItem, RewardPool, solved
from mindspeed_rl_plugin.rows import FINISH, Prompt, Rows, SampleId, Sampling, pack_json
from mindspeed_rl_plugin.stages.context import RankContext
from mindspeed_rl_plugin.stages.generate import completion_rows
from mindspeed_rl_plugin.stages.prompts import meta_of, prompt_rows
from mindspeed_rl_plugin.stages.references import PairScorer
from mindspeed_rl_plugin.stages.reward import FailureLog, Reward, grade_items


@dataclass(frozen=True)
class Due:
    """When to evaluate: before the first iteration, every `every`, and after the last; never where there is no data."""

    data: bool
    every: int
    total: int

    def __call__(self, done: int) -> bool:
        """Whether to evaluate after `done` iterations."""
        return self.data and (done % self.every == 0 or done == self.total)


@dataclass(eq=False)
class Evaluate:
    """prompts: held out; decode: response tokens to the text that graders see; samples: responses of each prompt for
    pass@k, beside the greedy one."""

    engine: Engine
    prompts: Sequence[Prompt]
    graders: RewardPool
    decode: Callable[[Sequence[int]], str]
    sampling: Sampling
    ranks: Collectives
    monitor: Monitor
    samples: int
    seed: int
    _failed: list[int] = field(default_factory=lambda: [0, 0], init=False)  # graders, environments
    _shown: list[list[Any]] = field(default_factory=list, init=False)  # rows of `Monitor.log_held_out`

    @classmethod
    def of(cls, context: RankContext, prompts: Sequence[Prompt]) -> Evaluate:
        """On this rank, by the flags."""
        return cls(
            context.engine,
            prompts,
            context.graders,
            context.decode,
            context.sampling,
            context.ranks,
            context.monitor,
            samples=context.config.monitor.eval_pass_k,
            seed=context.seed,
        )

    def run(self, done: int) -> None:
        """Evaluate the engine's weights after `done` iterations, and log it. Collective."""
        self._failed, self._shown = [0, 0], []
        sums = self.sums()
        # Gathered and summed here: MindSpeed's all_reduce forgets the sum of float64 tensors, HCCL has none.
        total = torch.tensor(self.ranks.gather([*sums, *self._failed]), dtype=torch.float64).sum(0)
        failures = self.ranks.gather(self.graders.take_failures())
        FailureLog("the evaluation").add(failures, show=self.ranks.rank == 0)
        self.monitor.log_eval(done, eval_metrics(total[:-2], self.samples) | _failures(*total[-2:].tolist()))
        self.monitor.log_held_out(done, sorted(itertools.chain(*self.ranks.gather(self._shown))))

    def sums(self) -> list[float]:
        """`SUMS` of this replica's share of the prompts, each answered greedily, and `samples` times by `sampling`.

        Every rank of every engine calls it; prompt i goes to replica i modulo replicas. Returned on the first rank
        of an engine, which alone scores; the others return zeros. Responses do not depend on how many replicas there
        are, up to floating point.
        """
        engine, prompts = self.engine, self.prompts
        requests = [
            response_request(
                self.sampling,
                self.seed,
                SampleId(EPOCH, index, attempt),
                prompts[index].tokens,
                fields=meta_of(prompts[index]),
            )
            for index in range(engine.replica, len(prompts), engine.replicas)
            for attempt in range(self.samples + 1)
        ]
        completions = generate(engine, requests, deadline=self.ranks.deadline)
        if not engine.leader or not completions:
            return [0.0] * len(SUMS)
        rows = completion_rows(requests, completions)
        meta = pack_json([meta_of(prompts[sample.group]) for sample in rows.ids])
        return _sums_of(rows, self._score(rows.with_columns(meta=meta)), self.samples)

    def _score(self, rows: Rows) -> list[tuple[bool, float]]:
        """Whether each response is right, and its reward, in order."""
        items = grade_items(rows, self.decode)
        grades: list[Grade] = self.graders.grade(items)
        self._shown += _shown(items, [g.total for g in grades])
        self._failed[0] += sum(g.error is not None for g in grades)
        self._failed[1] += _failed_environments(rows)
        return [(solved(g.parts, self.graders.weights), g.total) for g in grades]


class EvaluateApart:
    """Evaluates where other processes than the trainers generate, beside training: held-out prompts are an epoch of the
    dock that one version of the weights must answer, with a negative number, so that engines take it first.

    dock: of all ranks; reward: the stage that grades, whose graders see these rows as all others; samples: as of
    `Evaluate`. version: under evaluation, -1 where none is.
    """

    def __init__(
        self, dock: Dock, reward: Reward, prompts: Sequence[Prompt], ranks: Collectives, monitor: Monitor, samples: int
    ) -> None:
        self.dock, self.reward, self.prompts, self.ranks = dock, reward, prompts, ranks
        self.monitor, self.samples, self.version, self.epoch = monitor, samples, -1, 0

    @property
    def ids(self) -> list[SampleId]:
        """Of the responses, the greedy one of each prompt first."""
        members = range(self.samples + 1)
        return [SampleId(self.epoch, group, member) for group in range(len(self.prompts)) for member in members]

    def begin(self, version: int) -> None:
        """Ask for an evaluation of a version. Every rank calls it."""
        self.epoch, self.version, members = self.epoch - 1, version, self.samples + 1
        self.dock.open(self.epoch, len(self.prompts), members, VersionBound(version, version))
        self.dock.put(prompt_rows(self.epoch, self.prompts) if self.ranks.rank == 0 else None)

    def finish(self) -> None:
        """Log it, when all its responses are graded, and clear them. Collective."""
        sums, failed = self.ranks.broadcast(self._sums() if self.ranks.rank == 0 else None)
        result = eval_metrics(torch.tensor(sums, dtype=torch.float64), self.samples)
        self.monitor.log_eval(self.version, result | _failures(*failed))
        if self.ranks.rank == 0:
            first = [SampleId(self.epoch, group, 0) for group in range(min(SHOWN, len(self.prompts)))]
            rows = self.reward.graded(first, self.reward.spec.reads)
            self.monitor.log_held_out(self.version, _shown(self.reward.items(rows), rows["reward"].tolist()))
        self.dock.clear(self.epoch)
        self.version = -1

    def _sums(self) -> tuple[list[float], tuple[float, float]]:
        failures = {FAILED}.intersection(self.reward.spec.reads)
        rows = self.reward.graded(self.ids, ("reward_parts", "response_length", "finish", *failures))
        weights = self.reward.graders.weights
        scores = [
            (solved(parts, weights), reward)
            for parts, reward in zip(rows["reward_parts"].tolist(), rows["reward"].tolist(), strict=True)
        ]
        failed = float(rows["grader_error"].sum()), float(_failed_environments(rows))
        return _sums_of(rows, scores, self.samples), failed


class EvaluatePairs:
    """Margin and accuracy on held-out pairs. places: of these in the scorer; reference: `[pairs, 2]` log-probs of all
    pairs under the reference."""

    def __init__(
        self, scorer: PairScorer, places: Sequence[int], reference: Tensor, algorithm: Algorithm, monitor: Monitor
    ) -> None:
        self.scorer, self.places, self.reference = scorer, list(places), reference
        self.algorithm, self.monitor = algorithm, monitor

    def run(self, done: int) -> None:
        """Evaluate the model's weights after `done` iterations, and log it. Collective."""
        gain = self.scorer.score(self.places, "evaluate") - self.reference[self.places]
        if self.algorithm.dpo_length_norm:
            pairs = [self.scorer.pair(place) for place in self.places]
            gain = gain / torch.tensor([[len(p.chosen), len(p.rejected)] for p in pairs])
        margin = self.algorithm.dpo_beta * (gain[:, 0] - gain[:, 1])
        accuracy = float((margin > 0).double().mean())
        self.monitor.log_eval(done, {"dpo_margin": float(margin.mean()), "dpo_accuracy": accuracy})


SHOWN = 20  # held-out prompts whose greedy responses are kept, for the report


def _shown(items: Sequence[GradeItem], rewards: Sequence[float]) -> list[list[Any]]:
    """Rows of `Monitor.log_held_out`: of the greedy responses to the first prompts."""
    return [
        [item.id.group, item.prompt, item.response, item.answer, reward]
        for item, reward in zip(items, rewards, strict=True)
        if item.id.member == 0 and item.id.group < SHOWN
    ]


FAILED = "environment_failed"  # a column, where environments answer
SUMS = ("prompts", "solved", "reward", "tokens", "truncated", "pass_1", "pass_k")
"""What ranks and replicas add up: prompts; of their greedy responses how many are right, their rewards, tokens, and how
many were cut; the sums of the estimated pass@1 and pass@k."""


def _sums_of(rows: Rows, scores: Sequence[tuple[bool, float]], samples: int) -> list[float]:
    """`SUMS` of the responses, of each prompt the greedy one first. scores: whether each is right, and its reward."""
    tokens, ends, of_prompts = rows["response_length"].tolist(), rows["finish"].tolist(), []
    for first in range(0, len(scores), samples + 1):
        (right, reward), *sampled = scores[first : first + samples + 1]
        correct = sum(bool(ok) for ok, _ in sampled)
        passes = [pass_at_k(samples, correct, 1), pass_at_k(samples, correct, samples)] if samples else [0.0, 0.0]
        cut = float(FINISH[ends[first]] == "length")
        of_prompts.append([1.0, float(right), reward, float(tokens[first]), cut, *passes])
    return [sum(column) for column in zip(*of_prompts, strict=True)]


def _failed_environments(rows: Rows) -> int:
    return int(rows[FAILED].sum()) if FAILED in rows.columns else 0


def _failures(graders: float, environments: float) -> dict[str, float]:
    """Of responses whose grader, or whose environment, failed; nothing where none did."""
    counts = {"eval/errors": graders, "eval/environment_failed": environments}
    return {name: int(count) for name, count in counts.items() if count}


def eval_metrics(sums: Tensor, samples: int) -> dict[str, float]:
    """Means over all prompts. Raises ValueError when there were none."""
    named = dict(zip(SUMS, sums.tolist(), strict=True))
    count = named["prompts"]
    if not count:
        raise ValueError("evaluation saw no prompts: --rl-eval-data is empty or every prompt is over-long")
    result = {
        "eval/accuracy": named["solved"] / count,
        "eval/reward_mean": named["reward"] / count,
        "eval/response_length": named["tokens"] / count,
        "eval/truncated": named["truncated"] / count,
    }
    if samples:
        result |= {"eval/pass@1": named["pass_1"] / count, f"eval/pass@{samples}": named["pass_k"] / count}
    return result


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k responses, taken without return from n of which c are right, hold a right one.

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, eq. 1): 1 - C(n-c, k) / C(n, k).
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} responses with {c} right: needs 1 <= k <= n and 0 <= c <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
