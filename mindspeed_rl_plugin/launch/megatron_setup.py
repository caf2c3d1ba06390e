"""Megatron's `setup_model_and_optimizer`, called with other arguments for a while, or with its chunks changed.

The order of its parameters differs between versions, so they are taken by name.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mindspeed_rl_plugin.weights import aliases


@contextlib.contextmanager
def overridden(args: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Set some arguments for a while, then put back what the user gave. Names that this Megatron lacks are skipped."""
    before = {name: getattr(args, name) for name in values if hasattr(args, name)}
    for name in before:
        setattr(args, name, values[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)


def recording(args: Any) -> contextlib.AbstractContextManager[None]:
    """For the time in which optimizers are built: what MindSpeed then lets share memory, `weights.aliases` keeps."""
    return aliases.recording() if getattr(args, "reuse_fp32_param", False) else contextlib.nullcontext()


def on_each_chunk(
    setup: Callable, positional: tuple, named: Mapping[str, Any], change: Callable[[torch.nn.Module], torch.nn.Module]
) -> inspect.BoundArguments:
    """A call of Megatron's `setup_model_and_optimizer` in which `change` gets every chunk before it is wrapped.

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
