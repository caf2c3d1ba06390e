"""Separates the engine's process state from the trainer's: random generators, the current stream, names in torch."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_rl_plugin.device import Device
from mindspeed_rl_plugin.host.torch_originals import torch_originals


class ProcessState:
    """Switches the process to the engine's state, and back to the trainer's.

    vLLM seeds all random generators when it is built, and samples from torch's. On CUDA it makes its own stream the
    current one and does not reset it (0.18 to 0.32: `current_stream` of its torch_utils). It also replaces public names
    of torch and does not restore them: in vllm-ascend 0.18 to 0.23 torch.cuda.Event then does nothing
    (`_torch_cuda_wrapper`).
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream: object = None  # the engine's, after the first `lent`
        self._seed: int | None = None
        self._generator: Tensor | None = None  # state of the device's generator after the last `lent`
        self._own_numbers = False
        self._names: dict[tuple[ModuleType, str], Any] = {}  # names in torch as the engine has set them

    def reseed(self, seed: int) -> None:
        """Give the engine its own random numbers on the device, from this seed, starting with the next `lent`."""
        self._seed, self._own_numbers = seed, True

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Within the context the process has the engine's state."""
        with torch_originals(), self._own_names(), _host_generators_kept(), self._on_device():
            yield

    @contextlib.contextmanager
    def _own_names(self) -> Iterator[None]:
        trainers = [(module, dict(vars(module))) for module in (torch, torch.cuda)]
        for (module, name), value in self._names.items():
            setattr(module, name, value)
        try:
            yield
        finally:
            self._names = {}
            for module, before in trainers:
                for name, value in vars(module).copy().items():
                    if before.get(name, value) is not value and callable(value) and not name.startswith("_"):
                        self._names[module, name] = value
                        setattr(module, name, before[name])

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        if self._device.is_cpu:
            yield
            return
        api = self._device.api
        stream, numbers = api.current_stream(), api.get_rng_state()
        self._enter(stream)
        try:
            yield
        finally:
            self._generator = api.get_rng_state() if self._own_numbers else None
            api.set_rng_state(numbers)
            self._stream = api.current_stream()
            if self._stream != stream:
                stream.wait_stream(self._stream)
                api.set_stream(stream)

    def _enter(self, stream: object) -> None:
        """Switch to the engine's stream, which waits for the trainer's stream, and to the last state of the engine's
        random generator."""
        api = self._device.api
        if self._stream is not None and self._stream != stream:
            self._stream.wait_stream(stream)
            api.set_stream(self._stream)
        if self._seed is not None:
            api.manual_seed(self._seed)
            self._seed = None
        elif self._generator is not None:
            api.set_rng_state(self._generator)


@contextlib.contextmanager
def _host_generators_kept() -> Iterator[None]:
    host, python, arrays = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(host)
        random.setstate(python)
        np.random.set_state(arrays)
