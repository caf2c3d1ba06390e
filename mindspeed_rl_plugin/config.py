"""RLConfig: every `--rl-*` flag, its default, unit and help; flags are generated from these fields.

A field `samples_per_prompt` becomes the flag `--rl-samples-per-prompt` and the attribute
`args.rl_samples_per_prompt` of Megatron's own parser. `RLConfig.from_args` reads them back; nothing
here changes a value that the user gave. A preset (`--rl-algorithm`) fills only flags left at None.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from dataclasses import dataclass, field
from types import UnionType
from typing import Any

PREFIX = "rl_"


def flag(default: Any, help: str, *, choices: tuple[str, ...] | None = None, unit: str = "") -> Any:
    """A config field that is also a flag. A tuple default makes it take several values; False a switch."""
    return field(default=default, metadata={"help": help, "choices": choices, "unit": unit})


@dataclass(frozen=True)
class DataConfig:
    """Prompts: where they come from and how they become tokens."""

    prompt_data: tuple[str, ...] = flag(
        (), "prompts: JSONL, JSON or Parquet files or saved dataset directories, one or several"
    )
    prompt_key: str = flag("prompt", "field that holds the prompt: a string, or a list of chat messages")
    chosen_key: str = flag("chosen", "field that holds the better answer of a preference pair")
    rejected_key: str = flag("rejected", "field that holds the worse answer of a preference pair")
    answer_key: str = flag("answer", "field that holds the ground truth for the reward; dots reach into nested ones")
    apply_chat_template: bool = flag(False, "render every prompt with the tokenizer's chat template")
    max_prompt_length: int = flag(1024, "longest prompt kept; longer ones are dropped and counted", unit="tokens")
    tokenizer: str | None = flag(
        None, "Hugging Face tokenizer directory (default: --rl-hf-model, then --tokenizer-model)"
    )
    data_seed: int | None = flag(None, "seed of the prompts' order (default: --seed)")


@dataclass(frozen=True)
class RolloutConfig:
    """Generation: how many responses, how they are drawn, and by which engine."""

    rollout_prompts: int | None = flag(
        None, "prompts of one rollout (default: --global-batch-size / --rl-samples-per-prompt)", unit="prompts"
    )
    samples_per_prompt: int = flag(8, "responses drawn for each prompt, the group size N", unit="responses")
    max_response_length: int = flag(1024, "longest response; longer ones are cut", unit="tokens")
    temperature: float = flag(1.0, "sampling temperature, at least 0.01; log-probs everywhere are taken at it")
    top_p: float = flag(1.0, "nucleus sampling bound in (0, 1]; below 1 the ratio of the update is biased")
    top_k: int = flag(0, "sample among the k likeliest tokens; 0 means all")
    stop: tuple[str, ...] = flag((), "strings that end a response")
    stop_token_ids: tuple[int, ...] = flag((), "token ids that end a response, besides the tokenizer's eos")
    ignore_eos: bool = flag(False, "draw --rl-max-response-length tokens whatever comes (benchmarks)")
    rollout_seed: int | None = flag(None, "seed of the responses (default: --seed)")
    generate_tp: int = flag(1, "tensor parallel size of the rollout engine", unit="ranks")
    generate_ep: int = flag(
        1, "over how many ranks the rollout engine spreads whole experts; 1: it cuts each over its ranks", unit="ranks"
    )
    hf_model: str | None = flag(
        None, "Hugging Face directory whose config is checked against Megatron's arguments; weights are not read"
    )
    engine_dtype: str = flag(
        "auto",
        "dtype of the engine's weights; auto takes Megatron's",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    kv_cache_gb: float = flag(1.0, "KV cache of one engine rank on a host without accelerator", unit="GiB")
    device_memory_utilization: float | None = flag(
        None,
        "share of the device's memory that the engine may use while the trainer is offloaded (default: what is then "
        "free, less a tenth of the device; 0.6 with --rl-reward-model-device accelerator)",
    )
    max_running: int = flag(256, "most sequences that an engine decodes at once", unit="sequences")


@dataclass(frozen=True)
class RewardConfig:
    """Rewards: which graders, with which weights and limits."""

    reward: tuple[str, ...] = flag(
        (),
        "graders: math, exact, regex, path/to/file.py:function or model:DIR (a reward model), each with an optional "
        "=WEIGHT; a response is solved when every grader of positive weight gives at least 1",
    )
    reward_model_device: str = flag(
        "host",
        "where reward models run, in every grader process: the host, or the accelerator of the rank beside the engine",
        choices=("host", "accelerator"),
    )
    reward_regex: str | None = flag(
        None, "pattern of the regex grader; its group 1 (or the match) is compared to the answer"
    )
    reward_timeout: tuple[float, ...] = flag(
        (10.0,),
        "limit of one grading call, one for all graders or one for each --rl-reward; the worker is killed beyond it",
        unit="seconds",
    )
    reward_workers: int = flag(2, "grader processes on each rank that grades", unit="processes")
    reward_on_error: str = flag(
        "stop",
        "what a failing grader does: stop the run, count as zero, or drop its group",
        choices=("stop", "zero", "drop"),
    )


@dataclass(frozen=True)
class AlgorithmConfig:
    """The algorithm: a preset, and each of its parts by a flag of its own."""

    algorithm: str | None = flag(
        None, "turns RL on: the preset to train with; `python -m mindspeed_rl_plugin algorithms` prints all of them"
    )
    advantage: str | None = flag(None, "advantage estimator (default: the preset's)")
    loss: str | None = flag(None, "policy loss (default: the preset's)")
    aggregation: str | None = flag(None, "how token losses become one number (default: the preset's)")
    clip_low: float | None = flag(None, "ratio bound below: 1 - clip_low (default: the loss's)")
    clip_high: float | None = flag(None, "ratio bound above: 1 + clip_high (default: the loss's)")
    dual_clip: float | None = flag(None, "bound c of dual clip for negative advantages, > 1; off unless set")
    sapo_tau_positive: float | None = flag(None, "temperature of the gate of sapo for advantages above 0 (default: 1)")
    sapo_tau_negative: float | None = flag(None, "temperature of the gate of sapo for the others (default: 1.05)")
    kl_loss_coef: float | None = flag(None, "weight of the KL to the reference in the loss (default: the preset's)")
    kl_estimator: str | None = flag(
        None, "KL estimator (default: the preset's)", choices=("k1", "k2", "k3", "k3-unbiased")
    )
    kl_reward_coef: float | None = flag(
        None, "weight of the KL to the reference that is taken from the reward (default: the preset's)"
    )
    kl_reward_estimator: str | None = flag(
        None, "KL estimator in the reward (default: the preset's)", choices=("k1", "k2", "k3", "k3-unbiased")
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    advantage_eps: float = flag(1e-6, "added to the group's standard deviation")
    gamma: float = flag(1.0, "discount of the reward a token, for reinforce++ and gae")
    gae_lambda: float = flag(1.0, "lambda of gae")
    value_clip: float = flag(0.2, "bound on how far a value may move from the rollout's in the critic's loss")
    critic_load: str | None = flag(
        None,
        "checkpoint of the policy's architecture that the critic starts from: a critic's (SAVE/iter_*/critic), or "
        "a language model's, with a fresh value head (default: the policy's weights and a fresh head)",
    )
    critic_lr: float | None = flag(
        None, "peak learning rate of the critic, whose schedule is the policy's scaled to it (default: --lr)"
    )
    critic_warmup: int = flag(0, "first iterations, in which only the critic is trained", unit="iterations")
    correction: str = flag(
        "off",
        "weights for the gap between the policy that drew a token and the one that the update starts from; their "
        "metrics are logged in any case",
        choices=("off", "truncate", "mask", "decoupled"),
    )
    correction_level: str = flag("token", "unit that a correction weighs", choices=("token", "sequence"))
    correction_low: float | None = flag(None, "least weight of the correction (default: the correction's)")
    correction_high: float | None = flag(None, "largest weight of the correction (default: the correction's)")
    overlong_buffer: int | None = flag(
        None,
        "length below --rl-max-response-length over which the penalty on long responses rises, 0: none (default: the "
        "preset's)",
        unit="tokens",
    )
    overlong_penalty: float = flag(1.0, "penalty of a response as long as the limit, subtracted from its reward")
    dynamic_sampling: bool | None = flag(
        None, "replace groups whose rewards are all equal by further ones (default: the preset's)"
    )
    dynamic_sampling_rounds: int = flag(
        10,
        "most rounds of --rl-rollout-prompts prompts that dynamic sampling draws for one rollout; what is too much "
        "waits for the next one, and after the last round groups that no loss counts fill the batch up",
        unit="rounds",
    )
    filtration: str | None = flag(
        None,
        "resample the responses of a prompt by their rewards (default: the preset's)",
        choices=("none", "best-worst", "best-random", "pow"),
    )
    filtration_power: float = flag(2.0, "exponent p of filtration pow, weight |R|^p")
    filtration_whole_batch: bool = flag(
        False, "resample over all responses of an optimizer step instead of a prompt's, as verl does"
    )
    dpo_loss: str = flag("sigmoid", "loss of a pair", choices=("sigmoid", "hinge", "ipo"))
    dpo_beta: float = flag(0.1, "beta of dpo: how strongly the reference holds")
    dpo_label_smoothing: float = flag(0.0, "chance that a pair is labelled the wrong way round, sigmoid only")
    dpo_length_norm: bool = flag(False, "compare mean log-probs of the two responses of a pair instead of sums")
    dpo_reference_cache: str | None = flag(
        None, "directory for the reference's log-probs of all pairs, taken once (default: SAVE/rl/reference)"
    )
    ppo_epochs: int = flag(1, "passes over one rollout batch", unit="epochs")


@dataclass(frozen=True)
class ForwardConfig:
    """Forward passes of the trainer: old and reference log-probs, and the update."""

    max_tokens_per_microbatch: int | None = flag(
        None,
        "micro-batches of rows with at most so many tokens, padding included, over a group of context parallel ranks, "
        "in the place of --micro-batch-size rows; data parallel ranks are balanced by tokens (default: off)",
        unit="tokens",
    )
    pack_sequences: bool = flag(
        False, "rows of a micro-batch stand behind each other without padding (with --rl-max-tokens-per-microbatch)"
    )
    logprob_chunk_tokens: int | None = flag(
        None,
        "take log-probs from the hidden states, with the logits of so many tokens at once and computed again in "
        "backward; 0: from all logits of a micro-batch (default: so many that their fp32 logits fill 128 MiB on a "
        "rank, 4 MiB without accelerator, or 1024 columns of every token; 0 where those of a whole micro-batch fill at "
        "most twice that)",
        unit="tokens",
    )
    old_logprobs: str = flag(
        "auto",
        "log-probs of the policy before the update, the ratio's denominator: pass, by a forward pass of their own; "
        "auto, the update's own where a rollout makes one optimizer step and neither reward nor dump reads them",
        choices=("auto", "pass"),
    )


@dataclass(frozen=True)
class ReshardConfig:
    """Weights between trainer and engine, and what leaves the device meanwhile."""

    reshard: str = flag(
        "stream",
        "how weights come to the engine: stream (what a rank lacks, bucket by bucket), allgather (all shards into a "
        "temporary buffer), naive (all shards; the training weights stay on the device during generation)",
        choices=("naive", "allgather", "stream"),
    )
    swap: tuple[str, ...] = flag(
        ("params", "grads", "optimizer"),
        "what leaves the device during generation: params, grads, optimizer (with commas or spaces), or none",
    )
    reshard_bucket_mb: int = flag(256, "bucket of the streaming reshard, and round of the others", unit="MiB")
    verify_weights: bool = flag(False, "compare digests of every tensor in trainer and engine after each reshard")

    @property
    def swap_names(self) -> tuple[str, ...]:
        """The words of `swap`, whether given with commas or spaces."""
        return tuple(name for words in self.swap for name in words.split(","))

    @property
    def offloaded(self) -> tuple[str, ...]:
        """What leaves the device during generation: `naive` keeps the training weights there."""
        return tuple(n for n in self.swap_names if n not in ("none", "params" if self.reshard == "naive" else "none"))


@dataclass(frozen=True)
class DockConfig:
    """The transfer dock, where the stages leave rows for each other."""

    dock: str = flag(
        "auto",
        "where rows lie: local (the first rank's process), shm (shared memory of each machine), ray (the same, kept by "
        "a process that Ray places on each machine and restarts; joins RAY_ADDRESS or starts Ray for the job), auto: "
        "local for one rank, shm for several, ray on several machines where RAY_ADDRESS is set",
        choices=("auto", "local", "shm", "ray"),
    )
    dock_gb: float = flag(0.0, "most that the rows of one machine may take; 0 means no limit", unit="GiB")
    dock_rows: int = flag(0, "most rows that one machine may hold; 0 means no limit", unit="rows")


@dataclass(frozen=True)
class MonitorConfig:
    """What is measured, where it is written, and how often the model is evaluated."""

    run_dir: str | None = flag(None, "metrics, stage events and dumps go here (default: SAVE/rl)")
    dump_dir: str | None = flag(None, "write every rollout here as Parquet (default: off)")
    eval_data: tuple[str, ...] = flag((), "held-out prompts, in the forms of --rl-prompt-data")
    eval_every: int = flag(10, "iterations between evaluations; one is also run before the first update")
    eval_prompts: int = flag(0, "evaluate on the first n held-out prompts; 0 means all", unit="prompts")
    eval_pass_k: int = flag(0, "also sample k responses a prompt and report pass@k; 0 means greedy only")
    wait_timeout: float = flag(
        1800.0,
        "deadline of every wait of ours for another rank, its stage included, and for the engine's next response; nine "
        "tenths of it for all grading of one rank, and for loading its graders. Collectives inside Megatron's forward "
        "and backward have --distributed-timeout-minutes",
        unit="seconds",
    )
    progress: bool = flag(True, "progress bar during generation when stdout is a terminal")


@dataclass(frozen=True)
class RLConfig:
    """All groups. Built by `from_args`, never mutated."""

    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    forward: ForwardConfig = field(default_factory=ForwardConfig)
    reshard: ReshardConfig = field(default_factory=ReshardConfig)
    dock: DockConfig = field(default_factory=DockConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> RLConfig:
        """Read the parsed `rl_*` attributes back into the groups."""
        groups = {}
        for name, group in _groups().items():
            groups[name] = group(
                **{f.name: _value(f, getattr(args, PREFIX + f.name)) for f in dataclasses.fields(group)}
            )
        return cls(**groups)


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add every flag to Megatron's parser, one titled argument group a config group. Idempotent.

    Raises ValueError when the parser already owns a flag of that name with another meaning.
    """
    taken = {s: a for a in parser._actions for s in a.option_strings}
    if getattr(taken.get("--rl-algorithm"), "mindspeed_rl", False):
        return parser
    for group_name, group in _groups().items():
        section = parser.add_argument_group(f"reinforcement learning: {group_name}", (group.__doc__ or "").strip())
        for f in dataclasses.fields(group):
            name = flag_name(f.name)
            if name in taken:
                raise ValueError(
                    f"{name} already exists in this Megatron with another meaning; rename the plugin's field"
                )
            section.add_argument(name, **_argparse_kwargs(group, f)).mindspeed_rl = True
    return parser


