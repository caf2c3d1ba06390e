"""An environment of verifiers as an agent: its own loop runs each rollout, and requests the turns at the gateway."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from starlette.requests import Request

from mindspeed_rl_plugin.gateway.agent_messages import AT_A_LIMIT, AgentSetup, RefusedRequest
from mindspeed_rl_plugin.gateway.agent_process import Agents, listen, serve
from mindspeed_rl_plugin.gateway.api_parts import POLICY_NAME
from mindspeed_rl_plugin.gateway.command import AgentFailed
from mindspeed_rl_plugin.gateway.conversation import Conversation
from mindspeed_rl_plugin.gateway.endpoints import Gateway
from mindspeed_rl_plugin.gateway.verifiers_load import ROW, Loaded, task_of
from mindspeed_rl_plugin.workers.child import Parent

TRACE = "X-Session-ID"  # header in which verifiers names the trace (its record of a conversation) of a request
SECRET = "X-Rollouts-Key"  # header that only verifiers' own client has


def run(parent: Parent, setup: AgentSetup, loaded: Loaded) -> None:
    """Run rollouts until the parent closes the connection."""
    listener = listen(parent, setup)
    asyncio.run(serve(parent, lambda say: VerifiersAgents(setup, loaded, listener, say), loaded.env.serving()))


class RunningTrace(NamedTuple):
    """A trace of verifiers, and the conversation of its rollout."""

    trace: Any
    conversation: Conversation


class TraceGateway(Gateway):
    """The gateway of verifiers' client. All rollouts share the client, because each one would hold 0.8 MB for ever, so
    a request names its conversation by a trace. Only the trace that asks first is trained."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.secret = secrets.token_urlsafe(24)
        self.traces: dict[str, RunningTrace] = {}  # by id
        self.first: dict[Conversation, Any] = {}  # the trace that asked first

    def stop(self, conversation: Conversation) -> None:
        """No further turn is sampled: verifiers scores what there is, as at a limit of its own."""
        self.first[conversation].stop("max_total_tokens")

    def close(self, conversation: Conversation) -> None:
        super().close(conversation)
        self.first.pop(conversation, None)
        self.traces = {name: one for name, one in self.traces.items() if one.conversation is not conversation}

    def _known(self, request: Request) -> Conversation:
        known = self.traces.get(request.headers.get(TRACE, ""))
        if known is None or not hmac.compare_digest(self.secret.encode(), request.headers.get(SECRET, "").encode()):
            raise RefusedRequest("no rollout here has this conversation", 401, "invalid_api_key")
        trace, conversation = known
        if (first := self.first.setdefault(conversation, trace)) is not trace:
            raise RefusedRequest(
                f"the rollout asks for a turn in a second conversation, of agent {trace.agent.name!r}; only the "
                f"conversation of agent {first.agent.name!r} is trained: give other agents their own client and model, "
                "and turn retries off"
            )
        return conversation


class VerifiersAgents(Agents):
    """The running rollouts. The other arguments are those of `Agents`."""

    forgives, gateway_kind = False, TraceGateway
    gateway: TraceGateway

    def __init__(self, setup: AgentSetup, loaded: Loaded, listener: Any, say: Callable[[Any], None]) -> None:
        super().__init__(setup, None, listener, say)
        self._loaded = loaded
        client = loaded.vf.EvalClientConfig(
            base_url=f"{self.gateway.url}/v1",
            api_key_var="MINDSPEED_RL_PLUGIN_HAS_NO_KEY",  # a missing variable, so that no key is read
            headers={SECRET: self.gateway.secret},
        )
        self._context = loaded.vf.ModelContext(model=POLICY_NAME, client=client)

    def answer(self, number: int, method: str, *what: Any) -> None:
        if number in self._running and method == "refuse" and what[-1] == AT_A_LIMIT:
            self.gateway.stop(self._running[number][1])
        super().answer(number, method, *what)

    async def _play(self, row: Mapping[str, Any], conversation: Conversation, episode: str) -> float:
        """Run a rollout. Returns its reward. Raises AgentFailed."""
        loaded = self._loaded
        (slot,) = loaded.env.slots(task_of(loaded, row[ROW]))

        def known(trace: Any) -> None:
            self.gateway.traces[trace.id] = RunningTrace(trace, conversation)

        episode = await loaded.env.run_slot(slot, self._context, on_trace=known)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise AgentFailed("; ".join(f"raised {error.type}: {error.message}" for error in errors) or "failed")
        first = self.gateway.first.get(conversation)
        return 0.0 if first is None else first.reward  # without a turn `Agents` reports a failure
