"""A parent process (keeper) of a worker whose code may start processes in other sessions, which a kill of the worker's
process group does not reach.

It adopts orphaned descendants of the worker, and ends all descendants when the worker ends, or when the keeper's parent
ends or closes the lifeline. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator, Sequence

WORKER_LOOK_SECONDS = 0.1  # seconds between checks of the worker
ADOPT, DIE = 36, 1  # PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG of prctl(2)


def keep(connection: int, lifeline: int, patience: float, folder: str | None = None) -> None:
    """Fork: the worker continues after this call in the child, and the calling process becomes its keeper. connection,
    lifeline: file descriptors, as `process.Worker` passes them. When the lifeline is closed, the worker gets SIGTERM,
    and when it has ended, or after `patience` seconds, all processes get SIGKILL. If the keeper itself gets SIGTERM, it
    kills them immediately. At the end it removes `folder`."""
    killed: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: killed.append(number))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(ADOPT, 1, 0, 0, 0)
    worker = os.fork()
    if not worker:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        prctl(DIE, signal.SIGKILL, 0, 0, 0)
        os.close(lifeline)
        os.set_inheritable(connection, False)
        return
    os.close(connection)
    code = _watch(worker, lifeline, patience, killed)
    while left := [*_children()]:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(WORKER_LOOK_SECONDS / 10)
        _reap(0)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    if code < 0:  # end by the worker's signal, so that the parent can report it
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _watch(worker: int, lifeline: int, patience: float, killed: Sequence[int]) -> int:
    """Wait until the worker has ended, or a signal is in `killed`, or `patience` has passed since the lifeline was
    closed. Returns the worker's exit code (-signal if a signal ended it); 1 if it has not ended."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    code = None
    while code is None and not killed and not poll.poll(1000 * WORKER_LOOK_SECONDS):
        code = _reap(worker)
    if code is not None or killed:
        return 1 if code is None else code
    os.kill(worker, signal.SIGTERM)
    end = time.monotonic() + patience
    while code is None and not killed and time.monotonic() < end:
        time.sleep(WORKER_LOOK_SECONDS)
        code = _reap(worker)
    return 1 if code is None else code


def _reap(worker: int) -> int | None:
    """Reap children that have ended. Returns the exit code of the worker if it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):  # no children
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if ended[0] == worker:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _children() -> Iterator[int]:
    """Children of this process that have not ended. Orphans of a child become children of this process."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
                state, parent = stat.read().rpartition(")")[2].split()[:2]
            if state != "Z" and int(parent) == os.getpid():
                yield int(name)
