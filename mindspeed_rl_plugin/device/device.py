"""One small class for the accelerator of this process (npu, cuda or cpu), and copies that overlap other work.

The device is the first of NPU, CUDA and CPU that is found. The environment variable MINDSPEED_RL_DEVICE (npu, cuda or
cpu) replaces this detection, for tests and for machines where it is wrong; the hardware is then not checked. Only this
module of the package imports torch_npu, if it is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_rl_plugin.device.meters import (
    ProcessMeter,
    StorageMeter,
    Temporary,
    host_available,
    mark_host,
)

DEVICES = ("npu", "cuda", "cpu")
OVERRIDE = "MINDSPEED_RL_DEVICE"
BASE_FORMATS = (0, 1, 2, 30)  # NCHW, NHWC, ND, NCDHW: aclFormat of CANN


class Device:
    """The package's interface to an accelerator. `get_device` returns that of this process.

    kind: "npu" | "cuda" | "cpu"; memory: a meter of the current device or, if it is a CPU, of this process.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._locked: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()  # by address
        self.memory = ProcessMeter() if kind == "cpu" else DeviceMeter(self)

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def api(self) -> ModuleType:
        """torch.npu or torch.cuda. To read it on CPU is a programming error."""
        assert not self.is_cpu, "Device.api: the CPU has no accelerator namespace"
        return _torch_npu().npu if self.kind == "npu" else torch.cuda

    @property
    def merge_dtype(self) -> torch.dtype:
        """The dtype in which adapters are merged: float64 moves twice the bytes, and an NPU cannot multiply in it."""
        return torch.float64 if self.is_cpu else torch.float32

    def current(self) -> torch.device:
        """The current device of this process, with its index."""
        return torch.device("cpu") if self.is_cpu else torch.device(self.kind, self.api.current_device())

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the current device; memory of other processes counts as used."""
        return self.api.mem_get_info()

    def synchronize(self) -> None:
        """Wait for all work queued on the current device."""
        if not self.is_cpu:
            self.api.synchronize()

    def synchronize_stream(self) -> None:
        """Wait for all work queued on the current stream; copies on side streams continue."""
        if not self.is_cpu:
            self.api.current_stream().synchronize()

    def empty_cache(self) -> None:
        """Give cached blocks of torch's allocator back to the device."""
        if not self.is_cpu:
            self.api.empty_cache()

    def copier(self) -> StreamCopier | ThreadCopier:
        """An object that starts copies on a side stream (on CPU: in a thread), so that they overlap other work."""
        return ThreadCopier() if self.is_cpu else StreamCopier(self.api)

    def profiler(self) -> Any:
        """torch's profiler of the host and of this device, not started. On an NPU it is the base class of torch_npu's
        `profile`, which leaves its raw data in the working directory."""
        profiler = importlib.import_module("torch_npu.profiler") if self.kind == "npu" else torch.profiler
        names = ("CPU",) if self.is_cpu else ("CPU", self.kind.upper())
        make = profiler._KinetoProfile if self.kind == "npu" else profiler.profile
        return make(activities=[getattr(profiler.ProfilerActivity, name) for name in names])

    def temporary(self) -> Temporary:
        """Measures the memory that a block of code takes: from torch's allocator or, on CPU, in tensor storages."""
        return Temporary(StorageMeter() if self.is_cpu else AllocatorMeter(self))

    def in_base_format(self, tensor: Tensor) -> bool:
        """Whether the bytes of a tensor are ordered by its shape and strides. An NPU has other formats too, such as
        FRACTAL_NZ: bytes in the order of the shape cannot be copied into these."""
        return self.kind != "npu" or int(_torch_npu().get_npu_format(tensor)) in BASE_FORMATS

    def host_available(self) -> int:
        """Bytes that this machine, or the control group of this process, can still give as host memory."""
        return host_available()

    def page_lock(self, memory: np.ndarray) -> None:
        """Page-lock host memory that torch has not allocated, such as that of a shared file, so that copies to and from
        the device are as fast as with pinned memory. Without CUDA it does nothing, and copies are slower. The memory is
        unlocked when the array is freed. Idempotent."""
        address = memory.ctypes.data
        if self.kind != "cuda" or not memory.nbytes or address in self._locked:
            return
        library = torch.cuda.cudart()
        torch.cuda.check_error(library.cudaHostRegister(address, memory.nbytes, 0))
        self._locked[address] = memory
        weakref.finalize(memory, library.cudaHostUnregister, address).atexit = False

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised host buffer `shape` for copies from and to the device, pinned if there is an accelerator.

        On CPU it is an ordinary tensor that `StorageMeter` does not count. torch rounds the bytes of pinned memory up
        to a power of two, so the size of a large buffer should be a power of two. Raises MemoryError if the host has
        no memory left.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        try:
            if not self.is_cpu:
                return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
            storage = torch.UntypedStorage(nbytes)
        except RuntimeError as error:  # torch raises no special type
            raise MemoryError(
                f"the host does not have {nbytes} more bytes for training state ({str(error).splitlines()[0][:200]}); "
                "offload less (for example --rl-swap grads,optimizer), or run fewer ranks per machine"
            ) from error
        mark_host(storage)
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, torch.Size(shape))


