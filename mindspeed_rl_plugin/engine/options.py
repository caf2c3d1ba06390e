"""Options of an engine and of a request, translated into arguments of vLLM. vLLM is not imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_rl_plugin.engine.hf_config import family_table
from mindspeed_rl_plugin.host import engine_env
from mindspeed_rl_plugin.rows import GenerateRequest

NO_TOKENIZER_NEEDED = (0, 10)
PROCESSED = "processed_logprobs"
# CPU binding of vllm-ascend would bind all threads of the trainer to a few cores, and might stop the machine's
# irqbalance. The other three settings replace the variables of `engine_env.REQUIRED_NPU` in 0.23 and newer.
ASCEND_CONFIG = {"enable_cpu_binding": False, "weight_nz_mode": 0, "enable_fused_mc2": 0, "enable_mlapo": False}
# Most tokens of one step on an accelerator: vLLM reserves memory for their activations, and splits longer prompts.
STEP_TOKENS = 8192
CPU_BLOCK = 32  # tokens of a KV cache block, except with latent attention: vLLM's CPU kernels need a multiple of 32


@dataclass(frozen=True)
class VllmOptions:
    """How an engine is built."""

    config: Mapping[str, Any]  # config.json of the model (`hf_config.derive_config`)
    max_model_len: int  # most tokens of prompt and response together
    tensor_parallel: int = 1  # ranks of one engine
    # number of ranks (maybe of several engines) among which complete experts are divided; 1: each expert is split
    expert_parallel: int = 1
    dtype: str = "float32"  # "float32" | "bfloat16" | "float16"
    max_running: int = 256  # most sequences decoded in one step
    kv_cache_bytes: int = 1 << 30  # of each rank; only used on a CPU
    # share of an accelerator's memory; None: `free_share` when the engine is built
    memory_utilization: float | None = None
    eos_token_ids: tuple[int, ...] = ()  # a response ends at one of these, except with `Sampling.ignore_eos`
    tokenizer: str | None = None  # directory, see `needs_tokenizer`
    weights: str | None = None  # directory of safetensors that vLLM loads; None: random weights
    trust_remote_code: bool = False  # whether code that comes with the tokenizer may run
    sleep_mode: bool = True  # whether `sleep` frees memory
    graph_sizes: tuple[int, ...] = ()  # batch sizes of an accelerator's graphs; empty: vLLM's default sizes
    # True: each request has its own random generator, even if vLLM then launches kernels for each request in each step.
    # False: only where this costs nothing: on a CPU, and if one kernel of vLLM samples for all requests
    request_seeds: bool = False
    record_routes: bool = False  # whether completions have the experts that were chosen (`engine.routes`)
    # seconds that ranks wait for each other in a step, and at the start of the build (vLLM's part has its own limits)
    deadline: float = 1800.0

    @property
    def sharing(self) -> int:
        """How many engines share experts; 1: each engine has all experts."""
        return max(self.expert_parallel // self.tensor_parallel, 1)


def needs_tokenizer(stop: Sequence[str]) -> bool:
    """Whether `VllmOptions.tokenizer` must be given: for stop strings, and for every vLLM before 0.10."""
    return bool(stop) or engine_env.vllm_version() < NO_TOKENIZER_NEEDED


def engine_arguments(options: VllmOptions, kind: str, directory: str) -> dict[str, Any]:
    """The options as fields of vLLM's EngineArgs. kind: of device; directory: of config.json."""
    on_cpu = kind == "cpu"
    step = max(2048, options.max_model_len) if on_cpu else STEP_TOKENS
    graphs = {"cudagraph_capture_sizes": sorted(set(options.graph_sizes))}
    segments, latent = engine_env.expandable_segments(kind), bool(options.config.get("kv_lora_rank"))
    return {
        "model": directory,
        "tokenizer": options.tokenizer,
        "skip_tokenizer_init": options.tokenizer is None,
        "trust_remote_code": options.trust_remote_code,
        "load_format": "safetensors" if options.weights else "dummy",
        "dtype": options.dtype,
        "seed": 0,
        "max_model_len": options.max_model_len,
        "tensor_parallel_size": options.tensor_parallel,
        "enable_expert_parallel": options.expert_parallel > 1,
        "data_parallel_size": options.sharing,
        "distributed_executor_backend": "external_launcher",
        "enforce_eager": on_cpu,
        "enable_prefix_caching": True,
        "max_num_seqs": options.max_running,
        "max_num_batched_tokens": max(step, options.max_running),
        "disable_log_stats": True,
        "generation_config": "vllm",
        "enable_sleep_mode": options.sleep_mode and not on_cpu,
        "logprobs_mode": PROCESSED,
        # If a prompt is split, vLLM sets an offset of the request's generator; a CPU's generator has no offset.
        **({"kv_cache_memory_bytes": options.kv_cache_bytes, "enable_chunked_prefill": False} if on_cpu else {}),
        # Only complete blocks of a prefix are cached, and many turns are shorter than vLLM's CPU block of 128 tokens.
        **({"block_size": CPU_BLOCK} if on_cpu and not latent else {}),
        **({} if on_cpu else {"gpu_memory_utilization": options.memory_utilization}),
        # Engines that share experts must run the same number of steps; asynchronous scheduling runs one more.
        **({} if on_cpu else {"async_scheduling": options.sharing == 1}),
        **({} if on_cpu or not options.graph_sizes else {"compilation_config": graphs}),
        **({"additional_config": dict(ASCEND_CONFIG)} if kind == "npu" else {}),
        # vLLM's own all-reduce maps the graph memory of other ranks. With expandable segments the process then dies
        # without a message (0.18 to 0.32).
        **({"disable_custom_all_reduce": True} if kind == "cuda" and options.tensor_parallel > 1 and segments else {}),
        # vLLM's default kernel on sm100 permutes the weights of experts in place.
        **({"moe_backend": "triton"} if kind == "cuda" and family_table(options.config).experts else {}),
        # On a CPU with AMX vLLM would otherwise repack the weight of latent attention, and delete the original.
        **({"attention_backend": "CPU_MLA"} if on_cpu and latent else {}),
    }


def sampling_fields(request: GenerateRequest, eos: Sequence[int], seeded: bool) -> dict[str, Any]:
    """Fields of vLLM's SamplingParams for the remaining tokens of a response. They override a server's defaults.

    eos: `VllmOptions.eos_token_ids`, since vLLM without a tokenizer knows none. seeded: whether the request has its own
    random generator.
    """
    sampling = request.sampling
    stops = [] if sampling.ignore_eos else list(sampling.stop)
    ends = () if sampling.ignore_eos else (*eos, *sampling.stop_token_ids)
    return {
        "n": 1,
        "max_tokens": sampling.max_tokens - (len(request.begun.tokens) if request.begun else 0),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": request.seed if seeded else None,
        "stop": stops,
        "stop_token_ids": sorted(set(ends)),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": bool(stops),
    }


def prompt_of(request: GenerateRequest) -> list[int]:
    """Tokens of the prompt, and the tokens of the response that were sampled before."""
    return [*request.prompt_tokens, *(request.begun.tokens if request.begun else ())]
