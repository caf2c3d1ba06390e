"""Flags of data, generation, rewards, forward passes, weights, dock and monitoring."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from mindspeed_rl_plugin.config.flag import DPO_ONLY, FlagReader, flag, split_words

# vLLM raises lower temperatures to this value: its log-probs would not be those of the given temperature.
LOWEST_TEMPERATURE = 0.01
_LORA = FlagReader("--rl-lora-rank", lambda _, c: c.lora.lora_rank is not None)


@dataclass(frozen=True)
class DataConfig:
    """Prompts: where they come from and how they become tokens."""

    prompt_data: tuple[str, ...] = flag(
        (), "prompts: JSONL, JSON or Parquet files, or directories of saved Hugging Face datasets", pairs=True
    )
    prompt_key: str = flag("prompt", "field that holds the prompt: a string, or a list of chat messages", pairs=True)
    chosen_key: str = flag(
        "chosen", "field that holds the better answer of a preference pair", reader=DPO_ONLY, pairs=True
    )
    rejected_key: str = flag(
        "rejected", "field that holds the worse answer of a preference pair", reader=DPO_ONLY, pairs=True
    )
    answer_key: str = flag("answer", "field that holds the right answer, for graders; a.b is field b of object a")
    apply_chat_template: bool = flag(False, "render every prompt with the tokenizer's chat template", pairs=True)
    max_prompt_length: int = flag(
        1024, "longest prompt; longer prompts are dropped, and counted", unit="tokens", least=1, pairs=True
    )
    tokenizer: str | None = flag(
        None, "directory of a Hugging Face tokenizer (default: --rl-hf-model, else the script's tokenizer)", pairs=True
    )
    smaller_tokenizer: bool = flag(
        False, "accept a tokenizer that leaves more than a tenth of the model's vocabulary without a token", pairs=True
    )
    trust_remote_code: bool = flag(
        False, "run the Python code in the directory of a tokenizer or reward model: read the code first", pairs=True
    )
    data_seed: int | None = flag(None, "seed of the prompts' order (default: --seed)", pairs=True)


@dataclass(frozen=True)
class RolloutConfig:
    """Generation: how many responses, how they are sampled, and by which engine."""

    rollout_prompts: int | None = flag(
        None, "prompts of a rollout (default: --global-batch-size / --rl-samples-per-prompt)", unit="prompts", least=1
    )
    samples_per_prompt: int = flag(8, "responses sampled for each prompt (the group size)", unit="responses", least=1)
    max_response_length: int = flag(
        1024, "longest response; longer responses are cut (dpo drops their pairs)", unit="tokens", least=1, pairs=True
    )
    temperature: float = flag(1.0, "temperature of sampling and of all log-probs", least=LOWEST_TEMPERATURE, pairs=True)
    top_p: float = flag(1.0, "bound of nucleus sampling; below 1 the update's ratio is biased", above=0, most=1)
    top_k: int = flag(0, "sample among the N likeliest tokens; above 0 the update's ratio is biased; 0: all", least=0)
    stop: tuple[str, ...] = flag((), "strings that end a response")
    stop_token_ids: tuple[int, ...] = flag(
        (), "token ids that end a response, in addition to those of the tokenizer, its template and --rl-hf-model"
    )
    ignore_eos: bool = flag(False, "always sample --rl-max-response-length tokens (for benchmarks)")
    rollout_seed: int | None = flag(None, "seed of the responses (default: --seed)")
    generate_tp: int = flag(1, "tensor parallel size of the rollout engine", unit="ranks", least=1)
    generate_ep: int = flag(
        1,
        "number of ranks over which whole experts are spread: --rl-generate-tp (the ranks of one engine) or a multiple "
        "of it (several engines then share the experts); 1: each engine cuts each expert over its ranks",
        unit="ranks",
        least=1,
    )
    hf_model: str | None = flag(
        None,
        "directory of the Hugging Face model: its config.json must fit Megatron's arguments, and its "
        "generation_config.json may name further tokens that end a response; weights are not read",
        pairs=True,
    )
    engine_dtype: str = flag(
        "auto",
        "dtype of the engine's weights; auto: Megatron's dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    kv_cache_gb: float = flag(1.0, "KV cache of an engine rank, on a host without accelerator", unit="GiB", above=0)
    device_memory_utilization: float | None = flag(
        None,
        "share of the device's memory that the engine may use while the trainer is offloaded (default: the share that "
        "is free then, minus 0.1 or 2 GiB, whichever is more; 0.6 with --rl-reward-model-device accelerator)",
        above=0,
        most=1,
    )
    max_running: int = flag(
        256, "largest number of sequences that an engine decodes at the same time", unit="sequences", least=1
    )
    graph_sizes: tuple[int, ...] = flag(
        (), "batch sizes of the engine's graphs, on an accelerator (default: vLLM's)", unit="sequences", least=1
    )
    request_seeds: bool = flag(
        False,
        "each response has its own random generator, so that it does not depend on the other responses in the batch. "
        "Without this flag they have their own generators only where this costs nothing: on a CPU, or if one kernel of "
        "vLLM samples for all responses. Elsewhere all responses of an engine share one generator, and this flag costs "
        "three kernel launches per sequence and step",
    )


@dataclass(frozen=True)
class RewardConfig:
    """Rewards: which graders, with which weights and limits."""

    reward: tuple[str, ...] = flag(
        (),
        "graders: math, exact, regex, environment, path/to/file.py:function or model:DIR (a reward model), each with "
        "an optional =WEIGHT; a response is solved if every grader with a positive weight gives at least 1 (default: "
        "environment, if --rl-environment is given)",
    )
    reward_model_device: str = flag(
        "host",
        "where each grader process runs reward models: host, or accelerator (that of its rank, shared with the engine)",
        choices=("host", "accelerator"),
    )
    reward_regex: str | None = flag(
        None, "pattern of the grader regex; group 1 (without groups: all) of the last match must be the answer"
    )
    reward_timeout: tuple[float, ...] = flag(
        (10.0,),
        "time limit of a grading call, after which its process is killed (one limit for all graders, or one for each)",
        unit="seconds",
    )
    reward_workers: int = flag(2, "grader processes on each rank that grades", unit="processes", least=1)
    reward_on_error: str = flag(
        "stop",
        "if a grader fails: stop the run, count the grade as zero, or drop the group; a failure of math, exact or "
        "regex always counts as zero",
        choices=("stop", "zero", "drop"),
    )
    stage: tuple[str, ...] = flag(
        (), "your own stages, each path/to/file.py:Class, run after the rewards (docs/stages.md)"
    )


@dataclass(frozen=True)
class ForwardConfig:
    """Forward passes of the trainer: old and reference log-probs, and the update."""

    max_tokens_per_microbatch: int | None = flag(
        None,
        "micro-batches of at most N tokens (with padding, over all context parallel ranks), not of --micro-batch-size "
        "rows; data parallel ranks get about equally many tokens (default: off)",
        unit="tokens",
        pairs=True,
    )
    pack_sequences: bool = flag(
        False,
        "concatenate the rows of a micro-batch without padding (needs --rl-max-tokens-per-microbatch)",
        pairs=True,
    )
    share_prompts: bool = flag(
        False,
        "rows of a group with the same first tokens (the prompt, and what responses have in common) run these once in "
        "each micro-batch; includes --rl-pack-sequences",
        pairs=True,
    )
    router_replay: str | None = flag(
        None,
        "send each token to experts that were chosen before. rollout: those of the engine, in the passes of old "
        "log-probs and the update; old: those of the pass of old log-probs, in the update (default: routers choose "
        "anew in each pass)",
        choices=("rollout", "old"),
    )
    logprob_chunk_tokens: int | None = flag(
        None,
        "compute log-probs, and their backward, for one slice of the vocabulary after the other; a slice has as many "
        "logits as N tokens with the complete vocabulary; 0: no slices (default: slices of 128 MiB of fp32 logits on "
        "a rank, 4 MiB without accelerator, but with at least 1024 vocabulary entries; no slices if two suffice)",
        unit="tokens",
        least=0,
        pairs=True,
    )
    old_logprobs: str = flag(
        "auto",
        "source of old log-probs (before the update). pass: a separate forward pass; auto: the update's forward pass, "
        "if a rollout serves one optimizer step and no KL reward or dump reads them, else a separate pass",
        choices=("auto", "pass"),
    )

    @property
    def packed_by(self) -> str | None:
        """The flag because of which rows are concatenated without padding; None: they are padded."""
        names = {"--rl-share-prompts": self.share_prompts, "--rl-pack-sequences": self.pack_sequences}
        return next((name for name, given in names.items() if given), None)


@dataclass(frozen=True)
class LoraConfig:
    """LoRA: small adapters are trained, and the model itself stays as it is."""

    lora_rank: int | None = flag(
        None,
        "train adapters of this rank on linear layers, and nothing else; the weights of --load do not change, and are "
        "the reference (default: train the whole model)",
        least=1,
        pairs=True,
    )
    lora_alpha: float | None = flag(
        None,
        "adapters are scaled by this number / --rl-lora-rank (default: the rank)",
        above=0,
        reader=_LORA,
        pairs=True,
    )
    lora_targets: tuple[str, ...] = flag(
        (),
        "linear layers with an adapter, by the end of their names, such as q_proj, experts.down_proj (of the Hugging "
        "Face model) or linear_fc1 (Megatron's) (default: all of attention and MLP)",
        reader=_LORA,
        pairs=True,
    )

    @property
    def target_names(self) -> tuple[str, ...]:
        return split_words(self.lora_targets)

    @property
    def lora_scale(self) -> float:
        return (self.lora_alpha or self.lora_rank) / self.lora_rank


@dataclass(frozen=True)
class ReshardConfig:
    """Weights: how the engine gets them from the trainer, and what is offloaded during generation."""

    reshard: str = flag(
        "stream",
        "how the engine gets weights: stream (a rank gets what it lacks, in buckets) or allgather (each rank gathers "
        "all shards in a temporary buffer, as in the paper MindSpeed RL)",
        choices=("stream", "allgather"),
    )
    swap: tuple[str, ...] = flag(
        ("params", "grads", "optimizer"),
        "what is offloaded during generation: params, grads, optimizer (separated by commas or spaces), or none",
        choices=("params", "grads", "optimizer", "none"),
    )
    reshard_bucket_mb: int = flag(256, "size of a bucket of weights in the reshard", unit="MiB", least=1)
    verify_weights: bool = flag(False, "compare digests of trainer's and engine's tensors after each reshard")

    @property
    def swap_names(self) -> tuple[str, ...]:
        return split_words(self.swap)

    @property
    def offloaded(self) -> tuple[str, ...]:
        """State that is offloaded during generation."""
        return tuple(name for name in self.swap_names if name != "none")


@dataclass(frozen=True)
class DockConfig:
    """The transfer dock, through which the stages pass rows."""

    dock: str | None = flag(
        None, "ignored: rows are in shared memory, and are sent to other machines by TCP", pairs=True
    )
    dock_gb: float = flag(0.0, "largest memory of the rows on one machine; 0: no limit", unit="GiB", least=0)
    dock_rows: int = flag(0, "largest number of rows on one machine; 0: no limit", unit="rows", least=0)


@dataclass(frozen=True)
class Traced:
    """What --rl-trace asks for: iterations, and stages in them; if `stages` is empty, complete iterations."""

    first: int
    last: int
    stages: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Traced:
        """From `FIRST[-LAST][:STAGE,...]`. Raises argparse.ArgumentTypeError for anything else."""
        found = re.fullmatch(r"(\d+)(?:-(\d+))?(?::([\w.-]+(?:,[\w.-]+)*))?", text)
        if not found or not 1 <= int(found[1]) <= int(found[2] or found[1]):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not FIRST[-LAST][:STAGE,...], as 12-13:generate,update; iterations count from 1"
            )
        return cls(int(found[1]), int(found[2] or found[1]), tuple(found[3].split(",")) if found[3] else ())


@dataclass(frozen=True)
class MonitorConfig:
    """What is measured, where it is written, and how often the model is evaluated."""

    run_dir: str | None = flag(None, "directory of metrics and stage events (default: SAVE/rl)", pairs=True)
    dump_dir: str | None = flag(None, "directory into which every rollout is written as Parquet (default: none)")
    eval_data: tuple[str, ...] = flag((), "held-out prompts, in the formats of --rl-prompt-data", pairs=True)
    eval_every: int = flag(
        10,
        "iterations between evaluations; the model is also evaluated before the first update and after the last",
        unit="iterations",
        least=1,
        pairs=True,
    )
    eval_prompts: int = flag(
        0, "evaluate on the first N held-out prompts; 0: on all", unit="prompts", least=0, pairs=True
    )
    eval_pass_k: int = flag(0, "also sample k = N responses per prompt and report pass@k; 0: only greedy", least=0)
    wait_timeout: float = flag(
        1800.0,
        "longest wait for another rank (also while its stage runs) and for the engine's next response. Nine tenths of "
        "it are the limit of all grading of a rank (streamed, async: of a batch), and of the start of graders, tools, "
        "environments. Collectives in Megatron's forward and backward have the limit --distributed-timeout-minutes",
        unit="seconds",
        above=0,
        pairs=True,
    )
    trace: str | None = flag(
        None,
        "FIRST[-LAST][:STAGE,...], for example 12-13:generate,update: torch's profiler writes a trace of these "
        "iterations, or only of these stages in them, into SAVE/rl/trace",
        form=Traced.parse,
        pairs=True,
    )
    trace_ranks: tuple[int, ...] = flag(
        (0,), "ranks that --rl-trace records; ranks of --rl-generators have the last numbers", pairs=True
    )
    stack_signal: str = flag(
        "SIGUSR2",
        "signal at which a process writes the Python stacks of its threads, for `doctor --job SAVE --stacks`",
        choices=("SIGUSR1", "SIGUSR2", "none"),
        pairs=True,
    )
    progress: bool = flag(True, "progress bar during generation, if stdout is a terminal", pairs=True)

    def directory(self, save: str | None) -> str:
        """The run's directory. save: --save."""
        return self.run_dir or f"{save}/rl"
