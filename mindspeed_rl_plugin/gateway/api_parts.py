"""What the APIs of agents share: checks of fields, tools and texts of requests, and what endpoints need of an API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mindspeed_rl_plugin.gateway.agent_messages import (
    JobSampling,
    RefusedRequest,
    SpokenTurn,
    TurnRequest,
    parsed,
    split_reasoning,
)

# Under which the model is listed; its answers are not trained under the second. A request may give any other name.
MODEL_NAMES = POLICY_NAME, UNTRAINED_NAME = "policy", "policy-untrained"
ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MAX_STOPS, MAX_STOP_CHARACTERS, MAX_TOOLS, MAX_NAME = 4, 256, 256, 128


class Answers(NamedTuple):
    """What an answer is made of."""

    turns: Sequence[SpokenTurn]
    body: Mapping[str, Any]  # of the request
    created: int  # Unix time
    conversation: str  # its name

    @property
    def name(self) -> str:
        """What the id of the response ends with; see `Conversation.turn_of`."""
        return f"{self.turns[0].mark}-{self.conversation}"

    @property
    def model(self) -> Any:
        return self.body.get("model") or POLICY_NAME


class AgentApi(NamedTuple):
    """How an API reads requests, and writes answers and errors."""

    # The request in a body. Raises RefusedRequest for what is no request, or cannot be answered as asked.
    read: Callable[[Any, JobSampling], TurnRequest]
    answer: Callable[[Answers], dict[str, Any]]
    events: Callable[[Answers], Iterable[str]]  # of a streamed answer
    error: Callable[[RefusedRequest], dict[str, Any]]
    error_events: Callable[[RefusedRequest], Iterable[str]]  # in a stream
    waiting: str = ": the turn is not sampled yet\n\n"  # in a stream, so that no client takes the connection for dead


def event(value: Mapping[str, Any], name: str = "") -> str:
    """An event of a stream."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(value)}\n\n"


def openai_error(refused: RefusedRequest) -> dict[str, Any]:
    """The body of an error, as OpenAI's APIs have it."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}}


def fields(body: Any, messages: str, *flat: str) -> dict[str, Any]:
    """The fields of a body that are not null. messages: name of the one with the messages; flat: names of objects whose
    fields are named `object.field` here. Raises RefusedRequest."""
    if not isinstance(body, dict) or not isinstance(body.get(messages), list) or not body[messages]:
        raise RefusedRequest(f"the body must be a JSON object with `{messages}`, a list that is not empty")
    given = dict(body)
    for name in flat:
        if isinstance(given.get(name), dict):
            given |= {f"{name}.{key}": value for key, value in given.pop(name).items()}
    return {name: value for name, value in given.items() if value is not None}


def ignored(
    given: Mapping[str, Any],
    sampling: JobSampling,
    read: Iterable[str],
    neutral: Mapping[str, Sequence[Any]],
    never: Mapping[str, str],
) -> tuple[str, ...]:
    """What is ignored of a request, one line each.

    read: fields that the API reads; neutral: fields that would change the distribution of the sampled tokens, and the
    values that leave it as it is, beside the job's own sampling; never: fields that no flag allows, and why. Raises
    RefusedRequest for what may not be ignored.
    """
    for name, why in never.items():
        if given.get(name):
            raise RefusedRequest(f"`{name}` is not supported: {why}")
    notes = []
    own = {"temperature": (sampling.temperature,), "top_p": (sampling.top_p,), "tool_choice": ("auto",)}
    own["top_k"] = (sampling.top_k, *([-1] if sampling.top_k == 0 else []))
    for name, values in {**neutral, **own}.items():
        value = given.get(name)
        if name not in given or value in values or (value == "none" and not given.get("tools")):
            continue
        text = f"the field {name!r} of agents' requests, {json.dumps(value):.60},"
        if name == "tool_choice" and value in ("required", "any"):  # some frameworks always send it
            notes.append(f'{text} counts as "auto": the model may call no tool')
        elif sampling.replaces:
            notes.append(f"{text} is ignored (--rl-agent-sampling)")
        else:
            raise RefusedRequest(
                f"`{name}` is {json.dumps(value):.60}, and the job samples with {json.dumps(values[0])}: the tokens "
                "would have other log-probs than the trained ones; remove it, or start the job with "
                "--rl-agent-sampling, which ignores such fields"
            )
    known = {"model", "stream", "tools", *read, *own, *neutral, *never}
    return (*notes, *(f"the field {name!r:.80} of agents' requests is ignored" for name in sorted({*given} - known)))


def turn_request(messages: Iterable[Mapping[str, Any]], given: Mapping[str, Any], **more: Any) -> TurnRequest:
    """The request, whose fields of all APIs are checked already. Raises RefusedRequest."""
    messages = tuple(map(_thought, messages))
    if messages[-1]["role"] == "assistant":
        raise RefusedRequest("the last message is the assistant's; an answer is a new turn, so remove this message")
    return TurnRequest(messages, trained=given.get("model") != UNTRAINED_NAME, **more)


def _thought(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message; reasoning that an agent sends back at the start of the text is the message's reasoning."""
    if message["role"] != "assistant" or not message["content"].lstrip().startswith("<think>"):
        return message
    reasoning, content = split_reasoning(message["content"])
    return {"reasoning": reasoning, **message, "content": content}


