"""The process in which graders run: reads jobs as JSON lines, answers each item with a line of its own.

First line in: `{"specs": [[name, file, function, as given], ...], "regex", "timeouts", "device"}`; first line out:
`{"ready": [[batch, asynchronous, fields], ...]}` or `{"failed": text}`. Then jobs `{"grader": index, "items": [...]}`,
each answered by `{"began": true}` and one line an item: `{"at": index, "value": number}` or `{"at": index, "error":
text}`. The time limit is the parent's: it kills this process group. Uses the standard library only, so that it starts
in a moment.
"""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import json
import os
import select
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from mindspeed_rl_plugin.reward.builtin import make_builtin
from mindspeed_rl_plugin.reward.calling import ConversationGrader, Grader, load_function, number, within
from mindspeed_rl_plugin.reward.reward_model import make_grader

FRAMES = 4  # innermost frames of a traceback that are reported


def main(jobs: int, answers: int, lifeline: int) -> None:
    """Serve until the parent closes `jobs`. Arguments: file descriptors."""
    _die_with_parent(lifeline)
    with os.fdopen(jobs, "rb") as lines, os.fdopen(answers, "wb", buffering=0) as out:

        def send(message: dict[str, Any]) -> None:
            out.write(json.dumps(message).encode() + b"\n")

        setup = json.loads(lines.readline())
        graders = _load(setup, send)
        if graders is None:
            return
        for line in lines:
            job = json.loads(line)
            send({"began": True})
            serve(graders[job["grader"]], job["items"], setup["timeouts"][job["grader"]], send)


def serve(grader: Grader, items: list[dict[str, Any]], timeout: float, send: Callable[[dict[str, Any]], None]) -> None:
    """Grade `items` and send one line for each."""
    if grader.batch:
        for at, result in enumerate(_batch(grader, items, timeout)):
            send({"at": at, **result})
    elif grader.asynchronous:
        asyncio.run(_concurrently(grader, items, timeout, send))
    else:
        for at, item in enumerate(items):
            send({"at": at, **_reported(lambda item=item: number(_settled(grader.single(item), timeout)))})


def _batch(grader: Grader, items: list[dict[str, Any]], timeout: float) -> Iterator[dict[str, Any]]:
    def call() -> list[Any]:
        values = list(_settled(grader.many(items), timeout))
        if len(values) != len(items):
            raise ValueError(f"it returned {len(values)} values for {len(items)} samples")
        return values

    result = _reported(call)
    if "error" in result:
        return iter([result] * len(items))
    return (_reported(lambda value=value: number(value)) for value in result["value"])


async def _concurrently(
    grader: Grader, items: list[dict[str, Any]], timeout: float, send: Callable[[dict[str, Any]], None]
) -> None:
    async def one(at: int, item: dict[str, Any]) -> None:
        try:
            result = {"value": number(await within(grader.single(item), timeout))}
        except BaseException as error:  # noqa: BLE001 - whatever user code raises is reported to the parent
            result = {"error": _describe(error)}
        send({"at": at, **result})

    await asyncio.gather(*(one(at, item) for at, item in enumerate(items)))


def _settled(value: Any, timeout: float) -> Any:
    return asyncio.run(within(value, timeout)) if inspect.isawaitable(value) else value


def _reported(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": call()}
    except BaseException as error:  # noqa: BLE001 - whatever user code raises is reported to the parent
        return {"error": _describe(error)}


def _describe(error: BaseException) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return "ran out of time"
    frames = traceback.extract_tb(error.__traceback__)
    own = os.path.dirname(__file__)
    foreign = [f for f in frames if os.path.dirname(f.filename) != own and "<frozen importlib" not in f.filename]
    head = f"raised {type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):  # its text names the file without the folder
        line = (error.text or "").strip()
        head = f"raised {type(error).__name__}: {error.msg} in {error.filename}, line {error.lineno}: {line}"
    return "\n".join([head, *("  " + line.rstrip() for line in traceback.format_list(foreign[-FRAMES:]))])


def _load(setup: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> list[Grader] | None:
    graders = []
    for name, file, function, given in setup["specs"]:

        def load(name: str = name, file: str | None = file, function: str | None = function) -> Grader:
            if file is None:
                return Grader(name, make_builtin(name, setup["regex"]))
            if function is None:
                return ConversationGrader(name, make_grader(file, setup["device"]))
            return Grader(name, load_function(file, function))

        result = _reported(load)
        if "error" in result:
            send({"failed": f"reward {given!r} cannot be loaded: it {result['error']}"})
            return None
        graders.append(result["value"])
    send({"ready": [[g.batch, g.asynchronous, g.fields] for g in graders]})
    return graders


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
