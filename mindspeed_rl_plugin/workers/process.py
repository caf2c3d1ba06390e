"""Parent's side of a worker process: starts it, starts it again after its end, and kills it with its process group."""

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
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait
from typing import Any

import msgspec

import mindspeed_rl_plugin

# Arguments of a worker: sys.path of this interpreter, or None for another interpreter, which keeps its own sys.path and
# gets only this package; the package's file; the function to call; the file descriptors for it.
BOOT = """
import importlib, importlib.util, json, sys
path, package, main, descriptors = json.loads(sys.argv[1])
if path is None:
    spec = importlib.util.spec_from_file_location("mindspeed_rl_plugin", package)
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
else:
    sys.path[:] = path
module, _, function = main.partition(":")
getattr(importlib.import_module(module), function)(*descriptors)
"""
SHARE_OF_WAIT = 0.9  # of --rl-wait-timeout that one rank may take, so that its error comes before the timeout of others
LATE = "ran longer than"
MAX_ANSWER_BYTES = 1 << 26  # bytes of an answer
STALLED = 60  # seconds without a byte within a message, after which reading or writing the message fails
WROTE = "wrote into the pipe of its worker, which was killed"
SILENCE_LOOK_SECONDS = 1.0  # seconds between checks of a silent process: its children may keep its pipe open


@dataclass(frozen=True)
class Program:
    """What a worker runs."""

    main: str  # "module:function" of this package, called with two file descriptors (see `child.Parent`)
    first: Any  # type of the value in its first answer, which is (value, error)
    then: Any  # type of its answers to calls
    who: str  # its name in messages
    raises: type[ValueError]  # the error when it cannot load
    python: str | None = None  # interpreter; None: this one, with the same module path
    patience: float = 0.0  # seconds for it to end by itself after its lifeline is closed; then it is killed
    kept: bool = False  # whether it has a `keeper`, which at SIGTERM kills all processes that it started


class Worker:
    """A program in a new interpreter, which is started again after its end. setup: the first message to it; loads:
    names of what it loads, for errors; wait: seconds of --rl-wait-timeout; loading may take SHARE_OF_WAIT of it.

    `multiprocessing.Process` is not used, because its spawn imports the parent's main module again, which under
    torchrun is the training script. The process leads a process group, so that a kill reaches children of a user's
    code. It dies with this process, because only this process holds the other end of its lifeline, a pipe.
    """

    loaded: Any = None  # its first answer, once it is ready
    unread = 0  # calls in a row that the process did not read before it ended

    def __init__(self, program: Program, setup: Any, loads: str, wait: float = math.inf) -> None:
        self._program, self._setup, self._loads, self._wait = program, setup, loads, wait
        self._start()

    def ready(self) -> bool:
        """Whether it can take a call; starts it again after its end. Raises the program's error if it cannot load."""
        if self._connection.closed or (self.until is None and self._process.poll() is not None):
            self.close()
            self._start()
        if self._loading and (answer := self.answer()):
            self._loading = False
            error = f"{self._program.who} {answer} while it loaded {self._loads}"
            if isinstance(answer, str) and answer.startswith(LATE):
                error += (
                    "; let this code do less while it is loaded or imported, or raise --rl-wait-timeout "
                    f"{self._wait:g}; the limit is {SHARE_OF_WAIT} of it"
                )
            self.loaded, error = (None, error) if isinstance(answer, str) else answer
            if error:
                self.close()
                raise self._program.raises(error)
        return self.until is None

    def call(self, message: Any, seconds: float, grace: float = 0.0) -> None:
        """Send `message`, to be answered within `seconds`; grace: further seconds, which an error does not name."""
        self._limit, self.until, self._taken = seconds, time.monotonic() + seconds + grace, True
        try:
            self._connection.send(message)
        except OSError:  # it is dead, or does not read; `answer` reports this
            self._taken = False

    def answer(self) -> Any:
        """The answer to the running call; None: no answer yet; a text if the call took too long, the process ended, or
        wrote no valid answer (its group is killed). If the process ended before it read the call, `unread` rises."""
        ended = self._process.poll() is not None  # checked before its last message is read
        answer = None
        try:
            if self._connection.poll():
                kind = tuple[self._program.first, str | None] if self._loading else self._program.then
                answer = msgspec.json.decode(self._connection.recv_bytes(MAX_ANSWER_BYTES), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError):  # never unpickled: a user's code may execute a model's text
            answer = WROTE
        except (EOFError, OSError) as error:  # the process was killed
            answer, ended = WROTE if "message length" in str(error) else None, True
            self._taken &= not isinstance(error, ConnectionResetError)  # Linux reports unread bytes by this error
        if answer is WROTE:
            self.close()
        elif answer is None and ended:
            answer = self._end()
        elif answer is None and time.monotonic() >= self.until:
            answer = f"{LATE} {self._limit:g} s and was killed"
            self.close()
        if answer is not None:
            self.until = None
            if not self._loading:
                self.unread = 0 if self._taken else self.unread + 1
        return answer

    @property
    def who(self) -> str:
        """Its name in messages."""
        return f"{self._program.who} of {self._loads}"

    @property
    def ended(self) -> bool:
        """Whether its process was ended and not started again."""
        return self._connection.closed

    def close(self) -> None:
        """End the process group and close all descriptors. Idempotent."""
        if not self._connection.closed:
            self._connection.close()
            if self._program.kept:
                self._process.terminate()
            self.cut()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._program.patience)
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its children too
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def cut(self) -> None:
        """Close its lifeline, so that it ends; `close` waits for its end. Idempotent."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        lifeline, own = os.pipe()
        self._lifeline: int | None = own
        ends = (theirs.fileno(), lifeline)
        program, path = self._program, [str(p) for p in sys.path]
        given = json.dumps([None if program.python else path, mindspeed_rl_plugin.__file__, program.main, ends])
        command = [program.python or sys.executable, "-c", BOOT, given]
        self._process = subprocess.Popen(command, pass_fds=ends, stdin=subprocess.DEVNULL, start_new_session=True)
        self.pid = self._process.pid
        self._loading = self._taken = True
        self._limit = SHARE_OF_WAIT * self._wait
        self.until = time.monotonic() + self._limit  # deadline of its answer; None: idle
        theirs.close()
        os.close(lifeline)
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # within a message
                end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALLED, 0))
        with contextlib.suppress(OSError):  # it is dead: `answer` reports it
            self._connection.send(self._setup)

    def _end(self) -> str:
        """How the process ended, as a text; its pipe is closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # its pipe closes shortly before it ends
            self._process.wait(1.0)
        code = self._process.poll()
        self.close()
        if code is None:
            return "ended its process, which was killed"
        how = f"died of signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exited with code {code}"
        return f"ended its process, which {how}"


def wait_for(workers: Iterable[Worker], end: float) -> bool:
    """Wait for an answer, at most SILENCE_LOOK_SECONDS. Returns whether the time is before `end` (monotonic clock)."""
    busy = [worker for worker in workers if worker.until is not None]
    seconds = min([end, *(worker.until for worker in busy)]) - time.monotonic()
    wait([worker._connection for worker in busy], max(0.0, min(seconds, SILENCE_LOOK_SECONDS)))
    return time.monotonic() < end
