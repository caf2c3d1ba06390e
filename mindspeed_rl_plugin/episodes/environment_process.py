"""The process in which tools and environments run: it receives calls, and answers each.

The first message is (tools, environment, parser, limit of one call [seconds]). tools: a list of `UserCode`;
environment, parser: `UserCode` or None. The answer is (`Offer`, None) or (None, error). Then calls `(kind, *arguments)`
follow; `Desk` has a method for each kind. At the limit a coroutine is cancelled here; if the call still runs then, the
parent kills this process and its descendants. This module does not import torch, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_rl_plugin.config.episode_flags import OPENENV
from mindspeed_rl_plugin.environment import name_to_users
from mindspeed_rl_plugin.episodes.openenv import environment_at
from mindspeed_rl_plugin.episodes.tools import (
    Answer,
    load_environment,
    load_tool,
    methods,
    offer_of,
    read_calls,
    read_reset,
    read_step,
    reset_arguments,
    schema_of,
)
from mindspeed_rl_plugin.reward.calling import number
from mindspeed_rl_plugin.workers.call_loop import CallLoop, TooLong, settled
from mindspeed_rl_plugin.workers.child import Parent, describe
from mindspeed_rl_plugin.workers.keeper import keep
from mindspeed_rl_plugin.workers.user_files import load_function

MAX_TEXT_CHARACTERS = 1 << 18  # most characters of a text that are sent to the parent
BRIEF = 200  # most characters of an error that the model sees
CLOSE_SECONDS = 10.0  # for all environments to close, when the pool is closed or the parent has ended


class UserCode(NamedTuple):
    """Where a user's code is."""

    given: str  # as in the flag
    file: str
    name: str  # in the file


def main(connection: int, lifeline: int) -> None:
    """Answer calls until the parent closes the connection; then close the environments. Arguments: file descriptors."""
    parent, desk, calls = _loaded(connection, lifeline)
    parent.send((parent.load("", offer_of, desk.tools, desk.environment), None))
    with contextlib.suppress(OSError):  # so that the kernel kills this process before the job when memory is full
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        calls.serve(desk.answer)
    except OSError:  # the parent ended during a call
        pass
    finally:
        calls.finish(desk.answer("close"))


def describe_tools(connection: int, lifeline: int) -> None:
    """Answer the first message with the schemas of all tools. Arguments: file descriptors."""
    parent, desk, _ = _loaded(connection, lifeline)
    parent.send((parent.load("", desk.schemas), None))


def _loaded(connection: int, lifeline: int) -> tuple[Parent, Desk, CallLoop]:
    """Load the user's code. Ends this process if it cannot be loaded."""
    keep(connection, lifeline, CLOSE_SECONDS)
    signal.signal(signal.SIGTERM, lambda *_: None)  # `keep` sends it after the parent's end; a running call may finish
    parent = Parent(connection, None)
    calls = CallLoop(parent)
    tools, environment, parser, seconds = parent.receive()

    def load(flag: str, source: UserCode | None) -> Any:
        return source and parent.load(f"{flag} {source.given}: ", _load, flag, source)

    functions = {tool.name: load("--rl-tools", tool) for tool in tools}
    desk = Desk(functions, load("--rl-environment", environment), seconds)
    desk.parser = load("--rl-tool-parser", parser)
    return parent, desk, calls


class Desk:
    """Makes the calls. tools: functions by name; environment: a class, or None; seconds: limit of a coroutine."""

    def __init__(self, tools: dict[str, Callable[..., Any]], environment: type | None, seconds: float) -> None:
        self.tools, self.environment, self._seconds = tools, environment, seconds
        self.parser: Callable[[str], Any] | None = None  # the user's
        self._made: dict[int, Any] = {}  # environments, by the keys of their sessions

    async def answer(self, kind: str, *arguments: Any) -> Answer:
        """Make a call. If it raises an error, the result describes the error. Raises TooLong."""
        began = time.perf_counter()
        try:
            result: Answer = await getattr(self, kind)(*arguments)
            result = result._replace(texts=tuple(map(_shortened, result.texts)))
        except TooLong:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever user code raises is reported to the parent
            result = Answer(brief=_brief(error), error=describe(error))
        return result._replace(seconds=time.perf_counter() - began)

    def schemas(self) -> list[dict[str, Any]]:
        """Schemas of all tools for chat templates. Raises ValueError if a type hint or a docstring is missing."""
        functions = [("--rl-tools", name, function) for name, function in self.tools.items()]
        if self.environment is not None and not hasattr(self.environment, "step"):
            flag = f"--rl-environment {self.environment.__name__}"
            functions += [(flag, name, getattr(self.environment, name)) for name in methods(self.environment)]
        return [schema_of(*function) for function in functions]

    async def parse(self, text: str) -> Answer:
        """The calls in a turn, as `read_calls` returns them."""
        calls = read_calls(self.parser(text))
        if len(calls) > MAX_TEXT_CHARACTERS:
            raise ValueError(f"it returned calls of {len(calls)} characters; at most {MAX_TEXT_CHARACTERS} are read")
        return Answer((calls,))

    async def tool(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        return Answer((str(await self._settled(self.tools[name](**arguments))),))

    async def method(self, key: int, name: str, arguments: Mapping[str, Any]) -> Answer:
        return Answer((str(await self._settled(getattr(self._made[key], name)(**arguments))),))

    async def reset(self, key: int, task: Mapping[str, Any], seed: int, episode: str) -> Answer:
        """Make an environment. episode: a name, which the user's code finds in the variable MINDSPEED_RL_EPISODE."""
        name_to_users("EPISODE", episode)
        environment = self._made[key] = self.environment()
        return read_reset(await self._settled(environment.reset(**reset_arguments(environment.reset, task, seed))))

    async def step(self, key: int, text: str) -> Answer:
        return read_step(await self._settled(self._made[key].step(text)))

    async def get_reward(self, key: int) -> Answer:
        return Answer(reward=number(await self._settled(self._made[key].get_reward())), done=True)

    async def close(self, keys: Sequence[int] | None = None) -> Answer:
        """Close the environments of these keys, or all. After all are closed, the last of their errors is raised."""
        async with contextlib.AsyncExitStack() as stack:
            for key in [*self._made] if keys is None else keys:
                made = self._made.pop(key, None)
                if hasattr(made, "close"):
                    stack.push_async_callback(self._close, made)
        return Answer()

    async def _close(self, environment: Any) -> None:
        await self._settled(environment.close())

    async def _settled(self, value: Any) -> Any:
        return await settled(value, self._seconds)


def _load(flag: str, source: UserCode) -> Any:
    if source.given.startswith(OPENENV):
        return environment_at(source.given)
    load = {"--rl-tools": load_tool, "--rl-environment": load_environment, "--rl-tool-parser": load_function}[flag]
    return load(source.file, source.name)


def _shortened(text: str) -> str:
    left = len(text) - MAX_TEXT_CHARACTERS
    return text if left <= 0 else f"{text[:MAX_TEXT_CHARACTERS]}\n[{left} further characters are left out]"


def _brief(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return text if len(text) <= BRIEF else f"{text[: BRIEF - 4]} ..."
