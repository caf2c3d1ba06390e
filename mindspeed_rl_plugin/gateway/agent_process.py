"""The process in which agents run, and in which they find the gateway.

The first message is an `AgentSetup`; the answer is ("", None) or (None, error). Then each message to this process is a
call of a method of `Agents`, and each message from it a report about a rollout, a dictionary with `number`; both come
at any time. This module does not import torch, so that it starts fast.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import queue
import resource
import shlex
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from typing import Any

from mindspeed_rl_plugin.environment import NO_PROXY, reach_directly, users_variables
from mindspeed_rl_plugin.gateway.agent_messages import CLEAN_UP_SECONDS, AgentSetup
from mindspeed_rl_plugin.gateway.command import AgentFailed, run_command
from mindspeed_rl_plugin.gateway.conversation import Conversation, TurnRewards
from mindspeed_rl_plugin.gateway.endpoints import Gateway
from mindspeed_rl_plugin.workers.child import Parent, describe, exchange, why_not_loaded
from mindspeed_rl_plugin.workers.keeper import keep
from mindspeed_rl_plugin.workers.user_files import load_function

MAX_NOTES = 100  # lines about what is ignored of agents' requests


class Agents:
    """The running agents. listener: of the gateway; say: sends a report to the parent."""

    gateway_kind = Gateway
    forgives = True  # whether an agent that fails after it was told of a limit, or is late, is graded

    def __init__(
        self,
        setup: AgentSetup,
        function: Callable[..., Any] | None,
        listener: socket.socket,
        say: Callable[[Any], None],
    ) -> None:
        self._setup, self._function, self._say = setup, function, say
        self.gateway = self.gateway_kind(setup.host, listener, setup.sampling, self._note)
        self._running: dict[int, tuple[asyncio.Task, Conversation]] = {}
        self._noted: set[str] = set()

    def begin(self, number: int, row: Mapping[str, Any], episode: str) -> None:
        conversation = Conversation(number, self._say)
        self.gateway.open(conversation)
        self._running[number] = asyncio.create_task(self._run(conversation, row, episode)), conversation

    def answer(self, number: int, method: str, *what: Any) -> None:
        """Call a method of the agent's `Conversation`: speak, refuse or counted."""
        if number in self._running:
            getattr(self._running[number][1], method)(*what)

    def end(self, number: int) -> None:
        if number in self._running:
            self._running[number][0].cancel()

    async def close(self) -> None:
        runs = [run for run, _ in self._running.values()]
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)

    # inside

    async def _run(self, conversation: Conversation, row: Mapping[str, Any], episode: str) -> None:
        try:
            reward = await self._play(row, conversation, episode)
            if reward is not None and not self._setup.rewarded:
                self._note("the reward that the agent gives is not graded; for this add environment to --rl-reward")
            rewards = reward if isinstance(reward, TurnRewards) else {}
            reward = sum(rewards.values()) if rewards else reward
            if reward is None and self._setup.rewarded and not conversation.limited:
                raise AgentFailed("gave no reward; let it give one (docs/agents.md), or name graders in --rl-reward")
            if not math.isfinite(reward := float(0.0 if reward is None else reward)):
                raise AgentFailed(f"gave the reward {reward}, which is no finite number")
            if not conversation.heard:
                raise AgentFailed("ended before it had a turn of the model; let it use the URL and key that it gets")
            whole = {"rewards": rewards} if rewards else {"reward": reward}
            conversation.tell(done=True, heard=conversation.heard, **whole)
        except asyncio.CancelledError:
            failure = None if self.forgives else "was stopped"
            conversation.tell(ended=True, failure=failure, heard=conversation.heard)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever an agent raises is reported
            failure = str(error) if isinstance(error, AgentFailed) else describe(error)
            if (
                self.forgives and conversation.limited and conversation.heard
            ):  # an agent may fail at the error for a limit
                conversation.tell(done=True, heard=conversation.heard)
            else:
                conversation.tell(failure=failure, heard=conversation.heard)
        finally:
            self.gateway.close(conversation)
            conversation.finish("the agent has ended")
            del self._running[int(conversation.name)]

    async def _play(self, row: Mapping[str, Any], conversation: Conversation, episode: str) -> Any:
        """Run an agent. Returns its reward, None, or rewards by turn."""
        return await (self._call(row, conversation) if self._function else self._command(row, conversation, episode))

    async def _call(self, row: Mapping[str, Any], conversation: Conversation) -> Any:
        """Call the function, outside of the loop if it is no coroutine function."""
        given = {**row, "row": row, "base_url": f"{self.gateway.url}/v1", "api_key": conversation.key}
        parameters = inspect.signature(self._function).parameters
        named = {name: given[name] for name in parameters if name in given}
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**named)
        future, loop = asyncio.get_running_loop().create_future(), asyncio.get_running_loop()

        def settle(value: Any, error: BaseException | None) -> None:
            if not future.done():
                future.set_result(value) if error is None else future.set_exception(error)

        def call() -> None:
            value = error = None
            try:
                value = self._function(**named)
            except (Exception, SystemExit) as raised:  # noqa: BLE001 - whatever an agent raises is reported
                error = raised
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, value, error)

        threading.Thread(target=call, daemon=True).start()
        return await future

    async def _command(self, row: Mapping[str, Any], conversation: Conversation, episode: str) -> float | None:
        setup = self._setup
        variables = users_variables((*NO_PROXY, *setup.variables)) | {
            "OPENAI_BASE_URL": f"{self.gateway.url}/v1",
            "OPENAI_API_KEY": conversation.key,
            "ANTHROPIC_BASE_URL": self.gateway.url,
            "ANTHROPIC_API_KEY": conversation.key,
            "MINDSPEED_RL_EPISODE": episode,
        }
        return await run_command(shlex.split(setup.agent), json.dumps(row).encode(), variables, setup.memory)

    def _note(self, text: str) -> None:
        if len(self._noted) >= MAX_NOTES:
            text = "more is ignored of agents' requests; there are no further lines about it"
        if text not in self._noted:
            self._noted.add(text)
            self._say({"number": -1, "seconds": 0.0, "note": text})


