"""What Megatron builds the policy from: kept for a second model of the same kind (a critic, LoRA), or changed.

Core 0.12 to 0.16 pass a provider function; core 0.19 passes a container whose `model` is a config with a
builder. The order of parameters differs, so the arguments are taken by name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ModelSource:
    """Either a provider (function of pre_process, post_process, ...) or a config container; the other is None."""

    provider: Callable | None
    container: Any


_source: ModelSource | None = None


def remember(setup: Callable, positional: tuple, named: Mapping[str, Any]) -> None:
    """Keep the source among the arguments of a call of `setup_model_and_optimizer`."""
    global _source
    bound = inspect.signature(setup).bind_partial(*positional, **named).arguments
    _source = ModelSource(bound.get("model_provider_func"), bound.get("cfg_container"))


def recall() -> ModelSource:
    """The source of the policy. Raises RuntimeError before Megatron has built it."""
    if _source is None:
        raise RuntimeError("Megatron has not built a model yet: the source is known from setup_model_and_optimizer on")
    return _source


def on_each_chunk(
    setup: Callable, positional: tuple, named: Mapping[str, Any], change: Callable[[torch.nn.Module], torch.nn.Module]
) -> inspect.BoundArguments:
    """A call of Megatron's `setup_model_and_optimizer` in which `change` gets every chunk before it is wrapped.

    Core 0.12 to 0.16 pass a provider function; core 0.19 a container, whose model config has hooks for this.
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
