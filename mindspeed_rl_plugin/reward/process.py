"""A worker process as its parent sees it: started fresh, again after its end, and killed with its whole group."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Pipe, wait
from typing import Any

import msgspec

from mindspeed_rl_plugin.reward.items import RewardError
from mindspeed_rl_plugin.reward.worker import Kind

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mindspeed_rl_plugin.reward.worker import main; main(*map(int, sys.argv[2:]))"
)
# What a worker answers: its graders or why they cannot be loaded; then values, or why there are none.
LOADED, OUTCOMES = tuple[tuple[Kind, ...], str | None], list[tuple[float | None, str | None]]
STALLED = 60  # seconds without a byte within a message
TICK = 1.0  # seconds between looks at a silent process: what it started may hold its pipe open


class Worker:
    """A fresh interpreter running `worker.main`, and another one after its end.

    Not `multiprocessing.Process`, nor a library on top of it: its spawn imports the parent's main module again, which
    under torchrun is the training script. The process leads a group of its own, so that a kill reaches what a grader
    started itself; it dies with this process, since only this process holds the other end of its lifeline.
    """

    kinds: Sequence[Kind] = ()  # what its graders are, once it is ready
    unread = 0  # calls in a row before whose reading the process ended

    def __init__(self, setup: tuple) -> None:
        self._setup = setup  # its first message, the specs before others
        self._start()

    def ready(self) -> bool:
        """Whether it can take a call; one that ended is started again. Raises RewardError when it cannot load its
        graders."""
        if self._connection.closed or (self.until is None and self._process.poll() is not None):
            self.close()
            self._start()
        if self._loading and (answer := self.answer()):
            self._loading = False
            names = ", ".join(spec.name for spec in self._setup[0])
            error = f"a reward worker {answer} while it loaded {names}"
            self.kinds, error = ((), error) if isinstance(answer, str) else answer
            if error:
                self.close()
                raise RewardError(error)
        return self.until is None

    def call(self, grader: int, items: Sequence[Mapping[str, Any]], seconds: float, grace: float = 0.0) -> None:
        """Let it grade `items` within `seconds`; grace: seconds beyond, which an error does not name."""
        self._limit, self.until, self._taken = seconds, time.monotonic() + seconds + grace, True
        try:
            self._connection.send((grader, items))
        except OSError:  # dead already, or it does not read: `answer` says so
            self._taken = False

    def answer(self) -> Any:
        """What it is busy with: the outcomes of a call, or a text where it took too long or the process ended, which
        is gone then; None as long as there is nothing. `unread` counts on where it had not read the call."""
        ended = self._process.poll() is not None  # before the look for a last message
        answer = None
        try:
            if self._connection.poll():
                answer = msgspec.msgpack.decode(
                    self._connection.recv_bytes(), type=LOADED if self._loading else OUTCOMES
                )
        except (EOFError, OSError) as error:  # it was killed between two messages, or within one
            ended = True
            self._taken &= not isinstance(error, ConnectionResetError)  # so Linux says that it left bytes unread
        except msgspec.DecodeError:  # never unpickled: graders may run code that a model wrote
            self.close()
            answer = "wrote into the pipe of its worker, which was killed"
        if answer is None and ended:
            answer = self._end()
        elif answer is None and time.monotonic() >= self.until:
            answer = f"ran longer than {self._limit:g} s and was killed"
            self.close()
        if answer is not None:
            self.until = None
            if not self._loading:
                self.unread = 0 if self._taken else self.unread + 1
        return answer

    def close(self) -> None:
        """Kill the process group, and let go of everything. Idempotent."""
        if not self._connection.closed:
            with contextlib.suppress(ProcessLookupError):  # gone already, its children too
                os.killpg(self.pid, signal.SIGKILL)
            self._connection.close()
            os.close(self._lifeline)
        self._process.wait()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        lifeline, self._lifeline = os.pipe()
        ends = (theirs.fileno(), lifeline)
        command = [sys.executable, "-c", BOOT, json.dumps([str(p) for p in sys.path]), *map(str, ends)]
        self._process = subprocess.Popen(command, pass_fds=ends, stdin=subprocess.DEVNULL, start_new_session=True)
        self.pid = self._process.pid
        self._loading = self._taken = True
        self.until = math.inf  # on the monotonic clock, of what it is busy with; None: idle
        theirs.close()
        os.close(lifeline)
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # within a message
                end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALLED, 0))
        with contextlib.suppress(OSError):  # dead already: `answer` says so
            self._connection.send(self._setup)

    def _end(self) -> str:
        """How the process ended, whose pipe closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # its pipe closes a moment before it is gone
            self._process.wait(1.0)
        code = self._process.poll()
        self.close()
        if code is None:
            return "ended its process, which was killed"
        how = f"died of signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exited with code {code}"
        return f"ended its process, which {how}"


def wait_for(workers: Iterable[Worker], end: float) -> bool:
    """Until an answer, TICK at most. Returns whether that is before `end`, on the monotonic clock."""
    busy = [worker for worker in workers if worker.until is not None]
    seconds = min([end, *(worker.until for worker in busy)]) - time.monotonic()
    wait([worker._connection for worker in busy], max(0.0, min(seconds, TICK)))
    return time.monotonic() < end
