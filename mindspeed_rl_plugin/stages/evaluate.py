"""Evaluate: accuracy of greedy responses to held-out prompts and pass@k of sampled ones; for pairs, the margin."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_rl_plugin.algorithms import Algorithm
from mindspeed_rl_plugin.dock import VersionBound
from mindspeed_rl_plugin.engine.rollout_engine import EPOCH, generate, response_request
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.reward import GradeItem, solved
from mindspeed_rl_plugin.rows import FINISH, Prompt, Rows, SampleId, pack_json
from mindspeed_rl_plugin.stages.context import RankContext
from mindspeed_rl_plugin.stages.generate import completion_rows
from mindspeed_rl_plugin.stages.pairs import PairScorer
from mindspeed_rl_plugin.stages.prompts import meta_of, prompt_rows
from mindspeed_rl_plugin.stages.reward import FailureLog, Reward, grade_items

REPORTED_PROMPTS = 20  # held-out prompts whose greedy responses are kept, for the report


class Scored(NamedTuple):
    """A graded response."""

    solved: bool
    reward: float
    tokens: int  # sampled tokens
    cut: bool  # whether it was cut at the length limit
    grader_failed: bool
    environment_failed: bool


class Evaluate:
    """Evaluation on the ranks that train, with their engines. prompts: the held-out prompts."""

    def __init__(self, context: RankContext, prompts: Sequence[Prompt]) -> None:
        self.context, self.prompts = context, prompts
        self.samples = context.config.monitor.eval_pass_k  # sampled responses of each prompt

    def run(self, done: int) -> None:
        """Evaluate the engine's weights after `done` iterations, and log it. Collective."""
        ranks, monitor = self.context.ranks, self.context.monitor
        rows = self._rows()
        scored, shown = self._score(rows) if len(rows) else ([], [])
        # Gathered and summed here: MindSpeed's all_reduce loses the sum of float64 tensors, and HCCL has no float64.
        total = torch.tensor(ranks.gather(sums_of(scored, self.samples)), dtype=torch.float64).sum(0)
        failures = ranks.gather(self.context.graders.take_failures())
        FailureLog("the evaluation").add(failures, show=self.context.leader)
        monitor.log_eval(done, eval_metrics(total, self.samples))
        monitor.log_held_out(done, sorted(itertools.chain(*ranks.gather(shown))))

    def _rows(self) -> Rows:
        """Responses to this engine's share of the prompts: a greedy one to each prompt, and `samples` with the
        run's sampling. No rows except on the first rank of an engine.

        Every rank of every engine calls it; prompt i goes to engine i modulo the number of engines. Responses do not
        depend on that number, up to floating point.
        """
        context, prompts, engine = self.context, self.prompts, self.context.engine
        requests, meta = [], []
        for index in range(engine.replica, len(prompts), engine.replicas):
            for attempt in range(self.samples + 1):
                sample, prompt = SampleId(EPOCH, index, attempt), prompts[index]
                meta.append(meta_of(prompt))
                given = context.sampling, context.seed, sample, prompt.tokens
                requests.append(response_request(*given, fields=meta[-1]))
        completions = generate(engine, requests, deadline=context.ranks.deadline)
        if not engine.leader or not completions:
            return Rows(())
        return completion_rows(requests, completions).with_columns(meta=pack_json(meta))

    def _score(self, rows: Rows) -> tuple[list[Scored], list[list[Any]]]:
        """Scores of the responses, in order, and rows for `Monitor.log_held_out`."""
        graders, items = self.context.graders, grade_items(rows, self.context.decode)
        grades = graders.grade(items)
        parts, rewards, errors = zip(*((g.parts, g.total, g.error is not None) for g in grades), strict=True)
        return scored_rows(rows, parts, rewards, errors, graders.weights), _shown(items, rewards)


