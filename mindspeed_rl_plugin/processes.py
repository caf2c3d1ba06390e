"""When a process began; temporary folders; ending this process while its main thread hangs; work in a thread."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import TypeVar

from mindspeed_rl_plugin.environment import flush_output, last_words, launcher

Result = TypeVar("Result")
LAUNCHER_LOOK_SECONDS = 1.0  # between two checks of the launcher
INTERRUPT_SECONDS = 3.0  # time for the main thread to handle SIGINT; torchrun kills the process after 30 s


def began(process: int) -> int | None:
    """When a process began, in the kernel's ticks; its number and this time identify it. None if it has ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            state, *fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "XZ" else int(fields[18])


def state_of(process: int, since: int | None) -> str:
    """State of a process of this machine: "stopped" by a signal, "ended" if it does not exist any more, else "". since:
    as `began` gave it."""
    if began(process) != since:
        return "ended"
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
        return "stopped" if file.read().rpartition(")")[2].split()[0] in "Tt" else ""
    return "ended"


def machine() -> str:
    """Name of this machine: equal in all processes that can share memory through one /proc. Containers of one machine
    may have different names; processes of one container have the same name."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    spaces = ":".join(str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("pid", "net"))
    return f"{socket.gethostname()} {boot[:8]} {spaces}"


@contextlib.contextmanager
def scratch(what: str) -> Iterator[str]:
    """A temporary folder, whose name begins with `what` and identifies its process. Folders of killed processes of this
    machine and PID namespace are removed."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    ours = f"{what}-{boot}-{os.stat('/proc/self/ns/pid').st_ino}-"
    for folder in Path(tempfile.gettempdir()).glob(f"{ours}*"):
        process, since, _ = folder.name.removeprefix(ours).split("-", 2)
        if str(began(int(process))) != since:
            shutil.rmtree(folder, ignore_errors=True)  # another user may own it
    with tempfile.TemporaryDirectory(prefix=f"{ours}{os.getpid()}-{began(os.getpid())}-") as folder:
        yield folder


_heard = False  # whether the main thread has handled SIGINT


def attend(interrupted: Callable[[], bool] = lambda: not _heard) -> None:
    """Start a thread that ends this process soon after Ctrl-C (unless the user's code handles that signal), and when
    its launcher has ended: a main thread that waits in a library notices neither. interrupted: called after Ctrl-C;
    returns whether to end the process. Default: it is ended if the main thread has not handled the signal."""
    heard, wakes = socket.socketpair()
    wakes.setblocking(False)
    heard.settimeout(LAUNCHER_LOOK_SECONDS)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _hear)
    signal.set_wakeup_fd(wakes.detach(), warn_on_full_buffer=False)
    above = launcher()
    since = above and began(above)  # read before the thread runs: the launcher may have ended by then
    threading.Thread(target=_attend, args=(heard, above, since, interrupted), daemon=True).start()


def _hear(number: int, frame: FrameType | None) -> None:
    global _heard
    _heard = True
    signal.default_int_handler(number, frame)


def _attend(heard: socket.socket, above: int | None, since: int | None, interrupted: Callable[[], bool]) -> None:
    """heard: receives numbers of signals; above: process of torchrun, or None; since: when that process began."""
    number = 0
    while number != signal.SIGINT or signal.getsignal(signal.SIGINT) is not _hear:
        if above and began(above) != since:
            last_words(f"torchrun (process {above}) is gone: process {os.getpid()}, which it started, ends too")
            flush_output()
            os._exit(1)
        try:
            number = heard.recv(1)[0]
        except TimeoutError:
            number = 0
    time.sleep(INTERRUPT_SECONDS)
    if interrupted():
        os._exit(128 + signal.SIGINT)


def in_background(name: str, work: Callable[[], Result]) -> Future[Result]:
    """Run `work` in a thread `name`, which does not keep the process from ending. Returns a future of the result."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future
