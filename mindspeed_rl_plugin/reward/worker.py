"""The process in which graders run: it takes calls from a connection, and answers each with the outcome of every item.

First message in: (specs, seconds of one call of each, regex of the regex grader, device of reward models); first out:
(what its graders are, None) or ((), error). Then calls `(grader, items)`. The time limit is the parent's: it kills
this process group. Imports no torch, so that it starts in a moment.
"""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import os
import select
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec

from mindspeed_rl_plugin.reward.builtin import make_builtin
from mindspeed_rl_plugin.reward.calling import Grader, load_function, number
from mindspeed_rl_plugin.reward.reward_model import RewardModel
from mindspeed_rl_plugin.reward.specs import Spec

FRAMES = 4  # innermost frames of a traceback that are reported
Items = list[dict[str, Any]]
Outcome = tuple[Any, "str | None"]  # a value, or what was raised


class Kind(NamedTuple):
    """What the parent asks of a grader: how it is called, and which fields of the data it cannot do without."""

    batch: bool
    asynchronous: bool
    fields: tuple[str, ...]


def main(connection: int, lifeline: int) -> None:
    """Serve until the parent closes its end. Arguments: file descriptors."""
    _die_with_parent(lifeline)
    parent = Connection(connection)
    specs, timeouts, regex, device = parent.recv()
    graders = []
    for spec in specs:
        loaded, error = _outcome(_load, spec, regex, device)
        if error:
            why = f"it {error}"
            if "\n" not in error:  # raised here, not on a line of the user's file or of a library
                why = why.removeprefix("it raised ValueError: ")
            send(parent, ((), f"reward {spec.given!r} cannot be loaded: {why}"))
            return
        graders.append(loaded)
    send(parent, ([Kind(g.batch, g.asynchronous, g.fields) for g in graders], None))
    while True:
        try:
            grader, items = parent.recv()
        except EOFError:
            return
        send(parent, grade(graders[grader], items, timeouts[grader]))


def send(parent: Connection, answer: Any) -> None:
    """As MessagePack, which the parent reads without running anything."""
    parent.send_bytes(msgspec.msgpack.encode(answer))


def grade(grader: Grader, items: Items, timeout: float) -> list[Outcome]:
    """The outcome of each item; those of an asynchronous grader are awaited together."""
    if grader.batch:
        values, error = _outcome(_values, grader, items, timeout)
        return [(None, error)] * len(items) if error else [_outcome(number, value) for value in values]
    if grader.asynchronous:
        return asyncio.run(_together(grader, items, timeout))
    return [_outcome(lambda item=item: number(_settled(grader.single(item), timeout))) for item in items]


def _values(grader: Grader, items: Items, timeout: float) -> list[Any]:
    values = list(_settled(grader.many(items), timeout))
    if len(values) != len(items):
        raise ValueError(f"it returned {len(values)} values for {len(items)} samples")
    return values


async def _together(grader: Grader, items: Items, timeout: float) -> list[Outcome]:
    async def one(item: dict[str, Any]) -> Outcome:
        try:
            return number(await asyncio.wait_for(grader.single(item), timeout)), None
        except BaseException as error:  # noqa: BLE001 - whatever user code raises is reported to the parent
            return None, describe(error)

    return await asyncio.gather(*map(one, items))


def _settled(value: Any, timeout: float) -> Any:
    return asyncio.run(asyncio.wait_for(value, timeout)) if inspect.isawaitable(value) else value


def _outcome(function: Callable[..., Any], *arguments: Any) -> Outcome:
    try:
        return function(*arguments), None
    except BaseException as error:  # noqa: BLE001 - whatever user code raises is reported to the parent
        return None, describe(error)


def describe(error: BaseException) -> str:
    """What a user's code raised, and the innermost frames outside of this folder."""
    if isinstance(error, asyncio.TimeoutError):
        return "ran out of time"
    own = os.path.dirname(__file__)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.dirname(frame.filename) != own and "<frozen importlib" not in frame.filename
    ]
    head = f"raised {type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):  # its text names the file without the folder
        line = (error.text or "").strip()
        head = f"raised {type(error).__name__}: {error.msg} in {error.filename}, line {error.lineno}: {line}"
    return "\n".join([head, *("  " + line.rstrip() for line in traceback.format_list(frames[-FRAMES:]))])


def _load(spec: Spec, regex: str | None, device: str) -> Grader:
    if spec.is_model:
        return Grader(spec.name, RewardModel(spec.file, device))
    if spec.file is None:
        return Grader(spec.name, make_builtin(spec.name, regex))
    return Grader(spec.name, load_function(spec.file, spec.function))


def _die_with_parent(lifeline: int) -> None:
    """End this process group when the parent's end of the pipe closes, whatever the grader is doing then.

    The kernel sends SIGIO, whose default action is to terminate; a watching thread would need the GIL, which a
    grader in C code may hold for ever.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    if poll.poll(0):  # it closed before the line above
        sys.exit(1)
