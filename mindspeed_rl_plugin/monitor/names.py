"""Register of metric names: unit and meaning of all metrics in metrics.jsonl; the report uses it."""

from __future__ import annotations

import re
from typing import NamedTuple

Metric = float | str  # a text (a digest) is written to metrics.jsonl only


class Meaning(NamedTuple):
    """Unit ("" for a pure number) and meaning of a metric."""

    unit: str
    text: str


PEAK = "peak device memory in the stage, largest over ranks; without a device, peak of the process"
CAPPED = " (k3, at most 10 nats a token)"
_UNITS_AND_TEXTS = {
    "reward/mean": ("", "mean reward of the rollout"),
    "reward/std": ("", "standard deviation of the rewards of the rollout"),
    "reward/overlong": ("", "mean length penalty, at most 0; not in reward/mean"),
    "reward/call_seconds": ("s", "time of all grading calls of a response, mean on the first rank"),
    "reward/worker_seconds": ("s", "worker time for a response (concurrent calls share it), mean on the first rank"),
    "reward/errors": ("samples", "samples whose grader failed"),
    "groups/solved": ("share", "groups whose responses are all solved"),
    "groups/unsolved": ("share", "groups without any solved response"),
    "groups/informative": ("share", "groups whose rewards differ"),
    "groups/dropped": ("share", "responses left out before filtration and training"),
    "filtration/distinct": ("share", "responses that filtration chose at least once"),
    "filtration/reward_mean": ("", "mean task reward of the chosen responses, with repeats"),
    "sampling/rounds": ("rounds", "rounds that dynamic sampling took"),
    "sampling/groups_drawn": ("groups", "groups sampled in all rounds"),
    "sampling/informative": ("share", "sampled groups whose task rewards differ"),
    "sampling/reward_mean": ("", "mean task reward of all sampled groups"),
    "sampling/brought": ("groups", "groups that the previous rollout deferred to this one"),
    "sampling/carried": ("groups", "groups deferred to the next rollout"),
    "sampling/filled": ("groups", "groups that only fill the batch and count in no loss"),
    "dpo/margin": ("", "dpo/chosen_reward - dpo/rejected_reward"),
    "dpo/accuracy": ("share", "pairs whose margin is above 0; in the first step rounding decides"),
    "dpo/chosen_reward": ("", "beta x (log-prob of the chosen answer - the reference's)"),
    "dpo/rejected_reward": ("", "beta x (log-prob of the rejected answer - the reference's)"),
    "dpo/chosen_logp": ("nats", "log-prob of the chosen answer"),
    "dpo/rejected_logp": ("nats", "log-prob of the rejected answer"),
    "eval/dpo_margin": ("", "mean margin of the held-out pairs"),
    "eval/dpo_accuracy": ("share", "held-out pairs whose margin is above 0"),
    "response/length_mean": ("tokens", "mean trained tokens of a response"),
    "response/length_max": ("tokens", "trained tokens of the longest response"),
    "response/truncated": ("share", "responses cut at the length limit"),
    "response/overlong": ("share", "responses with a length penalty"),
    "episode/turns_mean": ("turns", "mean number of the model's turns in an episode"),
    "episode/turns_max": ("turns", "largest number of the model's turns in an episode"),
    "episode/turn_limit": ("share", "episodes that ended at --rl-max-turns"),
    "episode/observation_tokens": ("tokens", "mean observation tokens in an episode, without what reset returns"),
    "episode/cut": ("observations", "observations cut at --rl-max-observation-length"),
    "episode/special": ("observations", "observations with the text of a special token"),
    "episode/seconds": ("s", "mean time of tools and environment in an episode"),
    "episode/failed": ("episodes", "episodes whose environment failed (--rl-environment-on-error)"),
    "episode/roots": ("conversations", "mean number of conversations of an agent that continue no other"),
    "episode/forks": ("turns", "mean number of other turns of an agent that fork a conversation"),
    **{
        f"episode/differ_{field}": ("conversations", f"conversations that begin anew because the {what} differs")
        for field, what in {
            "role": "role of a message",
            "content": "text of a message",
            "reasoning": "reasoning of a turn",
            "tool_calls": "tool calls of a turn",
            "tool_call_id": "id of a tool's result",
            "tools": "set of tools",
        }.items()
    },
    "tools/calls": ("calls", "mean tool calls in an episode"),
    "tools/malformed": ("calls", "calls that cannot be read"),
    "tools/unknown": ("calls", "calls of an unknown tool"),
    "tools/arguments": ("calls", "calls with wrong arguments"),
    "tools/raised": ("calls", "calls that raised an error"),
    "kl/ref": ("nats", "KL of the policy to the reference, per token"),
    "kl/old": ("nats", "KL of the policy to the old policy, per token" + CAPPED),
    "ratio/mean": ("", "mean probability ratio to the policy before the rollout's first update; 1 in that update"),
    "ratio/min": ("", "smallest probability ratio"),
    "ratio/max": ("", "largest probability ratio"),
    "clip_fraction": ("share", "trained tokens whose ratio was clipped"),
    "entropy": ("nats", "mean entropy of the policy on trained tokens"),
    "logp_diff/mean": ("nats", "mean |engine's - trainer's log-prob| of the tokens that the rollout's weights sampled"),
    "logp_diff/max": ("nats", "largest |engine's - trainer's log-prob| of a token that the rollout's weights sampled"),
    "rollout/kl": ("nats", "KL of the engine's policy at sampling to the old policy" + CAPPED),
    "rollout/weight_mean": ("", "mean importance weight of a token: trainer's probability / engine's"),
    "rollout/weight_max": ("", "largest importance weight of a token"),
    "rollout/stale": ("share", "trained tokens of responses that older weights began"),
    "rollout/weight_outside": ("share", "tokens whose weight is outside the correction's bounds"),
    "rollout/sequence_weight_mean": ("", "mean importance weight of a complete response"),
    "rollout/sequence_weight_outside": ("share", "responses whose weight is outside the correction's bounds"),
    "rollout/geometric_weight_mean": ("", "mean over responses of the geometric mean of their tokens' weights"),
    "rollout/geometric_weight_outside": ("share", "responses whose geometric mean is outside the correction's bounds"),
    "loss": ("", "loss of the update"),
    "loss/policy": ("", "policy part of the loss"),
    "loss/kl": ("", "KL part of the loss"),
    "loss/entropy": ("", "entropy part of the loss"),
    "critic/loss": ("", "value loss of the critic's update, per token"),
    "critic/explained_variance": ("", "share of the returns' variance that the critic predicts, before its update"),
    "critic/clip_fraction": ("share", "trained tokens whose value loss was clipped"),
    "critic/value_mean": ("", "mean value before the update"),
    "critic/return_mean": ("", "mean return, the target of the critic"),
    "critic/grad_norm": ("", "gradient norm of the critic before clipping"),
    "critic/lr": ("", "learning rate of the critic"),
    "router/differ": (
        "share",
        "experts of the engine that the trainer's routers would not choose (--rl-router-replay)",
    ),
    "trained/tokens": ("tokens", "response tokens in the loss"),
    "trained/sequences": ("samples", "responses in the loss; under filtration with repeats"),
    "tokens/shared": (
        "tokens",
        "tokens of a rollout that a pass over all its rows does not compute again (--rl-share-prompts)",
    ),
    "grad_norm": ("", "gradient norm before clipping"),
    "lr": ("", "learning rate of this step; Megatron's log line has that of the next step"),
    "tokens_per_second": ("tokens/s", "prompt and response tokens per second and device"),
    "tokens_per_second_total": ("tokens/s", "prompt and response tokens per second of all devices"),
    "seconds/iteration": ("s", "time of the iteration without evaluation, slowest rank"),
    "eval/accuracy": ("share", "held-out prompts whose greedy response is solved"),
    "eval/reward_mean": ("", "mean reward of the greedy responses"),
    "eval/response_length": ("tokens", "mean length of the greedy responses"),
    "eval/truncated": ("share", "greedy responses cut at the length limit"),
    "eval/errors": ("samples", "responses whose grader failed"),
    "eval/environment_failed": ("episodes", "episodes whose environment failed; its reward counts as 0"),
    "version": ("", "newest version of the weights with which a response of the rollout began"),
    "weights/digest": ("", "digest of the weights of `version`, equal in trainer and engine (--rl-verify-weights)"),
    "reshard/bytes_copied": ("bytes", "weights copied inside ranks, of all ranks"),
    "reshard/bytes_sent": ("bytes", "weights sent, of all ranks"),
    "reshard/bytes_received": ("bytes", "weights received, of all ranks"),
    "reshard/temporary_bytes": ("bytes", "peak memory of the transfer in addition to the weights, largest over ranks"),
    "reshard/transfer_seconds": ("s", "time of the transfer and its check on the slowest rank"),
    "lag/mean": ("publications", "mean lag of a response: publications after the weights that sampled its first token"),
    "lag/max": ("publications", "the largest lag of a response; at most --rl-max-staleness"),
    "lag/token_mean": ("publications", "mean lag of a response token: publications after the weights that sampled it"),
    "segments/mean": ("", "mean number of parts of a response that different weights sampled"),
    "making/groups": ("groups", "groups that are left for the next rollout, finished or not"),
    "making/responses": ("samples", "unfinished responses that are left for the next rollout"),
    "dropped/responses": ("samples", "responses that --rl-oversample-drop threw away"),
    "dropped/length_mean": ("tokens", "mean length of the responses that --rl-oversample-drop threw away"),
    "idle/trainers_starved": ("share", "time since the previous rollout in which trainers waited for responses"),
    "idle/engines_back_pressure": (
        "share",
        "time in which async engines had no prompt, because training is slower",
    ),
    "idle/engines_version": ("share", "time in which async engines waited for the weights that rows need"),
    "engines": ("", "async engines at work when the rollout is ready"),
    "engines/tokens_per_second": ("tokens/s", "response tokens per second of an async engine"),
    "engines/length_mean": ("tokens", "mean length of the responses that async engines finished"),
    "weights/bytes_published": ("bytes", "weights that the first rank copied to the host"),
    "weights/pull_seconds": ("s", "mean time to read a version of the weights, while the engine generates"),
    "weights/pause_seconds": ("s", "mean time in which an engine stops generating to take a version"),
    "weights/bytes_pulled": (
        "bytes",
        "weights that an engine read from trainers; 0 if another engine on its machine did",
    ),
    "dock/bytes_read": ("bytes", "read from the dock, by all ranks"),
    "dock/bytes_written": ("bytes", "written to the dock, by all ranks"),
    "dock/bytes_remote": ("bytes", "read or written between machines, by all ranks"),
}
# Metrics that depend on the machine's state, so that two equal iterations do not share them; `iteration` is none.
NOT_REPEATED = re.compile(r"iteration|time|.*(seconds|bytes|per_second).*|(idle|engines)/.*")
METRICS = {name: Meaning(*of) for name, of in _UNITS_AND_TEXTS.items()}
_PATTERNS = (
    (re.compile(r"seconds/.+"), Meaning("s", "time of the stage on its slowest rank")),
    (re.compile(r"peak_bytes/.+"), Meaning("bytes", PEAK)),
    (re.compile(r"router/differ/\d+"), Meaning("share", "router/differ of this layer")),
    (re.compile(r"reward/mean/.+"), Meaning("", "mean grade by one of several graders, before its weight")),
    (re.compile(r"eval/pass@\d+"), Meaning("share", "probability that at least one of K responses is solved")),
)


def meaning(name: str) -> Meaning:
    """Meaning of a metric; without unit and text for a name that is not registered."""
    if name in METRICS:
        return METRICS[name]
    return next((m for pattern, m in _PATTERNS if pattern.fullmatch(name)), Meaning("", ""))
