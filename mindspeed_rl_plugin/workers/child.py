"""The child's side of a worker process: it receives calls, reports errors, and ends when its parent ends.

Imports only the standard library: a worker may run in another interpreter, which the user chose.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import queue
import select
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import dropwhile
from multiprocessing.connection import Connection
from typing import Any

FRAMES = 4  # innermost frames of a traceback that are reported
MAX_ERROR_CHARACTERS = 4000  # characters of a message that are reported
PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
ValueOrError = tuple[Any, "str | None"]  # (value, None), or (None, text about the error)


class Parent:
    """The process that started this process. connection, lifeline: file descriptors, as `process.Worker` passes them;
    lifeline None: `keeper` ends this process."""

    def __init__(self, connection: int, lifeline: int | None) -> None:
        if lifeline is not None:
            _die_with_parent(lifeline)
        self._connection, self._pid = Connection(connection), os.getpid()

    def receive(self) -> Any:
        """The next message. Ends this process when the parent has closed the connection."""
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):  # the latter when the parent has not read all answers
            sys.exit()

    def fileno(self) -> int:
        """Readable when a message has arrived, or the parent has closed the connection."""
        return self._connection.fileno()

    def load(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """The value of a function that loads a user's code. If it raises, the answer to the first message is `what` and
        the reason, and this process ends."""
        value, error = outcome(function, *arguments)
        if error is not None:
            self.send((None, what + why_not_loaded(error)))
            sys.exit()
        return value

    def send(self, answer: Any) -> None:
        """Send an answer as JSON, so that the parent need not unpickle it; half a surrogate pair becomes "?". A child
        that a user's code forked must not answer: it ends here."""
        if os.getpid() != self._pid:
            os._exit(1)
        self._connection.send_bytes(json.dumps(answer, ensure_ascii=False).encode(errors="replace"))


def exchange(parent: Parent, calls: Any, out: queue.SimpleQueue, stop: asyncio.Event) -> None:
    """Exchange messages with the parent in two threads: what comes into `out` is sent, and a message (name, *arguments)
    is a call of this method of `calls` in the running loop. When the parent has closed its end, `stop` is set."""
    loop = asyncio.get_running_loop()

    def write() -> None:
        with suppress(OSError):  # the parent has closed its end
            while True:
                parent.send(out.get())

    def read() -> None:
        try:
            while True:
                name, *arguments = parent.receive()
                loop.call_soon_threadsafe(getattr(calls, name), *arguments)
        except SystemExit:  # the parent has closed its end
            loop.call_soon_threadsafe(stop.set)

    for work in (write, read):
        threading.Thread(target=work, daemon=True).start()


def outcome(function: Callable[..., Any], *arguments: Any) -> ValueOrError:
    """The value of a call of a user's code, or a text about its error."""
    try:
        return function(*arguments), None
    except BaseException as error:  # noqa: BLE001 - whatever user code raises is reported to the parent
        return None, describe(error)


def describe(error: BaseException) -> str:
    """A text about an error of a user's code: its message, and the innermost frames of that code."""
    if isinstance(error, asyncio.TimeoutError):
        return "ran out of time"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "<frozen importlib" not in f.filename]
    frames = list(dropwhile(lambda frame: frame.filename.startswith(PACKAGE), frames))
    head = f"raised {type(error).__name__}: {str(error)[:MAX_ERROR_CHARACTERS]}"
    if isinstance(error, SyntaxError):  # its text names the file without the folder
        line = (error.text or "").strip()
        head = f"raised {type(error).__name__}: {error.msg} in {error.filename}, line {error.lineno}: {line}"
    return "\n".join([head, textwrap.indent("".join(traceback.format_list(frames[-FRAMES:])), "  ")]).rstrip()


def why_not_loaded(error: str) -> str:
    """The error of `outcome` as the end of a message "X cannot be loaded: ..."."""
    if "\n" in error:
        return f"it {error}"
    return f"it {error}".removeprefix("it raised ValueError: ")  # raised by this package itself


def _die_with_parent(lifeline: int) -> None:
    """End this process group when the parent closes its end of the pipe, even while a user's code runs.

    The kernel sends SIGIO, whose default action terminates the process. A thread that watches would need the GIL, which
    C code may hold for ever.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    if poll.poll(0):  # it was closed before the lines above took effect
        sys.exit(1)
