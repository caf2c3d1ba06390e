"""The accelerator of this process: npu, cuda or cpu, behind one small class, and copies that overlap other work.

Detection order is NPU, CUDA, CPU. The environment variable MINDSPEED_RL_DEVICE (npu, cuda or cpu)
overrides it and is taken at its word; it exists for tests and for machines that misreport. This is
the only module of the package that imports torch_npu, and it does so only where the package exists.
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
    """The package's interface to an accelerator. `get_device` returns the one of this process.

    kind: "npu" | "cuda" | "cpu"; memory: the meter of the current device (of this process, on CPU).
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
        """torch.npu or torch.cuda. A programming error on CPU, which has no such namespace."""
        assert not self.is_cpu, "Device.api: the CPU has no accelerator namespace"
        return _torch_npu().npu if self.kind == "npu" else torch.cuda

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
        """Free cached blocks of the allocator."""
        if not self.is_cpu:
            self.api.empty_cache()

    def copier(self) -> StreamCopier | ThreadCopier:
        """Starts copies that overlap other work: a side stream, or on CPU a thread."""
        return ThreadCopier() if self.is_cpu else StreamCopier(self.api)

    def temporary(self) -> Temporary:
        """Measures the memory of a block of work: by the allocator, on CPU by the storages of tensors."""
        return Temporary(StorageMeter() if self.is_cpu else AllocatorMeter(self))

    def in_base_format(self, tensor: Tensor) -> bool:
        """Whether the bytes of a tensor are ordered by its shape and strides. An NPU also has formats of its own, such
        as FRACTAL_NZ, into which plain bytes cannot be written."""
        return self.kind != "npu" or int(_torch_npu().get_npu_format(tensor)) in BASE_FORMATS

    def host_available(self) -> int:
        """Bytes that this machine, or the control group of this process, can still give as host memory."""
        return host_available()

    def page_lock(self, memory: np.ndarray) -> None:
        """Page-lock host memory that torch has not allocated, such as that of a shared file, so that copies to and from
        the device are as fast as with pinned memory. Without platform support (only CUDA has it) copies are slower, but
        correct. It is unlocked when the array is freed. Idempotent."""
        address = memory.ctypes.data
        if self.kind != "cuda" or not memory.nbytes or address in self._locked:
            return
        library = torch.cuda.cudart()
        torch.cuda.check_error(library.cudaHostRegister(address, memory.nbytes, 0))
        self._locked[address] = memory
        weakref.finalize(memory, library.cudaHostUnregister, address).atexit = False

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised host buffer `shape` for copies from and to the device: pinned where there is one.

        On CPU it is an ordinary tensor that `StorageMeter` knows not to count as device memory. torch rounds pinned
        memory up to a power of two of bytes: large buffers should ask for one. Raises MemoryError where the host has
        none left.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        try:
            if not self.is_cpu:
                return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
            storage = torch.UntypedStorage(nbytes)
        except RuntimeError as error:  # torch has no error type for it
            raise MemoryError(
                f"the host has no {nbytes} bytes more for training state ({str(error).splitlines()[0][:200]}); offload "
                "less (for example --rl-swap grads,optimizer), or run fewer ranks per machine"
            ) from error
        mark_host(storage)
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, torch.Size(shape))


@lru_cache(maxsize=1)
def get_device() -> Device:
    """The device of this process, detected once.

    Cached on purpose: after `host` has put its stand-ins in place, torch.cuda claims to be available.
    Raises ValueError when MINDSPEED_RL_DEVICE holds an unknown kind.
    """
    return Device(detect())


def detect() -> str:
    """The kind of this machine, "npu", "cuda" or "cpu": from the override, else from the hardware."""
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
    """Bytes in use on the current device: tensors, blocks that torch keeps for reuse, graphs, buffers of communicators.
    torch's own counters do not include the last two, and still count memory that a sleeping engine has freed.

    The peak is the largest value at a call of this meter: torch keeps the memory that a stage needed at most.
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
    """Bytes that live tensors hold in the caching allocator of the current device (reserved but free blocks are not
    counted)."""

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
    """Copies that were started."""

    wait: Callable[[], None]  # later work on the current stream waits for them
    synchronize: Callable[[], None]  # returns once they are done


class StreamCopier:
    """Copies on a side stream of `api` (torch.npu or torch.cuda). Waiting is for an event that is recorded after
    them."""

    def __init__(self, api: ModuleType) -> None:
        self.api, self._stream = api, api.Stream()

    def start(self, copies: Callable[[], None]) -> Copying:
        """Begin a batch of copies, after the batches before it and after all work that is queued already. The caller
        must not change the memory of `copies` before it has waited."""
        event = self.api.Event()
        self._stream.wait_stream(self.api.current_stream())
        with self.api.stream(self._stream):
            copies()
            event.record(self._stream)
        return Copying(lambda: self.api.current_stream().wait_event(event), event.synchronize)


class ThreadCopier:
    """Copies in a thread, for CPU: as on a device, only the waits order copies and other work."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")

    def start(self, copies: Callable[[], None]) -> Copying:
        try:
            done = self._thread.submit(copies)
        except RuntimeError:  # the interpreter ends and starts no more work in threads: copy here
            copies()
            done = Future()
            done.set_result(None)
        return Copying(done.result, done.result)
