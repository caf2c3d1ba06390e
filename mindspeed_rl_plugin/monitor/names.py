"""Register of metric names: unit and meaning of what metrics.jsonl may hold; the report explains itself from it."""

from __future__ import annotations

import re
from typing import NamedTuple


class Meaning(NamedTuple):
    """Unit ("" for a pure number) and a sentence that says what the metric is."""

    unit: str
    text: str


NAMES: dict[str, Meaning] = {
    "reward/mean": Meaning("", "mean reward of the rollout's samples, weighted sum of the graders"),
    "reward/std": Meaning("", "sample standard deviation of the rewards over the whole rollout"),
    "reward/errors": Meaning("samples", "samples whose grader raised or ran out of time"),
    "groups/solved": Meaning("share", "groups whose samples are all correct: nothing left to learn from them"),
    "groups/unsolved": Meaning("share", "groups without any correct sample: nothing to learn from yet"),
    "groups/mixed": Meaning("share", "groups with correct and incorrect samples: these carry the learning signal"),
    "groups/dropped": Meaning("share", "groups kept out of training because a grader failed on one of their samples"),
    "response/length_mean": Meaning("tokens", "mean number of trained tokens of a response"),
    "response/length_max": Meaning("tokens", "trained tokens of the longest response"),
    "response/truncated": Meaning("share", "responses cut at the length limit"),
    "kl/ref": Meaning("nats", "KL of the policy to the reference, per token"),
    "kl/old": Meaning("nats", "KL of the policy to the one that the update started from, per token"),
    "ratio/mean": Meaning("", "mean probability ratio of policy to old policy; exactly 1 in a rollout's first update"),
    "ratio/max": Meaning("", "largest probability ratio of policy to old policy"),
    "clip_fraction": Meaning("share", "trained tokens whose ratio was clipped"),
    "entropy": Meaning("nats", "mean entropy of the policy's next-token distribution on trained tokens"),
    "logp_diff/mean": Meaning("nats", "mean |log-prob of the engine - log-prob of the trainer| over trained tokens"),
    "logp_diff/max": Meaning("nats", "largest |log-prob of the engine - log-prob of the trainer|"),
    "loss": Meaning("", "loss of the update"),
    "loss/policy": Meaning("", "policy part of the loss"),
    "loss/kl": Meaning("", "KL part of the loss, its coefficient included"),
    "grad_norm": Meaning("", "gradient norm before clipping"),
    "lr": Meaning("", "learning rate"),
    "tokens_per_second": Meaning("tokens/s", "prompt and response tokens a second and device, end to end (Eq. 5)"),
    "tokens_per_second_total": Meaning("tokens/s", "prompt and response tokens a second of all devices"),
    "seconds/iteration": Meaning("s", "wall time of the iteration without evaluation"),
    "eval/accuracy": Meaning("share", "held-out prompts answered correctly by greedy decoding"),
    "eval/response_length": Meaning("tokens", "mean length of the greedy held-out responses"),
    "eval/truncated": Meaning("share", "greedy held-out responses cut at the length limit"),
    "version": Meaning("", "weight version that drew the rollout"),
}
_PATTERNS = (
    (re.compile(r"seconds/.+"), Meaning("s", "wall time of the stage on rank 0")),
    (re.compile(r"peak_bytes/.+"), Meaning("bytes", "most device memory allocated during the stage on rank 0")),
    (re.compile(r"eval/pass@\d+"), Meaning("share", "chance that one of k responses is correct, held-out prompts")),
)


def meaning(name: str) -> Meaning:
    """What a metric means; a name that is not registered has no unit and no text."""
    if name in NAMES:
        return NAMES[name]
    return next((m for pattern, m in _PATTERNS if pattern.fullmatch(name)), Meaning("", ""))
