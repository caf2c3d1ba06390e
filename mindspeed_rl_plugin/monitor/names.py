"""Register of metric names: unit and meaning of what metrics.jsonl may hold; the report explains itself from it."""

from __future__ import annotations

import re
from typing import NamedTuple

Metric = float | str  # a text (a digest) is written to metrics.jsonl only


class Meaning(NamedTuple):
    """Unit ("" for a pure number) and a sentence that says what the metric is."""

    unit: str
    text: str


PEAK = "most memory during the stage on any rank: in use on the device, without one of the whole process (run.json)"
CAPPED = ", by k3, of which a token counts at most 10 nats"
NAMES: dict[str, Meaning] = {
    "reward/mean": Meaning("", "mean reward of the rollout's samples, weighted sum of the graders"),
    "reward/std": Meaning("", "sample standard deviation of the rewards over the whole rollout"),
    "reward/overlong": Meaning("", "mean length penalty (--rl-overlong-buffer), at most 0; not in reward/mean"),
    "reward/worker_seconds": Meaning("s", "time that a response took a reward worker of the first rank, mean"),
    "reward/errors": Meaning("samples", "samples whose grader failed or ran out of time, of all sampled groups"),
    "groups/solved": Meaning("share", "groups whose responses are all solved"),
    "groups/unsolved": Meaning("share", "groups without any solved response"),
    "groups/informative": Meaning(
        "share", "groups whose rewards differ: others teach nothing where a group is compared"
    ),
    "groups/dropped": Meaning(
        "share", "groups kept out of training: a grader failed in them, or they fill the batch up"
    ),
    "filtration/distinct": Meaning("share", "responses that filtration chose at least once, so that they are trained"),
    "filtration/reward_mean": Meaning("", "mean task reward of the responses that filtration chose, with repeats"),
    "sampling/rounds": Meaning("rounds", "rounds of prompts that dynamic sampling sampled for the rollout"),
    "sampling/groups_drawn": Meaning("groups", "groups sampled for the rollout, all rounds together"),
    "sampling/informative": Meaning("share", "sampled groups whose task rewards differ; the others were replaced"),
    "sampling/reward_mean": Meaning("", "mean task reward of all sampled groups, replaced ones included"),
    "sampling/brought": Meaning("groups", "resumed: groups that the former rollout deferred to this one"),
    "sampling/carried": Meaning("groups", "deferred: groups kept for the next rollout"),
    "sampling/filled": Meaning("groups", "groups with equal rewards that fill the batch up and count in no loss"),
    "dpo/margin": Meaning("", "beta x (gain of the chosen answer over the reference - that of the rejected one)"),
    "dpo/accuracy": Meaning("share", "pairs whose margin is above 0; in the first step only rounding decides"),
    "dpo/chosen_reward": Meaning("", "beta x (log-prob of the chosen answer - the reference's)"),
    "dpo/rejected_reward": Meaning("", "beta x (log-prob of the rejected answer - the reference's)"),
    "dpo/chosen_logp": Meaning("nats", "log-prob of the chosen answer, summed over its tokens"),
    "dpo/rejected_logp": Meaning("nats", "log-prob of the rejected answer, summed over its tokens"),
    "eval/dpo_margin": Meaning("", "mean margin of the held-out pairs"),
    "eval/dpo_accuracy": Meaning("share", "held-out pairs whose margin is above 0"),
    "response/length_mean": Meaning("tokens", "mean number of trained tokens of a response"),
    "response/length_max": Meaning("tokens", "trained tokens of the longest response"),
    "response/truncated": Meaning("share", "responses cut at the length limit"),
    "response/overlong": Meaning("share", "responses with a length penalty"),
    "episode/turns_mean": Meaning("turns", "mean number of turns of the model in an episode"),
    "episode/turns_max": Meaning("turns", "most turns of the model in an episode"),
    "episode/turn_limit": Meaning("share", "episodes that ended at --rl-max-turns"),
    "episode/observation_tokens": Meaning("tokens", "mean number of tokens between the turns of an episode"),
    "episode/cut": Meaning("observations", "observations that were cut at --rl-max-observation-length"),
    "episode/special": Meaning("observations", "observations with the text of a special token, which stayed text"),
    "episode/seconds": Meaning("s", "mean time that tools and environment of an episode took"),
    "episode/failed": Meaning("episodes", "episodes whose environment failed (--rl-environment-on-error)"),
    "tools/calls": Meaning("calls", "mean number of calls of tools in an episode"),
    "tools/malformed": Meaning("calls", "attempts at a call that cannot be read"),
    "tools/unknown": Meaning("calls", "calls of a tool that is not there"),
    "tools/arguments": Meaning("calls", "calls with wrong arguments"),
    "tools/raised": Meaning("calls", "calls that raised an error"),
    "kl/ref": Meaning("nats", "KL of the policy to the reference, per token"),
    "kl/old": Meaning("nats", "KL of the policy to the one from which the update started, per token" + CAPPED),
    "ratio/mean": Meaning("", "mean probability ratio of policy to old policy; exactly 1 in a rollout's first update"),
    "ratio/min": Meaning("", "smallest probability ratio of policy to old policy"),
    "ratio/max": Meaning("", "largest probability ratio of policy to old policy"),
    "clip_fraction": Meaning("share", "trained tokens whose ratio was clipped"),
    "entropy": Meaning("nats", "mean entropy of the policy's next-token distribution on trained tokens"),
    "logp_diff/mean": Meaning(
        "nats", "mean |log-prob of the engine - of the trainer|, tokens of this rollout's weights"
    ),
    "logp_diff/max": Meaning("nats", "largest |log-prob of the engine - log-prob of the trainer| of these tokens"),
    "rollout/kl": Meaning(
        "nats", "KL of the policy that sampled the rollout to the one from which the update starts" + CAPPED
    ),
    "rollout/weight_mean": Meaning("", "mean importance weight of a token: the trainer's probability / the engine's"),
    "rollout/weight_max": Meaning("", "largest importance weight of a token"),
    "rollout/stale": Meaning("share", "trained tokens of responses that older weights began"),
    "rollout/weight_outside": Meaning("share", "tokens whose importance weight is outside the correction's bounds"),
    "rollout/sequence_weight_mean": Meaning("", "mean importance weight of a whole response"),
    "rollout/sequence_weight_outside": Meaning("share", "responses whose weight is outside the correction's bounds"),
    "rollout/geometric_weight_mean": Meaning("", "mean over responses of the geometric mean of their tokens' weights"),
    "rollout/geometric_weight_outside": Meaning(
        "share", "responses whose geometric mean weight is outside the correction's bounds"
    ),
    "loss": Meaning("", "loss of the update"),
    "loss/policy": Meaning("", "policy part of the loss"),
    "loss/kl": Meaning("", "KL part of the loss, its coefficient included"),
    "loss/entropy": Meaning("", "entropy part of the loss, its coefficient included"),
    "critic/loss": Meaning("", "value loss of the critic's update, per token"),
    "critic/explained_variance": Meaning(
        "", "share of the returns' variance that the critic predicted before the update"
    ),
    "critic/clip_fraction": Meaning("share", "trained tokens whose value loss was clipped"),
    "critic/value_mean": Meaning("", "mean value of the critic before its update"),
    "critic/return_mean": Meaning("", "mean return, the target of the critic"),
    "critic/grad_norm": Meaning("", "gradient norm of the critic before clipping"),
    "critic/lr": Meaning("", "learning rate of the critic's step"),
    "trained/tokens": Meaning("tokens", "response tokens in the update's loss"),
    "trained/sequences": Meaning("samples", "responses in the update's loss; under filtration with repeats"),
    "grad_norm": Meaning("", "gradient norm before clipping"),
    "lr": Meaning("", "learning rate of this step; Megatron's own line has that of the next one"),
    "tokens_per_second": Meaning("tokens/s", "prompt and response tokens per second and device, end to end (Eq. 5)"),
    "tokens_per_second_total": Meaning("tokens/s", "prompt and response tokens per second of all devices"),
    "seconds/iteration": Meaning("s", "wall time of the iteration on its slowest rank, without evaluation"),
    "eval/accuracy": Meaning("share", "held-out prompts solved by greedy decoding"),
    "eval/reward_mean": Meaning("", "mean reward of the greedy held-out responses, weighted sum of the graders"),
    "eval/response_length": Meaning("tokens", "mean length of the greedy held-out responses"),
    "eval/truncated": Meaning("share", "greedy held-out responses cut at the length limit"),
    "eval/errors": Meaning("samples", "held-out responses whose grader failed or ran out of time"),
    "eval/environment_failed": Meaning(
        "episodes", "held-out episodes whose environment failed, which count with 0 as its reward"
    ),
    "version": Meaning("", "weight version that sampled the rollout"),
    "weights/digest": Meaning("", "digest of this `version` in trainer and engine (--rl-verify-weights)"),
    "reshard/bytes_copied": Meaning("bytes", "weights copied inside a rank for the rollout, all ranks together"),
    "reshard/bytes_sent": Meaning("bytes", "weights sent to other ranks for the rollout, all ranks together"),
    "reshard/bytes_received": Meaning("bytes", "weights received from other ranks for the rollout, all ranks together"),
    "reshard/temporary_bytes": Meaning("bytes", "most memory that the transfer used besides the weights, on any rank"),
    "reshard/transfer_seconds": Meaning(
        "s", "transfer of the weights on its slowest rank, with its check if there is one"
    ),
    "lag/mean": Meaning("publications", "publications of weights after those that sampled a response's first token"),
    "lag/max": Meaning("publications", "the largest lag of a response; at most --rl-max-staleness"),
    "lag/token_mean": Meaning("publications", "publications of weights after those that sampled a token"),
    "segments/mean": Meaning("", "parts of a response that different weights sampled"),
    "making/groups": Meaning("groups", "groups in the making, or finished, that go over to the next rollout"),
    "making/responses": Meaning("samples", "responses of these that are not finished"),
    "dropped/responses": Meaning("samples", "responses of groups that were dropped because others were finished first"),
    "dropped/length_mean": Meaning(
        "tokens", "mean number of tokens of these when they were dropped; the trained ones: response/length_mean"
    ),
    "idle/trainers_starved": Meaning("share", "time since the last rollout in which trainers waited for responses"),
    "idle/engines_back_pressure": Meaning(
        "share", "back-pressure: time in which engines apart had no prompt, because training holds admission up"
    ),
    "idle/engines_version": Meaning("share", "time in which engines apart waited for the weights that rows ask for"),
    "engines": Meaning("", "engines apart that are at work when the rollout is ready"),
    "engines/tokens_per_second": Meaning("tokens/s", "response tokens per second and engine apart"),
    "engines/length_mean": Meaning(
        "tokens", "mean length of the responses that engines apart finished since the last rollout"
    ),
    "weights/bytes_published": Meaning("bytes", "weights that the first rank copied to the host"),
    "weights/pull_seconds": Meaning("s", "an engine apart read published weights, beside its steps"),
    "weights/pause_seconds": Meaning("s", "putting new weights into an engine apart, which makes no step meanwhile"),
    "weights/bytes_pulled": Meaning("bytes", "weights that an engine apart read itself for a publication"),
    "dock/bytes_read": Meaning("bytes", "read from the dock for the rollout, by all ranks together"),
    "dock/bytes_written": Meaning("bytes", "written to the dock for the rollout, by all ranks together"),
    "dock/bytes_remote": Meaning("bytes", "the part of both that crossed machines"),
}
_PATTERNS = (
    (re.compile(r"seconds/.+"), Meaning("s", "wall time of the stage on its slowest rank")),
    (re.compile(r"peak_bytes/.+"), Meaning("bytes", PEAK)),
    (re.compile(r"reward/mean/.+"), Meaning("", "mean grade by one of several graders, before its weight")),
    (re.compile(r"eval/pass@\d+"), Meaning("share", "probability that one of k held-out responses is solved")),
)


def meaning(name: str) -> Meaning:
    """What a metric means; a name that is not registered has no unit and no text."""
    if name in NAMES:
        return NAMES[name]
    return next((m for pattern, m in _PATTERNS if pattern.fullmatch(name)), Meaning("", ""))
