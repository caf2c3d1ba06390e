"""A worker process as its parent sees it: started fresh, spoken to by lines, killed with its whole group."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mindspeed_rl_plugin.reward.worker import main; main(*map(int, sys.argv[2:]))"
)
CHUNK = 1 << 16


class WorkerProcess:
    """One fresh interpreter running `worker.main`.

    Not `multiprocessing`: its spawn imports the parent's main module again, which under torchrun is the training
    script. The process leads a group of its own, so that a kill reaches what a grader started itself; it dies with
    this process, since only this process holds the other end of its lifeline.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        jobs, self._jobs = os.pipe()
        self._answers, answers = os.pipe()
        lifeline, self._lifeline = os.pipe()
        ends = (jobs, answers, lifeline)
        command = [sys.executable, "-c", BOOT, json.dumps([str(p) for p in sys.path]), *map(str, ends)]
        self._process = subprocess.Popen(command, pass_fds=ends, stdin=subprocess.DEVNULL, start_new_session=True)
        for end in ends:
            os.close(end)
        os.set_blocking(self._jobs, False)
        os.set_blocking(self._answers, False)
        self._buffer = b""
        self.closed = False
        self.send(setup, 10.0)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def fileno(self) -> int:
        """Readable when an answer or the end has come (for `ready`)."""
        return self._answers

    def send(self, message: dict[str, Any], seconds: float) -> bool:
        """Write one line within `seconds`; False when the worker does not take it, being dead or stuck."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        end = time.monotonic() + seconds
        while data:
            if not ready([self._jobs], select.POLLOUT, end - time.monotonic()):
                return False
            try:
                data = data[os.write(self._jobs, data[:CHUNK]) :]
            except BrokenPipeError:
                return False
        return True

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """The lines that have come, without waiting, and whether the worker is still there."""
        alive = True
        while True:
            try:
                data = os.read(self._answers, CHUNK)
            except BlockingIOError:
                break
            if not data:
                alive = False
                break
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines], alive

    def _exit_code(self) -> int | None:
        """None for a process that lives; one whose pipe is at its end gets a moment to be gone."""
        if not self.receive()[1]:
            try:
                return self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                return None
        return self._process.poll()

    def kill(self) -> str:
        """End the process group at once; says how the process had ended, if it had."""
        if self.closed:
            return "was closed"
        self.closed = True
        code = self._exit_code()
        with contextlib.suppress(ProcessLookupError):  # gone already, its children too
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for end in (self._jobs, self._answers, self._lifeline):
            os.close(end)
        if code is None:
            return "was killed"
        return f"died of signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exited with code {code}"


def ready(handles: Iterable[int], event: int, seconds: float) -> bool:
    """Whether a descriptor comes to `event`, or to its end, within `seconds`. `select.select` takes none from 1024 on,
    and a rank may have more files open than that."""
    poll = select.poll()
    for handle in handles:
        poll.register(handle, event)
    return bool(poll.poll(math.ceil(max(0.0, seconds) * 1000)))
