"""Calls Megatron's `setup_model_and_optimizer` with temporary arguments, or with changed chunks.

The order of the function's parameters differs between versions, so arguments are found by name. Layers of multi-token
prediction (MTP) stay in the model and in its checkpoints, frozen. They are not run, since no engine and no RL loss uses
them; Megatron would need labels for them, which an RL step does not have.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from mindspeed_rl_plugin.weights import aliases
from mindspeed_rl_plugin.weights.storages import unwrap


@contextlib.contextmanager
def overridden(args: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Within the context some arguments have other values; afterwards they have the user's values again. Names that
    this Megatron lacks are skipped."""
    before = {name: getattr(args, name) for name in values if hasattr(args, name)}
    for name in before:
        setattr(args, name, values[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)


def recording(args: Any) -> contextlib.AbstractContextManager[None]:
    """A context in which optimizers are built: `weights.aliases` records the memory that tensors share in MindSpeed."""
    return aliases.recording() if getattr(args, "reuse_fp32_param", False) else contextlib.nullcontext()


def on_each_chunk(
    setup: Callable, positional: tuple, named: Mapping[str, Any], change: Callable[[torch.nn.Module], torch.nn.Module]
) -> inspect.BoundArguments:
    """A call of Megatron's `setup_model_and_optimizer` that passes every chunk to `change` before it is wrapped.

    Core 0.12 to 0.18 pass a provider function; core 0.19 a container, whose model config has hooks for this.
    """
    call = inspect.signature(setup).bind(*positional, **named)
    container = call.arguments.get("cfg_container")
    if container is not None and getattr(container, "model", None) is not None:
        container.model.pre_wrap_hooks.append(lambda chunks: [change(chunk) for chunk in chunks])
        return call
    provider = call.arguments["model_provider_func"]

    @functools.wraps(provider)
    def changed(*positional: Any, **named: Any) -> torch.nn.Module:
        return change(provider(*positional, **named))

    call.arguments["model_provider_func"] = changed
    return call


def freeze_mtp(chunk: torch.nn.Module) -> torch.nn.Module:
    """Freeze the MTP layers, if any, of a chunk of Megatron's GPT model; returns the chunk.

    Must be called before Megatron wraps the chunk, so that gradient buffers and optimizer do not contain them.
    """
    layers = getattr(chunk, "mtp", None)
    if layers is None:
        return chunk
    layers.requires_grad_(False)
    own = chunk.forward

    @functools.wraps(own)
    def forward(*positional: Any, **named: Any) -> Any:
        # Only during the call: code that builds or saves the model, or reduces gradients, needs both values.
        saved = chunk.mtp_process, chunk.config.mtp_num_layers
        chunk.mtp_process, chunk.config.mtp_num_layers = False, None
        try:
            return own(*positional, **named)
        finally:
            chunk.mtp_process, chunk.config.mtp_num_layers = saved

    chunk.forward = forward
    return chunk


def report_unused_embeddings(chunks: Iterable[torch.nn.Module]) -> None:
    """With `--overlap-grad-reduce`: tell Megatron's DDP that embeddings which only frozen MTP layers use are ready.

    These embeddings are a copy on the last pipeline stage. DDP sends gradients when all parameters have one, and would
    wait for ever for the copy's gradient. That gradient is zero, and is later added to the first stage's. chunks:
    wrapped by Megatron.
    """
    for chunk in chunks:
        model, groups = unwrap(chunk), getattr(chunk, "param_to_bucket_group", {})
        if getattr(model, "mtp", None) is None or model.pre_process:
            continue
        for param in model.embedding.parameters():
            if param in groups and groups[param].ddp_config.overlap_grad_reduce:
                _report_before_waiting(groups[param], param)


def _report_before_waiting(group: Any, param: torch.nn.Parameter) -> None:
    """group: `_ParamAndGradBucketGroup` of megatron/core/distributed/param_and_grad_buffer.py."""
    wait = group.finish_grad_sync

    @functools.wraps(wait)
    def finish_grad_sync(*positional: Any, **named: Any) -> Any:
        if group.grad_reduce_handle is None:  # --align-grad-reduce starts all groups, even with missing gradients
            group.register_grad_ready(param)
        return wait(*positional, **named)

    group.finish_grad_sync = finish_grad_sync
