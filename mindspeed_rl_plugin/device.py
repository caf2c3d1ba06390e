"""The accelerator of this process: npu, cuda or cpu, behind one small class.

Detection order is NPU, CUDA, CPU. The environment variable MINDSPEED_RL_DEVICE (npu, cuda or cpu)
overrides it and is taken at its word; it exists for tests and for machines that misreport. This is
the only module of the package that imports torch_npu, and it does so only where the package exists.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed_rl_plugin.copies import Copier, StreamCopier, ThreadCopier, host_available

BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
OVERRIDE = "MINDSPEED_RL_DEVICE"


class Meter(Protocol):
    """Bytes in use. measures: in words, what counts as a byte in use."""

    measures: str

    def allocated(self) -> int:
        """Bytes in use now."""

    def peak(self) -> int:
        """Most bytes in use at once since the last `reset_peak`."""

    def reset_peak(self) -> None:
        """Start a new peak at the present use."""


class Device:
    """What the package asks of an accelerator. Get the one of this process from `get_device`.

    kind: "npu" | "cuda" | "cpu"; backend: its torch.distributed backend, "hccl" | "nccl" | "gloo";
    memory: a `Meter` of the current device (of this process, on CPU).
    """

    def __init__(self, kind: str) -> None:
        if kind not in BACKENDS:
            raise ValueError(f"device kind {kind!r} is unknown; known: {', '.join(BACKENDS)}")
        self.kind = kind
        self.backend = BACKENDS[kind]
        self.memory: Meter = ProcessMeter() if kind == "cpu" else AcceleratorMeter(self)

    def __repr__(self) -> str:
        return f"Device({self.kind!r})"

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

    def count(self) -> int:
        """Devices that this process can see; 1 on CPU."""
        return 1 if self.is_cpu else self.api.device_count()

    def memory_info(self) -> tuple[int, int]:
        """Free bytes of the current device, and all that it has; other processes' use counts."""
        free, total = self.api.mem_get_info()
        return free, total

    def synchronize(self) -> None:
        """Wait for all work queued on the current device."""
        if not self.is_cpu:
            self.api.synchronize()

    def synchronize_stream(self) -> None:
        """Wait for all work queued on the current stream; what side streams copy goes on."""
        self.current_stream().synchronize()

    def empty_cache(self) -> None:
        """Give cached blocks of the allocator back to the device."""
        if not self.is_cpu:
            self.api.empty_cache()

    def stream(self) -> Any:
        """A new stream; on CPU an object of the same methods on which work is simply done at once."""
        return NullStream() if self.is_cpu else self.api.Stream()

    def current_stream(self) -> Any:
        return NullStream() if self.is_cpu else self.api.current_stream()

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Context in which new work is queued on `stream`."""
        return contextlib.nullcontext() if self.is_cpu else self.api.stream(stream)

    def event(self) -> Any:
        """A new event; on CPU one that has always happened."""
        return NullEvent() if self.is_cpu else self.api.Event()

    def copier(self) -> Copier:
        """A lane for copies that pass beside other work: a side stream, or on CPU a thread."""
        return ThreadCopier() if self.is_cpu else StreamCopier(self)

    def host_available(self) -> int:
        """Bytes that this machine, or the control group of this process, can still give as host memory."""
        return host_available()

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
        except RuntimeError as error:  # torch has no type of its own for it
            raise MemoryError(
                f"the host has no {nbytes} bytes more for training state ({str(error).splitlines()[0][:200]}); swap "
                "less (for example --rl-swap grads,optimizer), or run fewer ranks a machine"
            ) from error
        _mark_host(storage)
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, torch.Size(shape))


@lru_cache(maxsize=1)
def get_device() -> Device:
    """The device of this process, detected once.

    Cached on purpose: after `host` has put its stand-ins in place, torch.cuda claims to be available.
    Raises ValueError when MINDSPEED_RL_DEVICE holds an unknown kind.
    """
    return Device(detect())


def detect() -> str:
    """The kind of this machine, "npu", "cuda" or "cpu", from the override or from what is really there."""
    override = os.environ.get(OVERRIDE, "").strip().lower()
    if override:
        if override not in BACKENDS:
            raise ValueError(f"{OVERRIDE}={override!r} is unknown; set it to one of {', '.join(BACKENDS)} or unset it")
        return override
    if importlib.util.find_spec("torch_npu") is not None and _torch_npu().npu.is_available():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _torch_npu() -> ModuleType:
    return importlib.import_module("torch_npu")


class NullEvent:
    """The event of a device that finishes all work before it returns: it holds the time it was recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from the record of this event to that of `end`."""
        return (end._seconds - self._seconds) * 1e3


class NullStream:
    """The stream of a device that finishes all work before it returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes and ignores what a real stream takes: device, priority."""

    def __enter__(self) -> NullStream:
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing to restore."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        event = event if event is not None else NullEvent()
        event.record()
        return event

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True


class AcceleratorMeter:
    """Bytes that live tensors hold in the caching allocator of the current device (reserved but free
    blocks are not counted)."""

    measures = "device memory allocated by tensors"

    def __init__(self, device: Device) -> None:
        self._device = device

    def allocated(self) -> int:
        return self._device.api.memory_allocated()

    def peak(self) -> int:
        return self._device.api.max_memory_allocated()

    def reset_peak(self) -> None:
        self._device.api.reset_peak_memory_stats()


class ProcessMeter:
    """Resident bytes of this whole process: tensors, code, libraries and every other heap.

    Cheap (one read of /proc), always on, and coarse: freed memory that malloc keeps still counts. The
    peak is the kernel's high-water mark, reset through /proc/self/clear_refs; where /proc does not
    allow that (other systems, some sandboxes), the peak is the largest value that a call of this
    meter has seen since the reset. For exact bytes of tensors use `StorageMeter`.
    """

    measures = "resident memory of the process on the host, its code and libraries included"

    def __init__(self) -> None:
        self._seen = 0
        self._kernel_peak = os.access("/proc/self/status", os.R_OK)

    def allocated(self) -> int:
        now = _proc_status("VmRSS") if os.access("/proc/self/status", os.R_OK) else _max_rss()
        self._seen = max(self._seen, now)
        return now

    def peak(self) -> int:
        return max(self.allocated(), _proc_status("VmHWM") if self._kernel_peak else self._seen)

    def reset_peak(self) -> None:
        try:
            with open("/proc/self/clear_refs", "w") as handle:
                handle.write("5")
        except OSError:
            self._kernel_peak = False
        self._seen = 0
        self.allocated()


def _proc_status(key: str) -> int:
    with open("/proc/self/status") as handle:
        for line in handle:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise KeyError(f"/proc/self/status has no {key}")


def _max_rss() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_HOST_STORAGES: set[int] = set()


def _mark_host(storage: torch.UntypedStorage) -> None:
    _HOST_STORAGES.add(storage._cdata)
    weakref.finalize(storage, _HOST_STORAGES.discard, storage._cdata)


class StorageMeter(TorchDispatchMode):
    """Exact bytes of the CPU tensor storages made while the context is entered, and of those tracked.

    Opt-in: every torch operation inside the context costs some microseconds more. Counts each storage
    once however many views it has; sees `UntypedStorage.resize_`; leaves out buffers of
    `Device.host_empty`, which on an accelerator would lie in host memory. Storages made before the
    context are unknown to it until `track` names them. Same interface as the other meters.
    """

    measures = "host memory of tensors"

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self._bytes = 0
        self._top = 0
        self._lock = threading.RLock()

    def allocated(self) -> int:
        return self._bytes

    def peak(self) -> int:
        return self._top

    def reset_peak(self) -> None:
        self._top = self._bytes

    def track(self, *tensors: Tensor) -> None:
        """Count tensors that were made before the context was entered."""
        for tensor in tensors:
            self._set(tensor.untyped_storage())

    def _set(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        with self._lock:
            known = key in self._live
            size = 0 if key in _HOST_STORAGES else storage.nbytes()
            self._bytes += size - self._live.get(key, 0)
            self._live[key] = size
            self._top = max(self._top, self._bytes)
        if not known:
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        with self._lock:
            self._bytes -= self._live.pop(key, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            plain = isinstance(leaf, Tensor) and type(leaf) in (Tensor, torch.nn.Parameter)
            if plain and leaf.device.type == "cpu" and leaf.layout == torch.strided:
                self._set(leaf.untyped_storage())
        return out

    def __enter__(self) -> StorageMeter:
        _METERS.append(self)
        if len(_METERS) == 1:
            torch.UntypedStorage.resize_ = _metered_resize
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        _METERS.remove(self)
        if not _METERS:
            del torch.UntypedStorage.resize_


_METERS: list[StorageMeter] = []


def _metered_resize(storage: torch.UntypedStorage, size: int) -> Any:
    # resize_ is a method of the storage, no operator: the dispatcher never sees it.
    out = torch._C.StorageBase.resize_(storage, size)
    for meter in _METERS:
        meter._set(storage)
    return out


@contextlib.contextmanager
def metered(device: Device) -> Iterator[Meter]:
    """The most exact meter there is for `device`: `StorageMeter` on CPU, else the allocator's counters."""
    if device.is_cpu:
        with StorageMeter() as meter:
            yield meter
    else:
        yield device.memory
