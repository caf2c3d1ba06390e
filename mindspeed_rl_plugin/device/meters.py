"""Meters of memory: of this process, of CPU tensors, of a block of code on any device; and the memory of the host."""

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
    """Resident bytes of this complete process: tensors, code, libraries and all heaps.

    Cheap (one read of /proc), but coarse: freed memory that malloc keeps still counts. The peak is the kernel's
    high-water mark or, if this mark cannot be reset (in some sandboxes), the largest value at a call of this meter. For
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


# Storages of `Device.host_empty` on CPU: with an accelerator they would be host memory.
_HOST_STORAGES: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()


def mark_host(storage: torch.UntypedStorage) -> None:
    """No `StorageMeter` will count the storage."""
    _HOST_STORAGES[storage._cdata] = storage


class StorageMeter(TorchDispatchMode):
    """Exact bytes of CPU tensor storages that are made within the context, or given to `track`.

    Every torch operation within the context takes some microseconds longer. Each storage counts once, with its current
    size, whatever number of views it has. Buffers of `Device.host_empty` do not count. Storages that were made before
    the context only count if `track` gets them.
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
        """Count the storages of these tensors too."""
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
    """The additional memory of a block of code, by one meter.

    meter: a `StorageMeter`, or a meter that needs no context; peak: largest number of bytes within the last measured
    block, minus the bytes at its start. `measured` resets the meter's peak: call it within a stage of the monitor, so
    that the peaks of other stages stay correct."""

    def __init__(self, meter: Any) -> None:
        self._meter = meter
        self.peak = 0

    @contextlib.contextmanager
    def measured(self, *present: Tensor) -> Iterator[None]:
        """Measure the block. present: existing tensors whose storages it may resize."""
        with contextlib.ExitStack() as stack:
            if isinstance(self._meter, StorageMeter):
                stack.enter_context(self._meter).track(*present)
            self._meter.reset_peak()
            base = self._meter.allocated()
            yield
            self.peak = self._meter.peak() - base


def host_available(root: Path = Path("/")) -> int:
    """Free bytes of host memory: the kernel's available memory, or what a control group leaves if that is less.

    root: root of the file system, for tests.
    """
    free = _number(root / "proc/meminfo", "MemAvailable:") * 1024 or sys.maxsize
    for group, limit, used, kept in _control_groups(root):
        with contextlib.suppress(OSError):  # no such control group: other limits apply
            most = (group / limit).read_text().strip()
            if most != "max":
                given_back = _number(group / "memory.stat", kept)  # the kernel frees these file pages on demand
                free = min(free, int(most) - int((group / used).read_text()) + given_back)
    return max(free, 0)


def host_total(root: Path = Path("/")) -> int:
    """Bytes of host memory, or the limit of a control group if that is lower; plus all swap space."""
    limits = [_number(root / "proc/meminfo", "MemTotal:") * 1024 or sys.maxsize]
    for group, limit, *_ in _control_groups(root):
        with contextlib.suppress(OSError, ValueError):  # no such control group, or one without a limit ("max")
            limits.append(int((group / limit).read_text()))
    return min(limits) + _number(root / "proc/meminfo", "SwapTotal:") * 1024


def _control_groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """This process's control groups and their parents: folder, names of its two files with the limit and the use, and
    the key in memory.stat for inactive file pages. In a container the top folder is that of the container, whatever the
    path of the process is."""
    names = {"": ("memory.max", "memory.current", "inactive_file")}  # version 2 of control groups; next line: version 1
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
    """The number after a key that begins a line of a file; 0 if there is no such key or file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key + (" " if key[-1] != ":" else ""))), 0)
