"""A worker process as its parent sees it: started fresh, again after its end, and killed with its whole group."""

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
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Pipe
from typing import Any

from mindspeed_rl_plugin.reward.items import RewardError

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mindspeed_rl_plugin.reward.worker import main; main(*map(int, sys.argv[2:]))"
)
ATTEMPTS = 3  # of a job whose worker died before it took it
TICK = 1.0  # seconds between looks at a silent process: what it started may hold its pipe open


class Worker:
    """A fresh interpreter running `worker.main`, and another one after its end.

    Not `multiprocessing.Process`, nor a library on top of it: its spawn imports the parent's main module again, which
    under torchrun is the training script. The process leads a group of its own, so that a kill reaches what a grader
    started itself; it dies with this process, since only this process holds the other end of its lifeline.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._setup = setup
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, seconds: float) -> list[tuple[bool, bool, Sequence[str]]]:
        """(batch, asynchronous, fields) of its graders. Raises RewardError when it cannot load them, TimeoutError when
        that takes longer than `seconds`."""
        try:
            state, result = self._receive(seconds)
        except EOFError:
            names = ", ".join(name for name, *_ in self._setup["specs"])
            raise RewardError(f"a reward worker {self.close(ended=True)} while it loaded {names}") from None
        if state == "failed":
            raise RewardError(result)
        return result

    def answers(self, grader: int, items: Sequence[Mapping[str, Any]], seconds: float) -> Iterator[tuple]:
        """(value, error) of each item, in order. Raises TimeoutError when the next one takes longer than `seconds`, and
        EOFError, which says how, when the process ends; RewardError when one after the other ends before the job."""
        end = ""
        for _ in range(ATTEMPTS):
            if self._closed:
                self._start()
                self.load(math.inf)
            try:
                self._connection.send((grader, items))
                self._receive(math.inf)
                break
            except (EOFError, OSError):
                end = self.close(ended=True)
        else:
            raise RewardError(f"reward workers end before they take a job; the last one {end}")
        answered = 0
        while answered < len(items):
            try:
                outcomes = self._receive(seconds)
            except TimeoutError:
                self.close()
                raise
            except EOFError:
                raise EOFError(self.close(ended=True)) from None
            answered += len(outcomes)
            yield from outcomes

    def kill(self) -> None:
        """End the process group at once; `close` is still to come."""
        if not self._closed:
            with contextlib.suppress(ProcessLookupError):  # gone already, its children too
                os.killpg(self.pid, signal.SIGKILL)

    def close(self, ended: bool = False) -> str:
        """Kill, and let go of everything. Says how the process had ended, if it had. ended: it was seen to end."""
        if ended:  # its pipe closes a moment before it is gone
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        code = self._process.poll()
        self.kill()
        self._process.wait()
        if not self._closed:
            self._closed = True
            self._connection.close()
            os.close(self._lifeline)
        if code is None:
            return "was killed"
        return f"died of signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exited with code {code}"

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        self._readable = select.poll()
        self._readable.register(self._connection, select.POLLIN)
        lifeline, self._lifeline = os.pipe()
        ends = (theirs.fileno(), lifeline)
        command = [sys.executable, "-c", BOOT, json.dumps([str(p) for p in sys.path]), *map(str, ends)]
        self._process = subprocess.Popen(command, pass_fds=ends, stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        os.close(lifeline)
        self._closed = False
        with contextlib.suppress(OSError):  # dead already: `_receive` says so
            self._connection.send(self._setup)

    def _receive(self, seconds: float) -> Any:
        """Its next message. Raises TimeoutError when none comes within `seconds`, EOFError when the process ended."""
        end = time.monotonic() + seconds
        while not self._readable.poll(1000 * max(0.0, min(end - time.monotonic(), TICK))):
            if self._process.poll() is not None and not self._readable.poll(0):
                raise EOFError
            if time.monotonic() >= end:
                raise TimeoutError
        try:
            return self._connection.recv()
        except ConnectionError as error:
            raise EOFError from error
