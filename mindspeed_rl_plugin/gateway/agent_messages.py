"""Messages of agents in one canonical form, whatever API they come through, and their comparison with what is held.

A canonical message has `role` ("system", "user", "assistant", "tool") and `content` (text), and maybe `reasoning`
(text) and `tool_calls` (a list of {"id", "name", "arguments"}, arguments as a JSON object) of an assistant, or
`tool_call_id` and `name` of a tool's result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

CanonicalMessage = Mapping[str, Any]
MAX_DEPTH = 64  # of JSON that agents send
CLEAN_UP_SECONDS = 10.0  # for agents to end after the parent has closed the lifeline or ended


class RefusedRequest(Exception):
    """A request that is answered by an error of its API. status: of HTTP; code: for the client's program."""

    def __init__(self, why: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(why)
        self.status, self.code = status, code


def parsed(text: str | bytes) -> Any:
    """The value of an agent's JSON, whose numbers are finite: others are no JSON for the engine's process. Raises
    ValueError."""
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("it is too deep") from None
    if _deeper(value, MAX_DEPTH):
        raise ValueError(f"it has JSON inside JSON, more than {MAX_DEPTH} deep")
    return value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.40} is no finite number")
    return value


def _deeper(value: Any, left: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left < 0 or any(_deeper(one, left - 1) for one in inner if isinstance(one, (dict, list)))


class JobSampling(NamedTuple):
    """How the job samples."""

    temperature: float
    top_p: float
    top_k: int  # 0: all tokens
    replaces: bool  # --rl-agent-sampling: the sampling that requests ask for is ignored
    no_stops: str  # the flag with which stop texts would not be found; "": they are


class AgentSetup(NamedTuple):
    """What an agents' process needs of the flags."""

    agent: str  # a command, a function's place, or an environment of verifiers
    place: tuple[str, str] | None  # file and name of a function; None: no function
    host: str
    sampling: JobSampling
    variables: tuple[str, ...]  # names of further environment variables of commands
    memory: float  # most memory of a command and its children [GiB]
    rewarded: bool  # whether an agent must give a reward


@dataclass(frozen=True)
class TurnRequest:
    """An agent's request for a turn of the model."""

    messages: tuple[CanonicalMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas, as chat templates take them
    most: int | None = None  # longest turn that the agent wants [tokens]
    stop: tuple[str, ...] = ()  # texts that end the turn
    notes: tuple[str, ...] = ()  # what is ignored, one line each


@dataclass(frozen=True)
class SpokenTurn:
    """A turn of the model, for the agent."""

    content: str
    reasoning: str
    tool_calls: tuple[Mapping[str, Any], ...]  # as in a canonical message
    finish: str  # "stop", "length" or "tool_calls"
    prompt_tokens: int
    completion_tokens: int

    @property
    def message(self) -> CanonicalMessage:
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": "assistant", "content": self.content, "reasoning": self.reasoning, **calls}


@dataclass
class History:
    """The messages of a conversation: those that the agent gave, and the model's turns."""

    messages: list[CanonicalMessage] = field(default_factory=list)
    tools: tuple[Mapping[str, Any], ...] = ()

    def behind(self, request: TurnRequest) -> list[CanonicalMessage]:
        """The messages of a request behind the last turn. Raises RefusedRequest, with the first message and field that
        differ, if the request does not continue this conversation by messages of tools or users."""
        held, given = self.messages, request.messages
        if request.tools != self.tools:
            raise _fork("the tools are not those of the first request")
        for at, (one, other) in enumerate(zip(held, given, strict=False)):
            if differs := difference(one, other):
                raise _fork(f"message {at} ({one['role']}) has another {differs} than before")
        if len(given) <= len(held):
            raise _fork(f"it has {len(given)} messages, and with the last turn there are {len(held)} already")
        new = [self._named(message) for message in given[len(held) :]]
        if other := next((message["role"] for message in new if message["role"] not in ("tool", "user")), None):
            raise _fork(f"a message of role {other!r} stands behind the last turn")
        return new

    def _named(self, message: CanonicalMessage) -> CanonicalMessage:
        """A tool's result with the name of the tool, which the call of its id has."""
        of = message.get("tool_call_id")
        calls = [call for held in reversed(self.messages) for call in held.get("tool_calls", ())]
        name = next((call["name"] for call in calls if of is not None and call["id"] == of), None)
        return message if name is None else {**message, "name": name}


def difference(held: CanonicalMessage, given: CanonicalMessage) -> str | None:
    """The first field in which a given message differs from a held one, None if they are the same: white space around
    texts aside, arguments of calls by their JSON values, and an assistant's reasoning may be missing."""
    if held["role"] != given["role"]:
        return "role"
    if held["content"].strip() != given["content"].strip():
        return "content"
    if (held.get("reasoning") or "").strip() != (given.get("reasoning") or held.get("reasoning") or "").strip():
        return "reasoning"
    one, other = ([_typed(m) for m in message.get("tool_calls", ())] for message in (held, given))
    if one != other:
        return "tool call"
    return "tool_call_id" if held.get("tool_call_id") != given.get("tool_call_id") else None


def for_template(message: CanonicalMessage) -> dict[str, Any]:
    """A canonical message as chat templates take it."""
    out = {name: message[name] for name in ("role", "content", "name") if name in message}
    if calls := message.get("tool_calls"):
        keys = ("name", "arguments")
        out["tool_calls"] = [{"type": "function", "function": {key: call[key] for key in keys}} for call in calls]
    if reasoning := message.get("reasoning"):
        out["reasoning_content"] = reasoning
    return out


def calls_of(found: Sequence[tuple[str, Mapping[str, Any]]], first: int) -> tuple[Mapping[str, Any], ...]:
    """The calls of a turn with ids. first: number of the conversation's calls before it."""
    return tuple({"id": f"call_{first + n}", "name": name, "arguments": a} for n, (name, a) in enumerate(found))


def _typed(call: Mapping[str, Any]) -> tuple[str, str]:
    """Name and arguments of a call, so that 1, 1.0 and true differ."""
    return call["name"], json.dumps(call["arguments"], sort_keys=True)


def _fork(why: str) -> RefusedRequest:
    return RefusedRequest(
        f"the request does not continue the conversation: {why}; send the same messages and tools again, with the "
        "answer as it came, and behind it only messages of tools or of the user",
        code="history_differs",
    )
