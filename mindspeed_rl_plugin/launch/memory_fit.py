"""Refuses a model that is larger than the memory of its device (or of a host without device), before it is built."""

from __future__ import annotations

import contextlib
from math import prod
from typing import Any

from mindspeed_rl_plugin.adapters.targets import adapter_numels
from mindspeed_rl_plugin.config.run_flags import LoraConfig
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.device.meters import host_total
from mindspeed_rl_plugin.environment import launch_env
from mindspeed_rl_plugin.layout.layout import ModelShape, Parallel, megatron_layout

# Bytes of a weight -> bytes of Adam's float32 state: moments, and a main parameter if the weight is not float32. The
# state is not counted if a flag moves, shrinks or omits it.
ADAM_BYTES = {2: 12, 4: 8}
_SMALLER = "optimizer_cpu_offload use_precision_aware_optimizer swap_optimizer virtual_optimizer reuse_fp32_param"
_SMALLER += " quant_states compress_optimizer"


def check(args: Any, vocab: int, lora: LoraConfig) -> None:
    """Raises ValueError if weights, gradients and Adam's state exceed the memory. Nothing else is counted.

    vocab: tokens of the tokenizer. A model of no known family, which DPO may train, is not estimated.
    """
    device, env, needed = get_device(), launch_env(), 0.0
    ranks = env["local_world_size"] if device.is_cpu else 1
    with contextlib.suppress(ValueError):
        shape, train = ModelShape.from_megatron_args(args, vocab), Parallel.from_megatron_args(args)
        first = env["rank"] - env["local_rank"] * (ranks > 1)
        here = range(first, min(first + ranks, train.world))
        each = [megatron_layout(shape, train, rank).shapes for rank in here]
        model = sum(prod(size) for shapes in each for size in shapes.values())
        factors = sum(adapter_numels(shape, train, rank, lora)[0] for rank in here)
        needed = args.params_dtype.itemsize * (model + factors) + _least(args, train) * (factors or model)
    total = host_total() if device.is_cpu else device.memory_info()[1]
    if needed > total:
        one = "machine" if device.is_cpu else "device"
        raise ValueError(
            f"the model is too large: weights, gradients and optimizer of {ranks} ranks need {needed / 2**30:,.1f} GiB "
            f"or more, and the {one} has {total / 2**30:,.1f} GiB; spread it over more {one}s (a larger "
            "--tensor-model-parallel-size or --pipeline-model-parallel-size, --use-distributed-optimizer)"
        )


def _least(args: Any, train: Parallel) -> float:
    """The least number of bytes that a trained parameter needs besides its weight."""
    weight = args.params_dtype.itemsize
    gradient = 4 if getattr(args, "accumulate_allreduce_grads_in_fp32", False) else weight
    spread = train.dp * train.cp if getattr(args, "use_distributed_optimizer", False) else 1
    adam = getattr(args, "optimizer", "adam") == "adam" and not any(getattr(args, n, None) for n in _SMALLER.split())
    return gradient + adam * ADAM_BYTES[weight] / spread
