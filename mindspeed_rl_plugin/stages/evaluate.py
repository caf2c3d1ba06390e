"""Evaluation on held-out prompts: accuracy of greedy responses, and pass@k of sampled ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace

import torch
from torch import Tensor

from mindspeed_rl_plugin.engine.protocol import Engine, Progress, generate
from mindspeed_rl_plugin.engine.seeds import response_seed
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, Prompt, SampleId, Sampling

# Ids of evaluation: (EPOCH, index of the prompt, attempt); no rollout has a negative epoch.
EPOCH = -1

Grade = Callable[[Sequence[tuple[Prompt, Completion]]], Sequence[bool]]
"""Whether each response is right, in order. Called once on the first rank of every engine."""


@dataclass(frozen=True)
class Attempt:
    """One response to prompt `index`; attempt 0 is greedy, 1..k are sampled. correct: None where not graded here."""

    index: int
    attempt: int
    completion: Completion
    correct: bool | None


@dataclass(frozen=True)
class EvalCounts:
    """Sums over prompts, so that ranks and replicas add up: all-reduce `to_tensor()` with SUM.

    solved: prompts whose greedy response is right; sampled: prompts with sampled responses; pass_1, pass_k: sums
    over these of the estimated pass@1 and pass@k; tokens, truncated: of greedy responses.
    """

    prompts: float = 0.0
    solved: float = 0.0
    sampled: float = 0.0
    pass_1: float = 0.0
    pass_k: float = 0.0
    tokens: float = 0.0
    truncated: float = 0.0

    def __add__(self, other: EvalCounts) -> EvalCounts:
        return EvalCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def to_tensor(self) -> Tensor:
        """`[7]` float64."""
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
    grade: Grade,
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
    correct = grade([(prompts[c.id.group], c) for c in completions])
    attempts = [Attempt(c.id.group, c.id.member, c, bool(ok)) for c, ok in zip(completions, correct, strict=True)]
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
    )
