"""A worker process as its parent sees it: started fresh, again after its end, and killed with its whole group."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Pipe
from typing import TYPE_CHECKING, Any

from mindspeed_rl_plugin.reward.items import RewardError
from mindspeed_rl_plugin.reward.specs import SHARE_OF_WAIT

if TYPE_CHECKING:
    from mindspeed_rl_plugin.reward.worker import Kind, Outcome

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mindspeed_rl_plugin.reward.worker import main; main(*map(int, sys.argv[2:]))"
)
TICK = 1.0  # seconds between looks at a silent process: what it started may hold its pipe open


class Worker:
    """A fresh interpreter running `worker.main`, and another one after its end.

    Not `multiprocessing.Process`, nor a library on top of it: its spawn imports the parent's main module again, which
    under torchrun is the training script. The process leads a group of its own, so that a kill reaches what a grader
    started itself; it dies with this process, since only this process holds the other end of its lifeline.
    """

    def __init__(self, setup: tuple) -> None:
        self._setup = setup  # its first message, the specs before others
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, seconds: float) -> list[Kind]:
        """What its graders are. Raises RewardError when it cannot load them, or not within `seconds`."""
        names = ", ".join(spec.name for spec in self._setup[0])
        try:
            kinds, error = self._receive(seconds)
        except EOFError as end:
            error = f"a reward worker {end} while it loaded {names}"
        except TimeoutError:
            error = (
                f"a reward worker needs more than {seconds:g} s to load {names}; let their files do less when they are "
                f"imported, or raise --rl-wait-timeout {seconds / SHARE_OF_WAIT:g}, of which the limit is "
                f"{SHARE_OF_WAIT}"
            )
        if error:
            raise RewardError(error)
        return kinds

    def call(self, grader: int, items: Sequence[Mapping[str, Any]], seconds: float) -> list[Outcome]:
        """The grades of `items`. Raises TimeoutError when that takes longer than `seconds`, and EOFError, which says
        how, when the process ends; RewardError where its successor cannot load its graders."""
        if self._process.poll() is not None:
            self.close()
            self._start()
            self.load(math.inf)
        try:
            self._connection.send((grader, items))
            return self._receive(seconds)
        except TimeoutError:
            self.close()
            raise
        except ConnectionError:
            raise EOFError(self._end()) from None

    def kill(self) -> None:
        """End the process group at once; `close` is still to come."""
        if not self._connection.closed:
            with contextlib.suppress(ProcessLookupError):  # gone already, its children too
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill, and let go of everything. Idempotent."""
        self.kill()
        self._process.wait()
        if not self._connection.closed:
            self._connection.close()
            os.close(self._lifeline)

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        lifeline, self._lifeline = os.pipe()
        ends = (theirs.fileno(), lifeline)
        command = [sys.executable, "-c", BOOT, json.dumps([str(p) for p in sys.path]), *map(str, ends)]
        self._process = subprocess.Popen(command, pass_fds=ends, stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        os.close(lifeline)
        with contextlib.suppress(OSError):  # dead already: `_receive` says so
            self._connection.send(self._setup)

    def _receive(self, seconds: float) -> Any:
        """Its next message. Raises TimeoutError when none comes within `seconds`, EOFError when the process ended."""
        end = time.monotonic() + seconds
        while not self._connection.poll(max(0.0, min(end - time.monotonic(), TICK))):
            if self._process.poll() is not None and not self._connection.poll(0):
                raise EOFError(self._end())
            if time.monotonic() >= end:
                raise TimeoutError
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            raise EOFError(self._end()) from None

    def _end(self) -> str:
        """How the process ended, whose pipe closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # its pipe closes a moment before it is gone
            self._process.wait(1.0)
        code = self._process.poll()
        self.close()
        if code is None:
            return "was killed"
        return f"died of signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exited with code {code}"
