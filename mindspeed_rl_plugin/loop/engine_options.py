"""The engine's options from the launch arguments, and a check that its rotary frequencies are the trainer's."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from mindspeed_rl_plugin.engine import hf_config
from mindspeed_rl_plugin.engine.hf_rope import check_rotary
from mindspeed_rl_plugin.engine.options import VllmOptions, needs_tokenizer
from mindspeed_rl_plugin.loop.inputs import Inputs
from mindspeed_rl_plugin.weights.storages import unwrap

# Share of the device's memory for the engine, if reward models are loaded on the device later.
BESIDE_REWARD_MODELS = 0.6


def options(inputs: Inputs, dtype: torch.dtype) -> VllmOptions:
    """The engine's options. dtype: of its weights."""
    rollout, data, reward = inputs.config.rollout, inputs.config.data, inputs.config.reward
    graded_beside = reward.reward_model_device == "accelerator"
    return VllmOptions(
        config=inputs.engine_config,
        max_model_len=data.max_prompt_length + rollout.max_response_length,
        tensor_parallel=rollout.generate_tp,
        expert_parallel=rollout.generate_ep,
        dtype=str(dtype).removeprefix("torch."),
        max_running=rollout.max_running,
        kv_cache_bytes=int(rollout.kv_cache_gb * 2**30),
        memory_utilization=rollout.device_memory_utilization or (BESIDE_REWARD_MODELS if graded_beside else None),
        eos_token_ids=inputs.end_tokens,
        graph_sizes=rollout.graph_sizes,
        request_seeds=rollout.request_seeds,
        record_routes=inputs.config.forward.router_replay == "rollout",
        deadline=inputs.config.monitor.wait_timeout,
        trust_remote_code=data.trust_remote_code,
        tokenizer=inputs.tokenizer_path if inputs.responses.stops or needs_tokenizer(rollout.stop) else None,
    )


def dtype_of(args: argparse.Namespace, name: str) -> torch.dtype:
    """The dtype of a value of --rl-engine-dtype; auto: Megatron's dtype."""
    return args.params_dtype if name == "auto" else getattr(torch, name)


def check_engine_rotary(inputs: Inputs, model: Any) -> None:
    """Check that the engine's rotary frequencies are those of the built model; a launch script may ignore flags."""
    for chunk in model:
        for module in unwrap(chunk).modules():  # with latent attention every layer has its own
            rotary = getattr(module, "rotary_pos_emb", None)
            if rotary is not None:
                check_rotary(hf_config.normalized(inputs.engine_config), rotary)
