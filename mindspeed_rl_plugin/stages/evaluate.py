"""Evaluate: accuracy of greedy responses to held-out prompts, pass@k of sampled ones; of pairs, the margin."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl_plugin.algorithms import Algorithm
from mindspeed_rl_plugin.engine.protocol import Engine, Progress, generate
from mindspeed_rl_plugin.engine.seeds import response_seed
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.ranks import Collectives
from mindspeed_rl_plugin.reward import Grade, GradeItem, RewardPool, solved
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, Prompt, SampleId, Sampling
from mindspeed_rl_plugin.stages.references import PairScorer
from mindspeed_rl_plugin.stages.reward import FailureLog

# Ids of evaluation: (EPOCH, index of the prompt, attempt); no rollout has a negative epoch.
EPOCH = -1

Score = Callable[[Sequence[tuple[Prompt, Completion]]], Sequence[tuple[bool, float]]]
"""Whether each response is right, and its reward, in order. Called once on the first rank of every engine."""


@dataclass(frozen=True)
class Due:
    """When to evaluate: before the first iteration, every `every`, and after the last; never where there is no data."""

    data: bool
    every: int
    total: int

    def __call__(self, done: int) -> bool:
        """Whether to evaluate after `done` iterations."""
        return self.data and (done % self.every == 0 or done == self.total)


class Evaluate:
    """prompts: held out; decode: response tokens to the text that graders see; samples: responses of each prompt for
    pass@k, beside the greedy one."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        graders: RewardPool,
        decode: Callable[[Sequence[int]], str],
        sampling: Sampling,
        ranks: Collectives,
        monitor: Monitor,
        *,
        samples: int,
        seed: int,
    ) -> None:
        self.engine, self.prompts, self.graders, self.decode = engine, prompts, graders, decode
        self.sampling, self.ranks, self.monitor, self.samples, self.seed = sampling, ranks, monitor, samples, seed
        self._failed = 0

    def run(self, done: int) -> None:
        """Evaluate the engine's weights after `done` iterations, and log it. Collective."""
        self._failed = 0
        _, counts = evaluate(
            self.engine,
            self.prompts,
            score=self._score,
            sampling=self.sampling,
            samples=self.samples,
            seed_base=self.seed,
            deadline=self.ranks.deadline,
        )
        total = torch.cat([counts.to_tensor(), torch.tensor([self._failed], dtype=torch.float64)])
        dist.all_reduce(total, group=self.ranks.group)
        failures = self.ranks.gather(self.graders.take_failures())
        FailureLog("the evaluation").add(failures, show=self.ranks.rank == 0)
        result = EvalCounts.from_tensor(total[:-1]).metrics(self.samples)
        self.monitor.log_eval(done, result | ({"eval/errors": int(total[-1])} if total[-1] else {}))

    def _score(self, answers: Sequence[tuple[Prompt, Completion]]) -> list[tuple[bool, float]]:
        items = [
            GradeItem(q.text, self.decode(a.tokens), q.answer, dict(q.record), a.id, q.messages) for q, a in answers
        ]
        grades: list[Grade] = self.graders.grade(items)
        self._failed += sum(g.error is not None for g in grades)
        return [(solved(g.parts, self.graders.weights), g.total) for g in grades]


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
        options = self.algorithm.pairs
        gain = self.scorer.score(self.places, "evaluate") - self.reference[self.places]
        if options.length_norm:
            pairs = [self.scorer.pair(place) for place in self.places]
            gain = gain / torch.tensor([[len(p.chosen), len(p.rejected)] for p in pairs])
        margin = options.beta * (gain[:, 0] - gain[:, 1])
        accuracy = float((margin > 0).double().mean())
        self.monitor.log_eval(done, {"dpo_margin": float(margin.mean()), "dpo_accuracy": accuracy})


@dataclass(frozen=True)
class Attempt:
    """One response to prompt `index`; attempt 0 is greedy, 1..k are sampled. correct: None where not graded here;
    reward: the weighted sum of its grades."""

    index: int
    attempt: int
    completion: Completion
    correct: bool | None
    reward: float = 0.0


