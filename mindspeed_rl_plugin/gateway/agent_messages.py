"""Messages of agents in one canonical form, whatever API they come through, and their comparison with what is held.

A canonical message has `role` ("system", "user", "assistant", "tool") and `content` (text), and maybe `reasoning`
(text), `tool_calls` (a list of {"id", "name", "arguments"}, arguments as a JSON object) and `mark` (that of the
`SpokenTurn` that it was) of an assistant, or `tool_call_id` and `name` of a tool's result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

AT_A_LIMIT, FORKED, INVALID = "context_length_exceeded", "history_differs", "invalid_request"  # codes of errors
CanonicalMessage = Mapping[str, Any]
CLEAN_UP_SECONDS = 10.0  # for agents to end after the parent has closed the lifeline or ended
MAX_DEPTH = 64  # of JSON that agents send
MAX_ANSWERS = 16  # to one request


class RefusedRequest(Exception):
    """A request that is answered by an error of its API. status: of HTTP; code: for the client's program."""

    def __init__(self, why: str, status: int = 400, code: str = INVALID) -> None:
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
    run: str  # directory of the run


@dataclass(frozen=True)
class TurnRequest:
    """An agent's request for a turn of the model."""

    messages: tuple[CanonicalMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas, as chat templates take them
    most: int | None = None  # longest turn that the agent wants [tokens]
    stop: tuple[str, ...] = ()  # texts that end the turn
    notes: tuple[str, ...] = ()  # what is ignored, one line each
    n: int = 1  # answers, at most MAX_ANSWERS
    trained: bool = True  # whether the answers are trained


@dataclass(frozen=True)
class SpokenTurn:
    """A turn of the model, for the agent."""

    content: str
    reasoning: str
    tool_calls: tuple[Mapping[str, Any], ...]  # as in a canonical message
    finish: str  # "stop", "length" or "tool_calls"
    prompt_tokens: int
    completion_tokens: int
    mark: str  # unique in the conversation, without "_"; it comes back in ids and signatures of some APIs

    @property
    def message(self) -> CanonicalMessage:
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": "assistant", "content": self.content, "reasoning": self.reasoning, "mark": self.mark, **calls}


@dataclass(eq=False)
class HeldTurn:
    """A turn of the model that later requests may continue."""

    call: int  # its number
    parent: HeldTurn | None
    before: tuple[CanonicalMessage, ...]  # messages between the parent's turn, or the beginning, and this turn
    tools: tuple[Mapping[str, Any], ...]
    turn: SpokenTurn

    @property
    def messages(self) -> tuple[CanonicalMessage, ...]:
        return (*self.before, self.turn.message)


class Match(NamedTuple):
    """What a request continues."""

    turn: HeldTurn | None  # None: it is a conversation of its own
    new: list[CanonicalMessage]  # messages behind this turn, or all of them
    differs: str = ""  # of a conversation of its own: the first field that differs from what is held
    why: str = ""  # the same as a sentence


class History:
    """The turns that are held, each behind its parent: a tree."""

    def __init__(self) -> None:
        self._behind: dict[int | None, list[HeldTurn]] = {}  # call of the parent -> turns, the latest last

    def add(self, turn: HeldTurn) -> None:
        self._behind.setdefault(turn.parent and turn.parent.call, []).append(turn)

    def match(self, request: TurnRequest) -> Match:
        """The longest held conversation with which a request begins, if only messages of tools or users follow. Of
        equal ones the one whose marks come back, else the latest."""
        given, differs, why = request.messages, "", ""
        roots = self._behind.get(None, [])
        fits = [turn for turn in roots if turn.tools == request.tools]
        found, at, (place, field) = self._longest(fits, given, 0)
        new = list(given[at:])
        if found is not None and new and all(message["role"] in ("tool", "user") for message in new):
            return Match(found, self._named(given, new))
        if roots and not fits:
            differs, why = "tools", "the tools are not those of a former request"
        elif field:
            differs, why = field, f"message {place} ({given[place]['role']}) has another {field} than before"
        elif found is not None:
            differs, why = "role", "behind the last turn there is a message that is neither a tool's nor a user's"
        return Match(None, self._named(given, list(given)), differs, why)

    def _longest(
        self, fits: Sequence[HeldTurn], given: Sequence[CanonicalMessage], at: int
    ) -> tuple[HeldTurn | None, int, tuple[int, str]]:
        """The last turn of the longest of conversations that go on with one of these turns, with the messages from
        number `at` on; where it ends; the furthest message that differs in one of them, and its field."""
        found, end, furthest, marked = None, at, (at, ""), False
        for turn in fits:
            if (place := _first_difference(turn.messages, given[at:])) is not None:
                furthest = max(furthest, (at + place[0], place[1]))
                continue
            behind = at + len(turn.messages)
            last, reached, place = self._longest(self._behind.get(turn.call, []), given, behind)
            furthest = max(furthest, place)
            same = turn.turn.mark in _marks(given[behind - 1])
            if (reached, same) >= (end, marked):  # of equal ones the latest
                found, end, marked = last or turn, reached, same
        return found, end, furthest

    @staticmethod
    def _named(given: Sequence[CanonicalMessage], new: list[CanonicalMessage]) -> list[CanonicalMessage]:
        """New messages; a tool's result gets the name of the tool, which the call of its id has."""
        names = {call["id"]: call["name"] for message in given for call in message.get("tool_calls", ())}
        return [{**m, "name": names[m["tool_call_id"]]} if m.get("tool_call_id") in names else m for m in new]


def _first_difference(held: Sequence[CanonicalMessage], given: Sequence[CanonicalMessage]) -> tuple[int, str] | None:
    """Number of the first given message that differs from the held one, and its field; "" if there is none. None if
    the given messages begin with all held ones."""
    for n, pair in enumerate(zip(held, given, strict=False)):
        if field := difference(*pair):
            return n, field
    return None if len(held) <= len(given) else (len(given), "")


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
        return "tool_calls"
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


def calls_of(found: Sequence[tuple[str, Mapping[str, Any]]], mark: str) -> tuple[Mapping[str, Any], ...]:
    """The calls of a turn, with ids that name the turn. mark: of the turn."""
    return tuple({"id": f"call_{n}_{mark}", "name": name, "arguments": a} for n, (name, a) in enumerate(found))


def split_reasoning(text: str) -> tuple[str, str]:
    """The text of a `<think>` block, which the prompt may have begun, and the text behind it."""
    before, end, behind = text.partition("</think>")
    if end:
        return before.strip().removeprefix("<think>").strip(), behind.strip()
    return "", text.strip()


def _marks(message: CanonicalMessage) -> set[Any]:
    """The marks with which an assistant's message came back."""
    return {message.get("mark"), *(str(call["id"]).rpartition("_")[2] for call in message.get("tool_calls", ()))}


def _typed(call: Mapping[str, Any]) -> tuple[str, str]:
    """Name and arguments of a call, so that 1, 1.0 and true differ."""
    return call["name"], json.dumps(call["arguments"], sort_keys=True)