class EvaluateApart:
    """Evaluates with engines in other processes, while trainers train. The held-out prompts are an epoch of the dock
    that one version of the weights must sample. The number of the epoch is negative, so that engines take it first.

    reward: the stage that grades these rows, like all others; prompts: the held-out prompts.
    """

    def __init__(self, reward: Reward, prompts: Sequence[Prompt]) -> None:
        self.reward, self.context, self.prompts = reward, reward.context, prompts
        self.dock = self.context.dock_of("trainer")
        self.samples = self.context.config.monitor.eval_pass_k
        self.version, self.epoch = -1, 0  # version under evaluation, -1: none; epoch of its prompts

    @property
    def ids(self) -> list[SampleId]:
        """Ids of the responses; for each prompt the greedy response comes first."""
        members = range(self.samples + 1)
        return [SampleId(self.epoch, group, member) for group in range(len(self.prompts)) for member in members]

    def begin(self, version: int) -> None:
        """Begin to evaluate a version of the weights. Every rank calls it."""
        self.epoch, self.version, members = self.epoch - 1, version, self.samples + 1
        self.dock.open(self.epoch, len(self.prompts), members, VersionBound(version, version))
        self.dock.put(prompt_rows(self.epoch, self.prompts) if self.context.leader else None)

    def finish(self) -> None:
        """Log the evaluation and clear its rows, which must all be graded already. Collective."""
        monitor, leader = self.context.monitor, self.context.leader
        sums = self.context.ranks.broadcast(sums_of(self._scored(), self.samples) if leader else None)
        monitor.log_eval(self.version, eval_metrics(torch.tensor(sums, dtype=torch.float64), self.samples))
        if leader:
            first = [SampleId(self.epoch, group, 0) for group in range(min(REPORTED_PROMPTS, len(self.prompts)))]
            rows = self.reward.graded(first, self.reward.spec.reads)
            monitor.log_held_out(self.version, _shown(self.reward.items(rows), rows["reward"].tolist()))
        self.dock.clear(self.epoch)
        self.version = -1

    def _scored(self) -> list[Scored]:
        failed = {FAILED}.intersection(self.reward.spec.reads)
        rows = self.reward.graded(self.ids, ("reward_parts", "response_length", "finish", *failed))
        columns = (rows[name].tolist() for name in ("reward_parts", "reward", "grader_error"))
        return scored_rows(rows, *columns, self.context.graders.weights)


class EvaluatePairs:
    """Margin and accuracy on held-out pairs. places: of the held-out pairs, as indices of the scorer; reference:
    `[pairs, 2]` log-probs of all pairs under the reference."""

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


def _shown(items: Sequence[GradeItem], rewards: Sequence[float]) -> list[list[Any]]:
    """Rows for `Monitor.log_held_out`: the greedy responses to the first prompts."""
    return [
        [item.id.group, item.prompt, item.response, item.answer, reward]
        for item, reward in zip(items, rewards, strict=True)
        if item.id.member == 0 and item.id.group < REPORTED_PROMPTS
    ]


FAILED = "environment_failed"  # a column of responses with environments


def scored_rows(
    rows: Rows,
    parts: Sequence[Sequence[float]],
    rewards: Sequence[float],
    errors: Sequence[bool],
    weights: Sequence[float],
) -> list[Scored]:
    """Scores of B responses. parts, rewards: parts of each reward and their weighted sum; errors: whether a grader
    failed."""
    lengths, ends = rows["response_length"].tolist(), rows["finish"].tolist()
    failed = rows[FAILED].tolist() if FAILED in rows.columns else [0] * len(rows)
    return [
        Scored(solved(part, weights), reward, tokens, FINISH[end] == "length", bool(error), bool(environment))
        for part, reward, error, tokens, end, environment in zip(
            parts, rewards, errors, lengths, ends, failed, strict=True
        )
    ]


SUMS = ("prompts", "solved", "reward", "tokens", "truncated", "pass_1", "pass_k", "errors", "environment_failed")
"""Number of prompts; sums over the greedy responses, from solved to truncated (cut at the length limit); sums of pass@1
and pass@k over prompts; numbers of responses, greedy or sampled, whose grader failed and whose environment failed."""


def sums_of(scored: Sequence[Scored], samples: int) -> list[float]:
    """`SUMS` of responses: for each prompt the greedy one, then `samples` sampled ones."""
    of_prompts = [[0.0] * 7] if not scored else []
    for first in range(0, len(scored), samples + 1):
        greedy, *sampled = scored[first : first + samples + 1]
        right = sum(one.solved for one in sampled)
        passes = [pass_at_k(samples, right, k) for k in (1, samples)] if samples else [0.0, 0.0]
        of_prompts.append([1.0, float(greedy.solved), greedy.reward, float(greedy.tokens), float(greedy.cut), *passes])
    failed = (sum(one.grader_failed for one in scored), sum(one.environment_failed for one in scored))
    return [sum(column) for column in zip(*of_prompts, strict=True)] + [*map(float, failed)]


def eval_metrics(sums: Tensor, samples: int) -> dict[str, float]:
    """Means over all prompts, and numbers of failures if there were any. Raises ValueError without prompts."""
    named = dict(zip(SUMS, sums.tolist(), strict=True))
    count = named["prompts"]
    if not count:
        raise ValueError("the evaluation has no prompts: --rl-eval-data is empty, or all its prompts are too long")
    result = {
        "eval/accuracy": named["solved"] / count,
        "eval/reward_mean": named["reward"] / count,
        "eval/response_length": named["tokens"] / count,
        "eval/truncated": named["truncated"] / count,
    }
    if samples:
        result |= {"eval/pass@1": named["pass_1"] / count, f"eval/pass@{samples}": named["pass_k"] / count}
    return result | {f"eval/{name}": int(named[name]) for name in ("errors", "environment_failed") if named[name]}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k responses is right, drawn without replacement from n of which c are right.

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, eq. 1): 1 - C(n-c, k) / C(n, k).
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} responses with {c} right: needs 1 <= k <= n and 0 <= c <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