@dataclass(frozen=True)
class EvalCounts:
    """Sums over prompts, so that ranks and replicas add up: all-reduce `to_tensor()` with SUM.

    solved: prompts whose greedy response is right; sampled: prompts with sampled responses; pass_1, pass_k: sums
    over these of the estimated pass@1 and pass@k; tokens, truncated, reward: of greedy responses.
    """

    prompts: float = 0.0
    solved: float = 0.0
    sampled: float = 0.0
    pass_1: float = 0.0
    pass_k: float = 0.0
    tokens: float = 0.0
    truncated: float = 0.0
    reward: float = 0.0

    def __add__(self, other: EvalCounts) -> EvalCounts:
        return EvalCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def to_tensor(self) -> Tensor:
        """`[8]` float64."""
        return torch.tensor(astuple(self), dtype=torch.float64)

    @classmethod
    def from_tensor(cls, values: Tensor) -> EvalCounts:
        """Inverse of `to_tensor`."""
        return cls(**dict(zip((f.name for f in fields(cls)), values.tolist(), strict=True)))

    def metrics(self, k: int) -> dict[str, float]:
        """Means over all prompts. Raises ValueError when there were none."""
        if not self.prompts:
            raise ValueError("evaluation saw no prompts: --rl-eval-data is empty or every prompt is over-long")
        out = {
            "eval/accuracy": self.solved / self.prompts,
            "eval/reward_mean": self.reward / self.prompts,
            "eval/response_length": self.tokens / self.prompts,
            "eval/truncated": self.truncated / self.prompts,
        }
        if self.sampled:
            out["eval/pass@1"] = self.pass_1 / self.sampled
            out[f"eval/pass@{k}"] = self.pass_k / self.sampled
        return out


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k responses, drawn without return from n of which c are right, hold a right one.

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, eq. 1): 1 - C(n-c, k) / C(n, k).
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} responses with {c} right: needs 1 <= k <= n and 0 <= c <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    score: Score,
    sampling: Sampling,
    samples: int = 0,
    seed_base: int,
    deadline: float,
    on_progress: Progress | None = None,
) -> tuple[list[Attempt], EvalCounts]:
    """Answer this replica's share of `prompts` greedily, and `samples` times by `sampling`, and grade.

    Every rank of every engine calls it with the same prompts; prompt i goes to replica i modulo replicas. Only
    the first rank of an engine grades; on its others the counts are zero and `correct` is None. Responses do not
    depend on how many replicas there are, up to floating point. deadline: seconds for the next response.
    """
    mine = range(engine.replica, len(prompts), engine.replicas)
    greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
    requests = [
        GenerateRequest(
            SampleId(EPOCH, index, attempt),
            prompts[index].tokens,
            sampling if attempt else greedy,
            response_seed(seed_base, EPOCH, index, attempt),
        )
        for index in mine
        for attempt in range(samples + 1)
    ]
    completions = generate(engine, requests, deadline=deadline, on_progress=on_progress)
    if not engine.leader:
        return [Attempt(c.id.group, c.id.member, c, None) for c in completions], EvalCounts()
    scores = score([(prompts[c.id.group], c) for c in completions])
    attempts = [
        Attempt(c.id.group, c.id.member, c, bool(right), reward)
        for c, (right, reward) in zip(completions, scores, strict=True)
    ]
    return attempts, count(attempts, samples)


def count(attempts: Sequence[Attempt], samples: int) -> EvalCounts:
    """Add up graded attempts; every prompt among them has one greedy and `samples` sampled ones."""
    greedy = [a for a in attempts if a.attempt == 0]
    right = {a.index: 0 for a in greedy}
    for a in attempts:
        right[a.index] += bool(a.attempt and a.correct)
    sampled = list(right.values()) if samples else []
    return EvalCounts(
        prompts=len(greedy),
        solved=sum(bool(a.correct) for a in greedy),
        sampled=len(sampled),
        pass_1=sum(pass_at_k(samples, c, 1) for c in sampled),
        pass_k=sum(pass_at_k(samples, c, samples) for c in sampled),
        tokens=sum(len(a.completion.tokens) for a in greedy),
        truncated=sum(a.completion.finish == "length" for a in greedy),
        reward=sum(a.reward for a in greedy),
    )
