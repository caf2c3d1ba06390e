"""Meters of device memory, and the free memory of the host."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ProcessMeter:
    """Resident bytes of this whole process: tensors, code, libraries and every other heap.

    Cheap (one read of /proc), always on, and coarse: freed memory that malloc keeps still counts. The peak is the
    kernel's high-water mark; if that cannot be reset (some sandboxes), the largest value at calls of this meter. For
    exact bytes of tensors use `StorageMeter`.
    """

    measures = "resident memory of the process on the host, its code and libraries included"

    def __init__(self) -> None:
        self._seen = 0
        self._kernel_peak = True

    def allocated(self) -> int:
        now = _number("/proc/self/status", "VmRSS:") * 1024
        self._seen = max(self._seen, now)
        return now

    def peak(self) -> int:
        now = self.allocated()
        return max(now, _number("/proc/self/status", "VmHWM:") * 1024 if self._kernel_peak else self._seen)

    def reset_peak(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._kernel_peak = False
        self._seen = 0
        self.allocated()


# Storages of `Device.host_empty` on CPU, which with an accelerator would be host memory.
_HOST_STORAGES: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()


def mark_host(storage: torch.UntypedStorage) -> None:
    """Let every `StorageMeter` leave the storage out."""
    _HOST_STORAGES[storage._cdata] = storage


class StorageMeter(TorchDispatchMode):
    """Exact bytes of CPU tensor storages that are made within the context, or tracked.

    Opt-in: every torch operation inside the context costs some microseconds more. Counts each storage once, with its
    present size, for any number of views; leaves out buffers of `Device.host_empty`. Storages made before the context
    are unknown to it until `track` names them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._top = 0

    def allocated(self) -> int:
        return sum(storage.nbytes() for storage in self._live.values())

    def peak(self) -> int:
        return max(self._top, self.allocated())

    def reset_peak(self) -> None:
        self._top = self.allocated()

    def track(self, *tensors: Tensor) -> None:
        """Count tensors that were made before the context was entered."""
        each = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        if new := {key: s for key, s in each.items() if key not in self._live and key not in _HOST_STORAGES}:
            self._live.update(new)
            self._top = self.peak()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        plain = (t for t in tree_leaves(out) if type(t) in (Tensor, torch.nn.Parameter))
        self.track(*(t for t in plain if t.device.type == "cpu" and t.layout == torch.strided))
        return out


class Temporary:
    """The additional memory of a block of work, by one meter.

    meter: `StorageMeter`, or one that is always on; peak: most bytes of the last measured block, above those at its
    start. Measuring resets the meter's peak; a monitor stage around the block keeps the peaks of other stages correct.
    """

    def __init__(self, meter: Any) -> None:
        self._meter = meter
        self.peak = 0

    @contextlib.contextmanager
    def measured(self, *present: Tensor) -> Iterator[None]:
        """Measure the block. present: existing tensors that it may change."""
        with contextlib.ExitStack() as stack:
            if isinstance(self._meter, StorageMeter):
                stack.enter_context(self._meter).track(*present)
            self._meter.reset_peak()
            base = self._meter.allocated()
            yield
            self.peak = self._meter.peak() - base


def host_available(root: Path = Path("/")) -> int:
    """Free bytes of host memory: the kernel's available memory, or less by a control group.

    root: of the file system, for tests.
    """
    free = _number(root / "proc/meminfo", "MemAvailable:") * 1024 or sys.maxsize
    for group, limit, used, kept in _control_groups(root):
        with contextlib.suppress(OSError):  # no such control group: other limits apply
            most = (group / limit).read_text().strip()
            if most != "max":
                given_back = _number(group / "memory.stat", kept)  # on demand
                free = min(free, int(most) - int((group / used).read_text()) + given_back)
    return max(free, 0)


def host_total(root: Path = Path("/")) -> int:
    """Bytes of host memory with swap: of the machine, or less by a control group."""
    limits = [_number(root / "proc/meminfo", "MemTotal:") * 1024 or sys.maxsize]
    for group, limit, *_ in _control_groups(root):
        with contextlib.suppress(OSError, ValueError):  # no such control group, or one without a limit ("max")
            limits.append(int((group / limit).read_text()))
    return min(limits) + _number(root / "proc/meminfo", "SwapTotal:") * 1024


def _control_groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """This process's control groups and their parents: folder, and the names of limit, use and file pages in it.

    Inside a container the top folder is the container's own, whatever the path of the process is.
    """
    names = {"": ("memory.max", "memory.current", "inactive_file")}  # version 2, and version 1:
    names["memory"] = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in names:
            top = root / "sys/fs/cgroup" / controllers
            inner = top / path.lstrip("/")
            for group in (inner, *inner.parents):
                if group.is_relative_to(top):
                    yield group, *names[controllers]


def _number(path: str | Path, key: str) -> int:
    """The number after a key in a file of lines; 0 without the key."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key + (" " if key[-1] != ":" else ""))), 0)
