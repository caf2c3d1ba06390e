"""The replacement of torch.cuda: code that asks for a GPU gets the CPU.

Names of torch.cuda are replaced one by one; all others still fail, so that a missing one is noticed. Streams and events
have nothing to wait for, since an operator on the CPU has finished when it returns. Memory in use is that of the
process (`device.ProcessMeter`). The random generator of the "device" is torch's default generator of the CPU.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.random
import torch.utils._device

from mindspeed_rl_plugin.device import ProcessMeter
from mindspeed_rl_plugin.environment import launch_env
from mindspeed_rl_plugin.host.streams import NullEvent, NullStream

CPU = torch.device("cpu")
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided")
_TENSOR_TYPES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")


def on_cpu(device: Any) -> Any:
    """The CPU for every name of an accelerator ("cuda:1", "npu", an index); other values are returned unchanged."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int):
        return CPU
    kind = device.type if isinstance(device, torch.device) else device
    return CPU if isinstance(kind, str) and kind.split(":")[0] in ("cuda", "npu") else device


def install() -> None:
    """Install the replacement, once. The caller has checked that there is no accelerator."""
    for name, value in _namespace().items():
        setattr(torch.cuda, name, value)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _returning(None))
    _redirect_factories()
    _redirect_methods()


def _namespace() -> dict[str, Any]:
    """Name in torch.cuda -> its replacement."""
    memory, total = ProcessMeter(), _memory_of_machine()[1]
    properties = {"name": "cpu", "major": 8, "minor": 0, "multi_processor_count": 1, "warp_size": 32}
    constants = {
        "current_device": launch_env()["local_rank"],  # an index, as in torch: MindSpeed-LLM does arithmetic with it
        "device_count": launch_env()["local_world_size"],
        "is_available": True,
        "is_initialized": True,
        "is_current_stream_capturing": False,
        "is_bf16_supported": True,
        "get_device_capability": (8, 0),
        "get_device_name": "cpu",
        "get_device_properties": SimpleNamespace(**properties, total_memory=total),
        "initial_seed": torch.initial_seed(),
        "utilization": 0,
    }
    names: dict[str, Any] = {name: _returning(value) for name, value in constants.items()}
    idle = "set_device synchronize empty_cache ipc_collect set_stream check_error init manual_seed_all _lazy_init"
    names.update({name: _returning(None) for name in idle.split()})
    names.update({f"{name}Tensor": getattr(torch, f"{name}Tensor") for name in _TENSOR_TYPES})
    names.update(
        Stream=NullStream,
        Event=NullEvent,
        ExternalStream=type("ExternalStream", (NullStream,), {}),
        current_stream=lambda *a, **k: NullStream(),
        default_stream=lambda *a, **k: NullStream(),
        stream=contextlib.nullcontext,
        device=type("device", (contextlib.nullcontext,), {}),
        mem_get_info=_memory_of_machine,
        memory_allocated=lambda *a, **k: memory.allocated(),
        memory_reserved=lambda *a, **k: memory.allocated(),
        max_memory_allocated=lambda *a, **k: memory.peak(),
        max_memory_reserved=lambda *a, **k: memory.peak(),
        memory_stats=lambda *a, **k: _memory_stats(memory),
        reset_peak_memory_stats=lambda *a, **k: memory.reset_peak(),
        reset_max_memory_allocated=lambda *a, **k: memory.reset_peak(),
        get_rng_state=lambda *a, **k: torch.get_rng_state(),
        set_rng_state=lambda state, *a, **k: torch.set_rng_state(state),
        manual_seed=lambda seed: torch.default_generator.manual_seed(int(seed)),  # torch.manual_seed calls torch.cuda
        default_generators=(torch.default_generator,) * launch_env()["local_world_size"],
        _lazy_call=lambda callback, **k: callback(),
    )
    return names


def _returning(value: Any) -> Callable[..., Any]:
    """A function that returns `value`; a new one for each name: torch.compile has a table with these as keys."""
    return lambda *args, **kwargs: value


def _memory_of_machine(*args: Any, **kwargs: Any) -> tuple[int, int]:
    """(free, total) bytes."""
    free, total = (os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
    return free, total


def _memory_stats(memory: ProcessMeter) -> dict[str, int]:
    stats: dict[str, int] = collections.defaultdict(int)
    for kind in ("allocated", "reserved", "active"):
        stats[f"{kind}_bytes.all.current"] = memory.allocated()
        stats[f"{kind}_bytes.all.peak"] = memory.peak()
    return stats


def _redirect_factories() -> None:
    """Let torch.empty, torch.zeros, ... make CPU tensors for any accelerator.

    torch has a cache of the functions that obey `with torch.device("meta")`, which is filled at its first use. Here it
    is filled with the original functions, before they are wrapped. Otherwise it would hold our wrappers: the context
    would have no effect, and `transformers.from_pretrained` would leave rotary buffers uninitialised, without an error.
    """
    constructors = torch.utils._device._device_constructors()
    for name in sorted({f.__name__ for f in constructors} | {*_LIKE, "normal"}):
        if callable(getattr(torch, name, None)):
            setattr(torch, name, _redirected(getattr(torch, name)))
    for name in _NEW:
        setattr(torch.Tensor, name, _redirected(getattr(torch.Tensor, name)))


def _redirected(function: Callable[..., Any], place: int | None = None) -> Callable[..., Any]:
    """`function` with the CPU in place of an accelerator, and without pinned memory. The device is passed by name, or
    as the argument with index `place`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if place is not None and len(args) > place:
            args = (*args[:place], on_cpu(args[place]), *args[place + 1 :])
        for name in ("device", "map_location"):
            if kwargs.get(name) is not None:
                kwargs[name] = on_cpu(kwargs[name])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return call


def _redirect_methods() -> None:
    """Let .to and .cuda of tensors and modules, Tensor.type, .pin_memory and torch.load keep all data on the CPU."""
    cast = torch.Tensor.type

    @functools.wraps(cast)
    def tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Megatron recognises its parameters by the type name "torch.cuda.FloatTensor".
        if dtype is None:
            return cast(self).replace("torch.", "torch.cuda.")
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return cast(self, dtype, *args, **kwargs)

    torch.load = _redirected(torch.load, 1)
    torch.Tensor.to = _redirected(torch.Tensor.to, 1)
    torch.nn.Module.to = _redirected(torch.nn.Module.to, 1)
    torch.Tensor.type = tensor_type
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
