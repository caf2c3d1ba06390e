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
    """What an engine is built from.

    config: config.json of the model (`hf_config.derive_config`); tensor_parallel: ranks of one engine; expert_parallel:
    ranks over which whole experts are spread (1: each is cut), those of several engines where they are more than
    `tensor_parallel`; dtype: "float32" | "bfloat16" | "float16"; max_model_len: most tokens of prompt and response
    together; max_running: most sequences decoded at once; kv_cache_bytes: KV cache of a rank on CPU;
    memory_utilization: share of the device's memory elsewhere (None: `free_share` when the engine is built);
    eos_token_ids: end every response that does not ignore them; tokenizer: directory, see `needs_tokenizer`;
    trust_remote_code: whether code of the tokenizer's own may run, in all that load it for this engine;
    sleep_mode: whether `sleep` gives memory back on an accelerator; graph_sizes: batch sizes of the graphs on an
    accelerator, vLLM's own where empty; request_seeds: whether each request has a generator of its own also where that
    costs kernels for each request and step (on a CPU, and where vLLM draws for all of them in one kernel, each has);
    deadline: seconds that ranks wait for each other while the engine is built, before vLLM waits by its own limits, and
    that they wait for each other in any step.
    """

    config: Mapping[str, Any]
    max_model_len: int
    tensor_parallel: int = 1
    expert_parallel: int = 1
    dtype: str = "float32"
    max_running: int = 256
    kv_cache_bytes: int = 1 << 30
    memory_utilization: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: str | None = None
    trust_remote_code: bool = False
    sleep_mode: bool = True
    graph_sizes: tuple[int, ...] = ()
    request_seeds: bool = False
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