def flag_name(field_name: str) -> str:
    """`samples_per_prompt` -> `--rl-samples-per-prompt`."""
    return "--" + (PREFIX + field_name).replace("_", "-")


def flag_names() -> list[str]:
    """Every flag, `--no-` twins of default-on switches included."""
    names = []
    for group in _groups().values():
        for f in dataclasses.fields(group):
            names.append(flag_name(f.name))
            if f.default is True or _is_switch(group, f):
                names.append("--no-" + flag_name(f.name)[2:])
    return names


def rl_enabled(args: argparse.Namespace) -> bool:
    """Whether the user asked for RL at all; without it the plugin changes nothing."""
    return getattr(args, "rl_algorithm", None) is not None


def _groups() -> dict[str, type]:
    hints = typing.get_type_hints(RLConfig)
    return {f.name: hints[f.name] for f in dataclasses.fields(RLConfig)}


def _is_switch(group: type, f: dataclasses.Field) -> bool:
    """Whether a field is a switch that the preset sets unless the user does."""
    return typing.get_type_hints(group)[f.name] == bool | None


def _value(f: dataclasses.Field, value: Any) -> Any:
    return tuple(value) if isinstance(f.default, tuple) else value


def _argparse_kwargs(group: type, f: dataclasses.Field) -> dict[str, Any]:
    text = f.metadata["help"].replace("%", "%%")
    if f.metadata["unit"]:
        text += f" [{f.metadata['unit']}]"
    if f.default not in (None, ()) and not isinstance(f.default, bool):
        text += f" (default: {' '.join(map(str, f.default)) if isinstance(f.default, tuple) else f.default})"
    kwargs: dict[str, Any] = {"help": text, "default": list(f.default) if isinstance(f.default, tuple) else f.default}
    if isinstance(f.default, bool) or _is_switch(group, f):
        kwargs["action"] = "store_true" if f.default is False else argparse.BooleanOptionalAction
        return kwargs
    hint = typing.get_type_hints(group)[f.name]
    if typing.get_origin(hint) is UnionType:
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
        kwargs["nargs"] = "*"
    kwargs["type"] = hint
    if f.metadata["choices"]:
        kwargs["choices"] = f.metadata["choices"]
    return kwargs
