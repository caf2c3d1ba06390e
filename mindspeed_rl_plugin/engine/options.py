"""What an engine is built from, and what it is asked for, in vLLM's words; without vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_rl_plugin.host import engine_env
from mindspeed_rl_plugin.rows import Sampling

NO_TOKENIZER_NEEDED = (0, 10)


@dataclass(frozen=True)
class VllmOptions:
    """What an engine is built from."""

    config: Mapping[str, Any]  # config.json of the model (`hf_config.derive_config`)
    max_model_len: int  # most tokens of prompt and response together
    tensor_parallel: int = 1  # ranks of one engine
    # ranks over which whole experts are spread, of several engines where more than `tensor_parallel`; 1: each expert is
    # split
    expert_parallel: int = 1
    dtype: str = "float32"  # "float32" | "bfloat16" | "float16"
    max_running: int = 256  # most sequences decoded at once
    kv_cache_bytes: int = 1 << 30  # of each rank, on CPU
    # share of an accelerator's memory; None: `free_share` when the engine is built
    memory_utilization: float | None = None
    eos_token_ids: tuple[int, ...] = ()  # end every response that does not ignore them
    tokenizer: str | None = None  # directory, see `needs_tokenizer`
    trust_remote_code: bool = False  # whether code that comes with the tokenizer may run
    sleep_mode: bool = True  # whether `sleep` frees memory on an accelerator
    graph_sizes: tuple[int, ...] = ()  # batch sizes of an accelerator's graphs; empty: vLLM's own
    # whether each request has its own generator even where that costs kernels per request and step; it costs nothing on
    # a CPU, and where vLLM draws for all requests in one kernel
    request_seeds: bool = False
    # seconds that ranks wait for each other in any step, and in the build before vLLM's own limits apply
    deadline: float = 1800.0

    @property
    def sharing(self) -> int:
        """Engines that share experts; 1: each has all of them."""
        return max(self.expert_parallel // self.tensor_parallel, 1)


def needs_tokenizer(stop: Sequence[str]) -> bool:
    """Whether `VllmOptions.tokenizer` must be given: for stop strings, and to every vLLM before 0.10."""
    return bool(stop) or engine_env.vllm_version() < NO_TOKENIZER_NEEDED


def sampling_fields(sampling: Sampling, eos: Sequence[int], seed: int | None) -> dict[str, Any]:
    """One request as fields of vLLM's SamplingParams, all of them that a server's own defaults could change.

    eos: end every response that does not ignore them; always explicit, for without a tokenizer vLLM knows none. seed:
    None where the request has no generator of its own.
    """
    stops = [] if sampling.ignore_eos else list(sampling.stop)
    ends = () if sampling.ignore_eos else (*eos, *sampling.stop_token_ids)
    return {
        "n": 1,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": seed,
        "stop": stops,
        "stop_token_ids": sorted(set(ends)),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": bool(stops),
    }
