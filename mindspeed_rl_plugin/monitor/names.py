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
_UNITS_AND_TEXTS = {
    "reward/mean": ("", "mean reward of the rollout's samples, weighted sum of the graders"),
    "reward/std": ("", "sample standard deviation of the rewards over the whole rollout"),
    "reward/overlong": ("", "mean length penalty (--rl-overlong-buffer), at most 0; not in reward/mean"),
    "reward/call_seconds": ("s", "calls that graded a response, added; mean of the first rank"),
    "reward/worker_seconds": ("s", "time that a response took a reward worker, shared by calls at once; likewise"),
    "reward/errors": ("samples", "samples whose grader failed or ran out of time, of all sampled groups"),
    "groups/solved": ("share", "groups whose responses are all solved"),
    "groups/unsolved": ("share", "groups without any solved response"),
    "groups/informative": ("share", "groups whose rewards differ: others teach nothing where a group is compared"),
    "groups/dropped": ("share", "groups kept out of training: a grader failed in them, or they fill the batch up"),
    "filtration/distinct": ("share", "responses that filtration chose at least once, so that they are trained"),
    "filtration/reward_mean": ("", "mean task reward of the responses that filtration chose, with repeats"),
    "sampling/rounds": ("rounds", "rounds of prompts that dynamic sampling sampled for the rollout"),
    "sampling/groups_drawn": ("groups", "groups sampled for the rollout, all rounds together"),
    "sampling/informative": ("share", "sampled groups whose task rewards differ; the others were replaced"),
    "sampling/reward_mean": ("", "mean task reward of all sampled groups, replaced ones included"),
    "sampling/brought": ("groups", "resumed: groups that the former rollout deferred to this one"),
    "sampling/carried": ("groups", "deferred: groups kept for the next rollout"),
    "sampling/filled": ("groups", "groups with equal rewards that fill the batch up and count in no loss"),
    "dpo/margin": ("", "beta x (gain of the chosen answer over the reference - that of the rejected one)"),
    "dpo/accuracy": ("share", "pairs whose margin is above 0; in the first step only rounding decides"),
    "dpo/chosen_reward": ("", "beta x (log-prob of the chosen answer - the reference's)"),
    "dpo/rejected_reward": ("", "beta x (log-prob of the rejected answer - the reference's)"),
    "dpo/chosen_logp": ("nats", "log-prob of the chosen answer, summed over its tokens"),
    "dpo/rejected_logp": ("nats", "log-prob of the rejected answer, summed over its tokens"),
    "eval/dpo_margin": ("", "mean margin of the held-out pairs"),
    "eval/dpo_accuracy": ("share", "held-out pairs whose margin is above 0"),
    "response/length_mean": ("tokens", "mean number of trained tokens of a response"),
    "response/length_max": ("tokens", "trained tokens of the longest response"),
    "response/truncated": ("share", "responses cut at the length limit"),
    "response/overlong": ("share", "responses with a length penalty"),
    "episode/turns_mean": ("turns", "mean number of turns of the model in an episode"),
    "episode/turns_max": ("turns", "most turns of the model in an episode"),
    "episode/turn_limit": ("share", "episodes that ended at --rl-max-turns"),
    "episode/observation_tokens": ("tokens", "mean number of tokens between the turns of an episode"),
    "episode/cut": ("observations", "observations that were cut at --rl-max-observation-length"),
    "episode/special": ("observations", "observations with the text of a special token, which stayed text"),
    "episode/seconds": ("s", "mean time that tools and environment of an episode took"),
    "episode/failed": ("episodes", "episodes whose environment failed (--rl-environment-on-error)"),
    "tools/calls": ("calls", "mean number of calls of tools in an episode"),
    "tools/malformed": ("calls", "attempts at a call that cannot be read"),
    "tools/unknown": ("calls", "calls of a tool that is not there"),
    "tools/arguments": ("calls", "calls with wrong arguments"),
    "tools/raised": ("calls", "calls that raised an error"),
    "kl/ref": ("nats", "KL of the policy to the reference, per token"),
    "kl/old": ("nats", "KL of the policy to the one from which the update started, per token" + CAPPED),
    "ratio/mean": ("", "mean probability ratio of policy to old policy; exactly 1 in a rollout's first update"),
    "ratio/min": ("", "smallest probability ratio of policy to old policy"),
    "ratio/max": ("", "largest probability ratio of policy to old policy"),
    "clip_fraction": ("share", "trained tokens whose ratio was clipped"),
    "entropy": ("nats", "mean entropy of the policy's next-token distribution on trained tokens"),
    "logp_diff/mean": ("nats", "mean |log-prob of the engine - of the trainer|, tokens of this rollout's weights"),
    "logp_diff/max": ("nats", "largest |log-prob of the engine - log-prob of the trainer| of these tokens"),
    "rollout/kl": ("nats", "KL of the policy that sampled the rollout to the one that the update starts from" + CAPPED),
    "rollout/weight_mean": ("", "mean importance weight of a token: the trainer's probability / the engine's"),
    "rollout/weight_max": ("", "largest importance weight of a token"),
    "rollout/stale": ("share", "trained tokens of responses that older weights began"),
    "rollout/weight_outside": ("share", "tokens whose importance weight is outside the correction's bounds"),
    "rollout/sequence_weight_mean": ("", "mean importance weight of a whole response"),
    "rollout/sequence_weight_outside": ("share", "responses whose weight is outside the correction's bounds"),
    "rollout/geometric_weight_mean": ("", "mean over responses of the geometric mean of their tokens' weights"),
    "rollout/geometric_weight_outside": ("share", "responses whose geometric mean weight is outside its bounds"),
    "loss": ("", "loss of the update"),
    "loss/policy": ("", "policy part of the loss"),
    "loss/kl": ("", "KL part of the loss, its coefficient included"),
    "loss/entropy": ("", "entropy part of the loss, its coefficient included"),
    "critic/loss": ("", "value loss of the critic's update, per token"),
    "critic/explained_variance": ("", "share of the returns' variance that the critic predicted before the update"),
    "critic/clip_fraction": ("share", "trained tokens whose value loss was clipped"),
    "critic/value_mean": ("", "mean value of the critic before its update"),
    "critic/return_mean": ("", "mean return, the target of the critic"),
    "critic/grad_norm": ("", "gradient norm of the critic before clipping"),
    "critic/lr": ("", "learning rate of the critic's step"),
    "trained/tokens": ("tokens", "response tokens in the update's loss"),
    "trained/sequences": ("samples", "responses in the update's loss; under filtration with repeats"),
    "grad_norm": ("", "gradient norm before clipping"),
    "lr": ("", "learning rate of this step; Megatron's own line has that of the next one"),
    "tokens_per_second": ("tokens/s", "prompt and response tokens per second and device, end to end (Eq. 5)"),
    "tokens_per_second_total": ("tokens/s", "prompt and response tokens per second of all devices"),
    "seconds/iteration": ("s", "wall time of the iteration on its slowest rank, without evaluation"),
    "eval/accuracy": ("share", "held-out prompts solved by greedy decoding"),
    "eval/reward_mean": ("", "mean reward of the greedy held-out responses, weighted sum of the graders"),
    "eval/response_length": ("tokens", "mean length of the greedy held-out responses"),
    "eval/truncated": ("share", "greedy held-out responses cut at the length limit"),
    "eval/errors": ("samples", "held-out responses whose grader failed or ran out of time"),
    "eval/environment_failed": ("episodes", "held-out episodes whose environment failed; its reward counts as 0"),
    "version": ("", "weight version that sampled the rollout"),
    "weights/digest": ("", "digest of this `version` in trainer and engine (--rl-verify-weights)"),
    "reshard/bytes_copied": ("bytes", "weights copied inside a rank for the rollout, all ranks together"),
    "reshard/bytes_sent": ("bytes", "weights sent to other ranks for the rollout, all ranks together"),
    "reshard/bytes_received": ("bytes", "weights received from other ranks for the rollout, all ranks together"),
    "reshard/temporary_bytes": ("bytes", "most memory that the transfer used besides the weights, on any rank"),
    "reshard/transfer_seconds": ("s", "transfer of the weights on its slowest rank, with its check if there is one"),
    "lag/mean": ("publications", "publications of weights after those that sampled a response's first token"),
    "lag/max": ("publications", "the largest lag of a response; at most --rl-max-staleness"),
    "lag/token_mean": ("publications", "publications of weights after those that sampled a token"),
    "segments/mean": ("", "parts of a response that different weights sampled"),
    "making/groups": ("groups", "groups in the making, or finished, that go over to the next rollout"),
    "making/responses": ("samples", "responses of these that are not finished"),
    "dropped/responses": ("samples", "responses of groups that were dropped because others were finished first"),
    "dropped/length_mean": ("tokens", "mean length of these when dropped; the trained ones: response/length_mean"),
    "idle/trainers_starved": ("share", "time since the last rollout in which trainers waited for responses"),
    "idle/engines_back_pressure": (
        "share",
        "back-pressure: time in which engines apart had no prompt, because training holds admission up",
    ),
    "idle/engines_version": ("share", "time in which engines apart waited for the weights that rows ask for"),
    "engines": ("", "engines apart that are at work when the rollout is ready"),
    "engines/tokens_per_second": ("tokens/s", "response tokens per second and engine apart"),
    "engines/length_mean": ("tokens", "mean length of responses that engines apart finished since the last rollout"),
    "weights/bytes_published": ("bytes", "weights that the first rank copied to the host"),
    "weights/pull_seconds": ("s", "an engine apart read published weights, beside its steps"),
    "weights/pause_seconds": ("s", "putting new weights into an engine apart, which makes no step meanwhile"),
    "weights/bytes_pulled": ("bytes", "weights that an engine apart read itself for a publication"),
    "dock/bytes_read": ("bytes", "read from the dock for the rollout, by all ranks together"),
    "dock/bytes_written": ("bytes", "written to the dock for the rollout, by all ranks together"),
    "dock/bytes_remote": ("bytes", "the part of both that crossed machines"),
}
NAMES = {name: Meaning(*of) for name, of in _UNITS_AND_TEXTS.items()}
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