@lru_cache(maxsize=1)
def get_device() -> Device:
    """The device of this process, detected once.

    It must be cached: once host mode (`mindspeed_rl_plugin.host`) has replaced functions of torch.cuda, torch.cuda
    reports that it is available. Raises ValueError if MINDSPEED_RL_DEVICE is an unknown kind.
    """
    return Device(detect())


def detect() -> str:
    """The kind of device, "npu", "cuda" or "cpu": MINDSPEED_RL_DEVICE, else by the hardware."""
    override = os.environ.get(OVERRIDE, "").strip().lower()
    if override:
        if override not in DEVICES:
            raise ValueError(f"{OVERRIDE}={override!r} is unknown; set it to one of {', '.join(DEVICES)} or unset it")
        return override
    if importlib.util.find_spec("torch_npu") is not None and _torch_npu().npu.is_available():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _torch_npu() -> ModuleType:
    return importlib.import_module("torch_npu")


class DeviceMeter:
    """Bytes in use on the current device, also by other processes: tensors, blocks that torch keeps for reuse, graphs,
    communicators. torch's counters omit graphs and communicators, and still count what a sleeping engine has freed.

    The peak is the largest value at a call of this meter. That is enough: torch keeps the memory of a stage's peak.
    """

    measures = "device memory in use"

    def __init__(self, device: Device) -> None:
        self._device, self._seen = device, 0

    def allocated(self) -> int:
        free, total = self._device.memory_info()
        self._seen = max(self._seen, total - free)
        return total - free

    def peak(self) -> int:
        self.allocated()
        return self._seen

    def reset_peak(self) -> None:
        self._seen = 0
        self.allocated()


class AllocatorMeter:
    """Bytes of live tensors in torch's caching allocator of the current device, without blocks kept for reuse."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def allocated(self) -> int:
        return self._device.api.memory_allocated()

    def peak(self) -> int:
        return self._device.api.max_memory_allocated()

    def reset_peak(self) -> None:
        self._device.api.reset_peak_memory_stats()


@dataclass(frozen=True)
class Copying:
    """Copies that have been started."""

    wait: Callable[[], None]  # later work on the current stream waits for them
    synchronize: Callable[[], None]  # returns once they are done


class StreamCopier:
    """Copies on a side stream of `api` (torch.npu or torch.cuda). To wait for them is to wait for an event that is
    recorded after them."""

    def __init__(self, api: ModuleType) -> None:
        self.api, self._stream = api, api.Stream()

    def start(self, copies: Callable[[], None]) -> Copying:
        """Begin a batch of copies. It runs after earlier batches, and after all work that is already queued on the
        current stream. Before the caller has waited, it must not change memory that `copies` uses."""
        event = self.api.Event()
        self._stream.wait_stream(self.api.current_stream())
        with self.api.stream(self._stream):
            copies()
            event.record(self._stream)
        return Copying(lambda: self.api.current_stream().wait_event(event), event.synchronize)


class ThreadCopier:
    """Copies in a thread, for CPU. As on a device, only a wait puts copies and other work into an order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")

    def start(self, copies: Callable[[], None]) -> Copying:
        try:
            done = self._thread.submit(copies)
        except RuntimeError:  # the interpreter ends, and threads get no new work: copy here
            copies()
            done = Future()
            done.set_result(None)
        return Copying(done.result, done.result)
