"""PPO's critic from start to checkpoint: built by Megatron's own set-up, loaded, and saved with the policy.

    SAVE/iter_0000500/critic/iter_0000500/...     Megatron's own files of the critic; critic/ has a tracker file

The policy's provider (core 0.12 to 0.18) or model config (0.19) builds the critic. Before Megatron wraps it, a value
head replaces its output layer. So formats, layouts, precision and optimizer are those of the launch script.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import Module

from mindspeed_rl_plugin.checkpoints import checkpoint_files as files
from mindspeed_rl_plugin.checkpoints.start_decision import FULL_STATE, weights_arguments
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.critic.critic import Critic
from mindspeed_rl_plugin.critic.value_head import give_value_head
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.launch.megatron_setup import (
    on_each_chunk,
    overridden,
    recording,
    report_unused_embeddings,
)
from mindspeed_rl_plugin.loop.start import Start
from mindspeed_rl_plugin.weights.offload import gathered

# Megatron sets these while it loads a checkpoint. After the critic is loaded, the policy's values are restored.
_COUNTERS = (
    *("iteration", "num_floating_point_operations_so_far"),
    *("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples"),
)
_SCALED_RATES = ("min_lr", "lr_warmup_init", "decoupled_lr", "decoupled_min_lr")


def build(
    setup: Callable,
    positional: tuple,
    named: Mapping[str, Any],
    args: Any,
    start: Start,
    policy: Sequence[Module],
    absent: Mapping[str, Any],
) -> tuple[Critic, str]:
    """Build and load the critic. Returns it, and a text with the source of its weights. Collective over all ranks.

    setup, positional, named: Megatron's `setup_model_and_optimizer`, and the arguments with which it was called for the
    policy; policy: the loaded chunks of the policy; absent: arguments with which Megatron does not look for missing
    parts of a resumed checkpoint. Random generators and counters of the run do not change. Raises ValueError if the
    critic cannot be built.
    """
    config = RLConfig.from_args(args).algorithm
    arguments, source, has_head = _source(start, config.critic_load, absent)
    values = arguments | learning_rate(args, config.critic_lr) | dict.fromkeys(_COUNTERS, 0)
    values["untie_embeddings_and_output_weights"] = True
    with overridden(args, values), _same_random_state(), recording(args):
        call = _with_value_head(setup, positional, named)
        model, optimizer, scheduler = setup(*call.args, **call.kwargs)[:3]
    report_unused_embeddings(model)
    if arguments.get("finetune") is False and arguments["no_load_optim"]:
        scheduler.step(increment=args.consumed_train_samples)
    critic = Critic(model, optimizer, scheduler, _prepared(model, optimizer, args))
    if arguments["load"] is None:
        critic.copy_backbone(policy)
    elif not has_head:
        critic.reset_head()
    return critic, source


def save(save_checkpoint: Callable, critic: Critic, args: Any, iteration: int) -> None:
    """Write the critic into the policy's checkpoint of `iteration`, before the policy's tracker file names it."""
    folder = os.path.join(files.iteration_dir(args.save, iteration), files.CRITIC)
    with overridden(args, {"save": folder, "async_save": False, "save_retain_interval": None}), gathered(critic.model):
        save_checkpoint(iteration, critic.model, critic.optimizer, critic.scheduler, 0)
    Path(files.iteration_dir(folder, iteration), files.CRITIC_MARK).touch()


def learning_rate(args: Any, lr: float | None) -> dict[str, Any]:
    """Arguments for the policy's schedule with `lr` as its peak: all rates are scaled by the same factor."""
    if lr is None:
        return {}
    scale = lr / args.lr if args.lr else 0.0
    return {"lr": lr, **{n: getattr(args, n) * scale for n in _SCALED_RATES if getattr(args, n, None) is not None}}


def _source(start: Start, load: str | None, absent: Mapping[str, Any]) -> tuple[dict[str, Any], str, bool]:
    """Arguments that load the critic's weights, the weights' source as text, and whether the source has a value head.
    load: --rl-critic-load."""
    nothing = {"load": None, "pretrained_checkpoint": None, "ckpt_step": None}
    if start.kind == "resume":
        folder = os.path.join(files.iteration_dir(start.load_dir, start.iteration), files.CRITIC)
        if files.read_tracker(folder) is not None:
            optimizer = "" if "no_load_optim" in absent else ", its optimizer included"
            return {**nothing, "load": folder, **FULL_STATE, **absent}, folder + optimizer, True
    if load is None:
        return nothing, "the policy's weights, with a fresh value head", False
    path = files.critic_source(load)
    has_head = Path(path, files.CRITIC_MARK).is_file()
    source = f"the weights of {path}" + ("" if has_head else ", with a fresh value head")
    return weights_arguments(path), source, has_head


def _with_value_head(setup: Callable, positional: tuple, named: Mapping[str, Any]) -> inspect.BoundArguments:
    """The call of Megatron's set-up that built the policy, changed so that it builds chunks with a value head."""
    call = inspect.signature(setup).bind(*positional, **named)
    container = call.arguments.get("cfg_container")
    if container is not None and getattr(container, "model", None) is not None:
        container = copy.copy(container)
        # A copy, since the training loop puts functions of the policy into the config.
        container.model = copy.deepcopy(container.model)
        container.model.share_embeddings_and_output_weights = False
        call.arguments["cfg_container"] = container
    call = on_each_chunk(setup, call.args, call.kwargs, give_value_head)
    if "checkpointing_context" in call.arguments:
        call.arguments["checkpointing_context"] = {}  # its cache belongs to the policy's checkpoints
    return call


def _prepared(model: Sequence[Module], optimizer: Any, args: Any) -> Any:
    """The model's config, with all that Megatron's `train` sets in the policy's config.

    Source: train of megatron/training/training.py, alike in core 0.12.1, 0.16.1 and 0.19.
    """
    from megatron.core.utils import get_model_config
    from megatron.training import get_timers, training

    def each(name: str) -> Any:
        functions = [getattr(chunk, name) for chunk in model]
        return functions[0] if len(functions) == 1 else functions

    config = get_model_config(model[0])
    config.grad_scale_func, config.timers = optimizer.scale_loss, get_timers()
    if args.overlap_grad_reduce:
        config.no_sync_func = each("no_sync")
        if args.align_grad_reduce:
            config.grad_sync_func = each("start_grad_sync")
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = each("start_param_sync")
    config.finalize_model_grads_func = training.finalize_model_grads
    return config


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """Restores the state of random generators after the build of a second model, since checkpoints store this state."""
    from megatron.core import tensor_parallel

    tracker, device = tensor_parallel.get_cuda_rng_tracker(), get_device()
    before = random.getstate(), np.random.get_state(), torch.get_rng_state(), tracker.get_states()
    on_device = None if device.is_cpu else device.api.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        tracker.set_states(before[3])
        if on_device is not None:
            device.api.set_rng_state(on_device)
