"""Flags of everything but the algorithm: data, generation, rewards, forward passes, weights, dock, monitoring."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl_plugin.config.flag import DPO_ONLY, flag, split_words

# vLLM raises lower temperatures to this one, and then reports log-probs of a temperature nobody asked for.
LOWEST_TEMPERATURE = 0.01


@dataclass(frozen=True)
class DataConfig:
    """Prompts: where they come from and how they become tokens."""

    prompt_data: tuple[str, ...] = flag(
        (), "prompts: one or several JSONL, JSON or Parquet files, or saved dataset directories", pairs=True
    )
    prompt_key: str = flag("prompt", "field that holds the prompt: a string, or a list of chat messages", pairs=True)
    chosen_key: str = flag(
        "chosen", "field that holds the better answer of a preference pair", reader=DPO_ONLY, pairs=True
    )
    rejected_key: str = flag(
        "rejected", "field that holds the worse answer of a preference pair", reader=DPO_ONLY, pairs=True
    )
    answer_key: str = flag("answer", "field that holds the right answer for the reward; a.b is field b inside object a")
    apply_chat_template: bool = flag(False, "render every prompt with the tokenizer's chat template", pairs=True)
    max_prompt_length: int = flag(
        1024, "longest prompt; longer ones are left out and counted", unit="tokens", least=1, pairs=True
    )
    tokenizer: str | None = flag(
        None, "Hugging Face tokenizer directory (default: --rl-hf-model, then --tokenizer-model)", pairs=True
    )
    smaller_tokenizer: bool = flag(
        False, "take a tokenizer that leaves more than a tenth of the model's vocabulary without a token", pairs=True
    )
    trust_remote_code: bool = flag(
        False, "run the code that a tokenizer, or a reward model, has in its directory: read it before", pairs=True
    )
    data_seed: int | None = flag(None, "seed of the prompts' order (default: --seed)", pairs=True)


@dataclass(frozen=True)
class RolloutConfig:
    """Generation: how many responses, how they are sampled, and by which engine."""

    rollout_prompts: int | None = flag(
        None,
        "prompts of one rollout (default: --global-batch-size / --rl-samples-per-prompt)",
        unit="prompts",
        least=1,
    )
    samples_per_prompt: int = flag(8, "responses sampled for each prompt, the group size N", unit="responses", least=1)
    max_response_length: int = flag(1024, "longest response; longer ones are cut", unit="tokens", least=1, pairs=True)
    temperature: float = flag(
        1.0, "sampling temperature; all log-probs are computed at it", least=LOWEST_TEMPERATURE, pairs=True
    )
    top_p: float = flag(1.0, "nucleus sampling bound; below 1 the ratio of the update is biased", above=0, most=1)
    top_k: int = flag(0, "sample among the k likeliest tokens; 0 means all", least=0)
    stop: tuple[str, ...] = flag((), "strings that end a response")
    stop_token_ids: tuple[int, ...] = flag(
        (), "token ids that end a response, besides those of tokenizer, template and --rl-hf-model"
    )
    ignore_eos: bool = flag(False, "always sample --rl-max-response-length tokens (for benchmarks)")
    rollout_seed: int | None = flag(None, "seed of the responses (default: --seed)")
    generate_tp: int = flag(1, "tensor parallel size of the rollout engine", unit="ranks", least=1)
    generate_ep: int = flag(
        1,
        "number of ranks over which engines spread whole experts, --rl-generate-tp or a multiple of it, which several "
        "engines share; 1: each engine cuts each expert over its ranks",
        unit="ranks",
        least=1,
    )
    hf_model: str | None = flag(
        None,
        "Hugging Face directory whose config is checked against Megatron's arguments, and whose generation_config.json "
        "may name more ends of a response; weights are not read",
        pairs=True,
    )
    engine_dtype: str = flag(
        "auto",
        "dtype of the engine's weights; auto takes Megatron's",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    kv_cache_gb: float = flag(1.0, "KV cache of one engine rank on a host without accelerator", unit="GiB", above=0)
    device_memory_utilization: float | None = flag(
        None,
        "share of the device's memory that the engine may use while the trainer is offloaded (default: what is then "
        "free, less a tenth of the device; 0.6 with --rl-reward-model-device accelerator)",
        above=0,
        most=1,
    )
    max_running: int = flag(256, "most sequences that an engine decodes at once", unit="sequences", least=1)
    graph_sizes: tuple[int, ...] = flag(
        (),
        "batch sizes for which the engine captures graphs on an accelerator (default: vLLM's own)",
        unit="sequences",
        least=1,
    )
    request_seeds: bool = flag(
        False,
        "on an accelerator too each response has a random generator of its own, and so does not depend on what is "
        "sampled beside it; costs three kernel launches a sequence and step, where vLLM has no batched form of it "
        "(default: one generator for an engine; on a CPU each response has its own)",
    )


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
        "limit of one grading call: one for all graders, or one for each --rl-reward; then the worker is killed",
        unit="seconds",
    )
    reward_workers: int = flag(2, "grader processes on each rank that grades", unit="processes", least=1)
    reward_on_error: str = flag(
        "stop",
        "if a grader fails: stop the run, count the grade as zero, or drop the group; of math, exact and regex always "
        "zero",
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
        "micro-batches of at most N tokens instead of --micro-batch-size rows: padding included, and over all context "
        "parallel ranks; data parallel ranks are balanced by tokens (default: off)",
        unit="tokens",
    )
    pack_sequences: bool = flag(
        False, "no padding between the rows of a micro-batch (needs --rl-max-tokens-per-microbatch)"
    )
    logprob_chunk_tokens: int | None = flag(
        None,
        "compute log-probs from the hidden states, with the logits of N tokens at a time, also in backward; 0: of "
        "the whole micro-batch at once (default: as many tokens as have 128 MiB of fp32 logits on a rank, 4 MiB "
        "without accelerator, or 1024 columns of every token; 0 where the micro-batch has at most twice that)",
        unit="tokens",
        least=0,
        pairs=True,
    )
    old_logprobs: str = flag(
        "auto",
        "where the log-probs of the policy before the update come from: pass, a forward pass of their own; auto, the "
        "update itself if a rollout serves one optimizer step and neither reward nor dump reads them",
        choices=("auto", "pass"),
    )


@dataclass(frozen=True)
class ReshardConfig:
    """Weights between trainer and engine, and what leaves the device meanwhile."""

    reshard: str = flag(
        "stream",
        "how weights come to the engine: stream (only what a rank lacks, in buckets) or allgather (all shards into a "
        "temporary buffer, as in the paper MindSpeed RL)",
        choices=("stream", "allgather"),
    )
    swap: tuple[str, ...] = flag(
        ("params", "grads", "optimizer"),
        "what leaves the device during generation: params, grads, optimizer (with commas or spaces), or none",
        choices=("params", "grads", "optimizer", "none"),
    )
    reshard_bucket_mb: int = flag(256, "size of a bucket of the reshard", unit="MiB", least=1)
    verify_weights: bool = flag(False, "compare digests of every tensor in trainer and engine after each reshard")

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
        None,
        "ignored: rows are in shared memory on each machine, and cross machines by TCP",
        pairs=True,
    )
    dock_gb: float = flag(0.0, "most memory of the rows on one machine; 0 means no limit", unit="GiB", least=0)
    dock_rows: int = flag(0, "most rows on one machine; 0 means no limit", unit="rows", least=0)


@dataclass(frozen=True)
class MonitorConfig:
    """What is measured, where it is written, and how often the model is evaluated."""

    run_dir: str | None = flag(None, "directory of metrics and stage events (default: SAVE/rl)", pairs=True)
    dump_dir: str | None = flag(None, "directory into which every rollout is written as Parquet (default: none)")
    eval_data: tuple[str, ...] = flag((), "held-out prompts, in the forms of --rl-prompt-data", pairs=True)
    eval_every: int = flag(
        10,
        "iterations between evaluations; one is also run before the first update",
        unit="iterations",
        least=1,
        pairs=True,
    )
    eval_prompts: int = flag(0, "evaluate on the first n held-out prompts; 0 means all", unit="prompts", least=0)
    eval_pass_k: int = flag(0, "also sample k responses per prompt and report pass@k; 0 means greedy only", least=0)
    wait_timeout: float = flag(
        1800.0,
        "deadline of every wait for another rank, its stage included, and for the engine's next response; nine tenths "
        "of it for all grading on one rank (streamed: of what it took at once), and for loading its graders, tools and "
        "environments. Collectives inside Megatron's forward and backward have --distributed-timeout-minutes",
        unit="seconds",
        above=0,
        pairs=True,
    )
    progress: bool = flag(True, "progress bar during generation when stdout is a terminal", pairs=True)
