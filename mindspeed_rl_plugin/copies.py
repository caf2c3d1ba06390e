"""Copies between a device and its host that pass beside other work, and how much memory the host has for them.

Part of `device`, which chooses the kind.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mindspeed_rl_plugin.device import Device


class Copying(Protocol):
    """Copies that were started."""

    def wait(self) -> None:
        """Later work on the current stream comes after the copies."""

    def synchronize(self) -> None:
        """Return once the copies are done."""


class Copier(Protocol):
    """Starts copies one batch after the other, each after all work that was queued before it."""

    def start(self, copies: Callable[[], None]) -> Copying:
        """Begin; `copies` must touch nothing that the caller changes before the wait."""


class StreamCopier:
    """A side stream; the event behind the copies is what is waited for."""

    def __init__(self, device: Device) -> None:
        self._device, self._stream = device, device.stream()

    def start(self, copies: Callable[[], None]) -> Copying:
        event = self._device.event()
        self._stream.wait_stream(self._device.current_stream())
        with self._device.on_stream(self._stream):
            copies()
            event.record(self._stream)
        return _StreamCopying(self._device, event)


class _StreamCopying:
    def __init__(self, device: Device, event: Any) -> None:
        self._device, self._event = device, event

    def wait(self) -> None:
        self._device.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()


class ThreadCopier:
    """A thread, so that on CPU too the order of copies and other work is kept by the waits alone."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")

    def start(self, copies: Callable[[], None]) -> Copying:
        try:
            done = self._thread.submit(copies)
        except RuntimeError:  # the interpreter ends, and its threads take nothing more: what closes then copies here
            copies()
            done = Future()
            done.set_result(None)
        return _ThreadCopying(done)


class _ThreadCopying:
    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def wait(self) -> None:
        self._done.result()

    synchronize = wait


def host_available(root: Path = Path("/")) -> int:
    """Free bytes of host memory: what the kernel calls available, or less where a control group allows less.

    root: of the file system, for tests.
    """
    free = _number(root / "proc/meminfo", "MemAvailable:") * 1024 or sys.maxsize
    for group, limit, used, kept in _control_groups(root):
        with contextlib.suppress(OSError):  # no such control group: the limits of the others hold
            most = (group / limit).read_text().strip()
            if most != "max":
                given_back = _number(group / "memory.stat", kept)  # on demand
                free = min(free, int(most) - int((group / used).read_text()) + given_back)
    return max(free, 0)


def _control_groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """This process's control groups and those around them: folder, and the names of limit, use and file pages in it.

    Inside a container the folder at the top is the container's own, whatever the process's path says.
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
    """The number behind a key in a file of lines, 0 without."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key + (" " if key[-1] != ":" else ""))), 0)