def main(connection: int, lifeline: int, kind: type[Agents] = Agents) -> None:
    """Run agents until the parent closes the connection. connection, lifeline: file descriptors."""
    folder = tempfile.mkdtemp(prefix="agents-")
    keep(connection, lifeline, CLEAN_UP_SECONDS, folder)
    tempfile.tempdir = folder  # of the commands, too
    parent = Parent(connection, None)
    setup: AgentSetup = parent.receive()
    listener = listen(parent, setup)
    function = setup.place and parent.load(f"--rl-agent {setup.agent}: ", _function, *setup.place)
    asyncio.run(serve(parent, lambda say: kind(setup, function, listener, say)))


def listen(parent: Parent, setup: AgentSetup) -> socket.socket:
    """The listener of the gateway, which clients in this process reach without a proxy."""
    reach_directly(setup.host)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection has a descriptor
    where = f"--rl-agent-host {setup.host}, which must be an IPv4 address of this machine: "
    return parent.load(where, socket.create_server, (setup.host, 0))


async def serve(
    parent: Parent,
    make: Callable[[Callable[[Any], None]], Agents],
    resources: AbstractAsyncContextManager[Any] | None = None,
) -> None:
    """Run agents until the parent closes the connection. make: the agents, from the function that sends reports;
    resources: what they use. If it cannot be made, the parent is told why."""
    out, stop = queue.SimpleQueue[Any](), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    agents = make(out.put)
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(resources or nullcontext())
        except Exception as error:  # noqa: BLE001 - whatever a user's code raises is reported
            parent.send((None, why_not_loaded(describe(error))))
            return
        serving = asyncio.create_task(agents.gateway.serve())
        parent.send(("", None))
        exchange(parent, agents, out, stop)
        await stop.wait()
        await agents.close()
        await agents.gateway.shut(serving)


def _function(file: str, name: str) -> Callable[..., Any]:
    """Load a user's function. Raises ValueError for another object, and for parameters without names."""
    function = load_function(file, name)
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    if inspect.isclass(function) or kinds - {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}:
        raise ValueError(
            f"{name} must be a function whose parameters have names: row, base_url, api_key, or fields of a row"
        )
    return function