def longest(given: Mapping[str, Any], *names: str) -> int | None:
    """The longest turn that a request wants [tokens], by the first of these fields that it has. Raises
    RefusedRequest."""
    name = next((name for name in names if name in given), "")
    if name and (type(given[name]) is not int or given[name] < 1):
        raise RefusedRequest(f"`{name}` is {given[name]!r:.40}; give a number of at least 1")
    return given.get(name)


def stops_of(given: Mapping[str, Any], name: str, sampling: JobSampling) -> tuple[str, ...]:
    """The texts that end the turn. Raises RefusedRequest."""
    stops = given.get(name, [])
    stops = [stops] if isinstance(stops, str) else stops
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARACTERS for text in stops)
    ):
        raise RefusedRequest(f"`{name}` must be at most {MAX_STOPS} texts of at most {MAX_STOP_CHARACTERS} characters")
    if stops and sampling.no_stops:
        raise RefusedRequest(
            f"`{name}` is not supported with {sampling.no_stops}: a text that is sampled partly by old and partly by "
            "new weights would not be found; remove it, or start the job without this flag"
        )
    return tuple(stops)


def tools_of(given: Mapping[str, Any], function: Callable[[Mapping[str, Any]], Any]) -> tuple[Mapping[str, Any], ...]:
    """The tools of a request, as chat templates take them. function: the name, description and parameters of a tool of
    the API, something else for what is no function. Raises RefusedRequest."""
    tools = given.get("tools", [])
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise RefusedRequest(f"`tools` must be a list of at most {MAX_TOOLS}")
    functions = [function(tool) if isinstance(tool, dict) else None for tool in tools]
    for tool, found in zip(tools, functions, strict=True):
        name = found.get("name") if isinstance(found, dict) else None
        if not isinstance(name, str) or len(name) > MAX_NAME:
            raise RefusedRequest(
                f"a tool must be a function with a name of at most {MAX_NAME} characters, which the agent runs itself; "
                f"turn this one off in the agent: {json.dumps(tool):.80}"
            )
    return tuple({"type": "function", "function": found} for found in functions)


def shown(parameters: str, kinds: Sequence[Any], tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a chat template shows of a tool. parameters: name of the field with their JSON schema; kinds: types of tools
    that are functions."""
    names = {"name": "name", "description": "description", "parameters": parameters}
    found = {name: tool[key] for name, key in names.items() if tool.get(key) is not None}
    return found if tool.get("type") in kinds else None


def role_of(where: str, message: Any, roles: Iterable[str]) -> str:
    """The canonical role of a message. Raises RefusedRequest."""
    if not isinstance(message, dict) or (role := message.get("role")) not in [*roles]:
        raise RefusedRequest(f"{where} has no role of {', '.join(roles)}: {json.dumps(message):.80}")
    return ROLES[role]


def text_of(where: str, content: Any, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a message: null, a text, or a list of parts. kinds: types of parts of text. Raises RefusedRequest."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise RefusedRequest(f"{where} has a part of type {kind!r:.40}; only text is supported")
    return "".join(part["text"] for part in parts)


def call_of(where: str, name: Any, arguments: Any, number: Any) -> dict[str, Any]:
    """A call of a tool. number: its id. Raises RefusedRequest."""
    try:
        value = parsed(arguments or "{}") if arguments is None or isinstance(arguments, str) else arguments
    except ValueError:
        value = None
    if not isinstance(value, dict) or not isinstance(name, str):
        raise RefusedRequest(
            f"{where} has a tool call that is no name with a JSON object of arguments: {name!r:.80}, {arguments!r:.80}"
        )
    return {"id": call_id(where, number), "name": name, "arguments": value}


def call_id(where: str, number: Any) -> str | None:
    """The id of a call. Raises RefusedRequest for one that is no text."""
    if number is not None and not isinstance(number, str):
        raise RefusedRequest(f"{where} has a call whose id is {number!r:.40}; give a text")
    return number
