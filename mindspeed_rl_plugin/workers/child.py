"""A worker process as it sees itself: how it hears of its parent's end, takes calls, and reports what was raised.

Imports the standard library only: a worker may run in an interpreter of the user's choice.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import select
import sys
import textwrap
import traceback
from collections.abc import Callable
from itertools import dropwhile
from multiprocessing.connection import Connection
from typing import Any

FRAMES = 4  # innermost frames of a traceback that are reported
MAX_ERROR_CHARACTERS = 4000  # characters of a message that are reported
PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
ValueOrError = tuple[Any, "str | None"]  # a value, or what was raised


class Parent:
    """The process that started this one. connection, lifeline: file descriptors, as `process.Worker` passes them; None:
    someone else sees to its end (`keeper`)."""

    def __init__(self, connection: int, lifeline: int | None) -> None:
        if lifeline is not None:
            _die_with_parent(lifeline)
        self._connection, self._pid = Connection(connection), os.getpid()

    def receive(self) -> Any:
        """The next message. Ends this process where the parent has closed its end."""
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):  # the latter where it left answers unread
            sys.exit()

    def fileno(self) -> int:
        """Readable when a message is there, or the parent has closed its end."""
        return self._connection.fileno()

    def load(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a call gives that loads something of the user's. Where it raises, the first message is answered with
        `what`, which comes before the reason, and this process ends."""
        value, error = outcome(function, *arguments)
        if error is not None:
            self.send((None, what + why_not_loaded(error)))
            sys.exit()
        return value

    def send(self, answer: Any) -> None:
        """As JSON, which the parent reads without running anything; half a surrogate pair becomes "?". A process that
        a user's code forked, and let go on, ends here."""
        if os.getpid() != self._pid:
            os._exit(1)
        self._connection.send_bytes(json.dumps(answer, ensure_ascii=False).encode(errors="replace"))


def outcome(function: Callable[..., Any], *arguments: Any) -> ValueOrError:
    """The value of a call of a user's code, or what it raised."""
    try:
        return function(*arguments), None
    except BaseException as error:  # noqa: BLE001 - whatever user code raises is reported to the parent
        return None, describe(error)


def describe(error: BaseException) -> str:
    """What a user's code raised, and the innermost frames from where this package called it."""
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
    """An outcome's error for a message that says what cannot be loaded."""
    if "\n" in error:
        return f"it {error}"
    return f"it {error}".removeprefix("it raised ValueError: ")  # raised here, not on a line of the user's or a library


def _die_with_parent(lifeline: int) -> None:
    """End this process group when the parent's end of the pipe closes, whatever a user's code is doing then.

    The kernel sends SIGIO, whose default action is to terminate; a watching thread would need the GIL, which code in
    C may hold for ever.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    if poll.poll(0):  # it closed before the line above
        sys.exit(1)
