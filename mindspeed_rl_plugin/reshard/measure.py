"""Temporary: how much memory a piece of work takes besides what was there before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from mindspeed_rl_plugin.device import Device, StorageMeter


class Temporary:
    """Measures with the device's meter, on CPU with one of tensors' storages, made once: it knows each storage by name.

    peak: bytes that the last measured block took at most, beyond those at its start. On an accelerator measuring starts
    a new peak of the device's meter; a stage of the monitor around the block keeps the peaks of other stages right.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._storages = StorageMeter() if device.is_cpu else None
        self.peak = 0

    @contextmanager
    def measured(self, *present: Tensor) -> Iterator[None]:
        """Measure the block. present: tensors that exist already, and that it may touch."""
        if self._storages is None:
            with self._block(self._device.memory):
                yield
            return
        with self._storages as meter:
            meter.track(*present)
            with self._block(meter):
                yield

    @contextmanager
    def _block(self, meter) -> Iterator[None]:
        meter.reset_peak()
        base = meter.allocated()
        yield
        self.peak = meter.peak() - base
