"""The chat completions API of OpenAI: a request's body as a `TurnRequest`, a turn of the model as an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mindspeed_rl_plugin.gateway.agent_messages import (
    CanonicalMessage,
    JobSampling,
    RefusedRequest,
    SpokenTurn,
    TurnRequest,
    parsed,
)

ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
READ = ("model", "messages", "tools", "stop", "max_tokens", "max_completion_tokens", "stream", "stream_options")
# Fields that would change the distribution of the sampled tokens -> values that leave it as it is.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "n": (1,),
}
# Fields that would change the tokens of the prompt, or the answer's form, which no flag allows.
NEVER = ("chat_template", "chat_template_kwargs", "functions", "function_call", "audio", "modalities", "prediction")
MAX_STOPS, MAX_STOP_CHARACTERS, MAX_TOOLS, MAX_NAME = 4, 256, 256, 128


def read(body: Any, sampling: JobSampling) -> TurnRequest:
    """The request in a body. sampling: of the job.

    Raises RefusedRequest for a body that is no request, and for one that the job cannot answer as asked.
    """
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise RefusedRequest("the body must be a JSON object with `messages`, a list that is not empty")
    given = {name: value for name, value in body.items() if value is not None}
    notes = _sampling_notes(given, sampling)
    if never := [name for name in NEVER if name in given]:
        raise RefusedRequest(
            f"`{never[0]}` is not supported, because the job's chat template makes the tokens; remove it"
        )
    known = {*READ, *NEUTRAL, "temperature", "top_p", "top_k"}
    notes += [f"the field {name!r:.80} of agents' requests is ignored" for name in sorted(set(given) - known)]
    messages = tuple(_message(at, message) for at, message in enumerate(body["messages"]))
    if messages[-1]["role"] == "assistant":
        raise RefusedRequest("the last message is the assistant's; an answer is a new turn, so remove this message")
    most = given.get("max_completion_tokens", given.get("max_tokens"))
    if most is not None and (type(most) is not int or most < 1):
        raise RefusedRequest(f"`max_tokens` is {most!r:.40}; give a number of at least 1")
    stops = _stops(given.get("stop", []))
    if stops and sampling.no_stops:
        raise RefusedRequest(
            f"`stop` is not supported with {sampling.no_stops}: a text that is sampled partly by old and partly by new "
            "weights would not be found; remove it, or start the job without this flag"
        )
    return TurnRequest(messages, _tools(given.get("tools", [])), most, stops, tuple(notes))


def answer(turn: SpokenTurn, name: str, model: str, created: int) -> dict[str, Any]:
    """The answer to a request that is not streamed. name: its id; model: as the request has it; created: Unix time."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.content or (None if turn.tool_calls else "")}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [_written(call) for call in turn.tool_calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": turn.finish}
    head = {"id": name, "object": "chat.completion", "created": created, "model": model}
    return {**head, "choices": [choice], "usage": _usage(turn)}


def events(turn: SpokenTurn, name: str, model: str, created: int, usage: bool) -> Iterator[str]:
    """The events of a streamed answer. usage: whether the last one before the end gives the numbers of tokens."""
    head = {"id": name, "object": "chat.completion.chunk", "created": created, "model": model}

    def chunk(delta: Mapping[str, Any], finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return _event({**head, "choices": [choice]})

    yield chunk({"role": "assistant", "content": ""})
    if turn.reasoning:
        yield chunk({"reasoning_content": turn.reasoning})
    if turn.content:
        yield chunk({"content": turn.content})
    for index, call in enumerate(turn.tool_calls):
        yield chunk({"tool_calls": [{"index": index, **_written(call)}]})
    yield chunk({}, turn.finish)
    if usage:
        yield _event({**head, "choices": [], "usage": _usage(turn)})
    yield "data: [DONE]\n\n"


def error(refused: RefusedRequest) -> dict[str, Any]:
    """The body of an error."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}}


def error_event(refused: RefusedRequest) -> str:
    return _event(error(refused))


def _sampling_notes(given: Mapping[str, Any], sampling: JobSampling) -> list[str]:
    """What is ignored of the sampling that a request asks for. Raises RefusedRequest for what may not be ignored."""
    allowed = {**NEUTRAL, "temperature": (sampling.temperature,), "top_p": (sampling.top_p,)}
    allowed["top_k"] = (sampling.top_k, *([-1] if sampling.top_k == 0 else []))
    notes = []
    for name, values in allowed.items():
        value = given.get(name)
        if name not in given or value in values:
            continue
        text = f"the field {name!r} of agents' requests, {json.dumps(value):.60},"
        if name == "tool_choice" and value == "required":  # some frameworks always send it
            notes.append(f'{text} counts as "auto": the model may call no tool')
        elif sampling.replaces and name != "n":
            notes.append(f"{text} is ignored (--rl-agent-sampling)")
        else:
            raise RefusedRequest(
                f"`{name}` is {json.dumps(value):.60}, and the job samples with {json.dumps(values[0])}: the tokens "
                "would have other log-probs than the trained ones; remove it"
                + ("" if name == "n" else ", or start the job with --rl-agent-sampling, which ignores such fields")
            )
    return notes


def _message(at: int, message: Any) -> CanonicalMessage:
    if not isinstance(message, dict) or str(message.get("role")) not in ROLES:
        raise RefusedRequest(f"message {at} has no role of {', '.join(ROLES)}: {json.dumps(message):.80}")
    out: dict[str, Any] = {"role": ROLES[message["role"]], "content": _text(at, message.get("content"))}
    if out["role"] == "assistant":
        if reasoning := message.get("reasoning_content") or message.get("reasoning"):
            out["reasoning"] = _text(at, reasoning)
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise RefusedRequest(f"message {at} has `tool_calls` that are no list: {json.dumps(calls):.80}")
            out["tool_calls"] = [_call(at, call) for call in calls]
    if out["role"] == "tool":
        out["tool_call_id"] = message.get("tool_call_id")
    return out


def _text(at: int, content: Any) -> str:
    """The text of a message: null, a text, or a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RefusedRequest(f"message {at} has a part of type {kind!r:.40}; only text is supported")
    return "".join(part["text"] for part in parts)


def _call(at: int, call: Any) -> dict[str, Any]:
    try:
        name, arguments = call["function"]["name"], call["function"].get("arguments") or "{}"
        value = parsed(arguments) if isinstance(arguments, str) else arguments
    except (TypeError, KeyError, ValueError, AttributeError):
        value = None
    if not isinstance(value, dict) or not isinstance(name, str):
        raise RefusedRequest(
            f"message {at} has a tool call that is no {{id, function: {{name, arguments}}}} with a JSON object in "
            f"arguments: {json.dumps(call):.80}"
        )
    return {"id": call.get("id"), "name": name, "arguments": value}


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise RefusedRequest(f"`tools` must be a list of at most {MAX_TOOLS}")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or len(function["name"]) > MAX_NAME
        ):
            raise RefusedRequest(
                f'a tool must be {{type: "function", function: {{name, ...}}}}: {json.dumps(tool):.80}'
            )
    return tuple({"type": "function", "function": _schema(tool["function"])} for tool in tools)


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat template shows of a tool. `strict` is for servers that force the form of calls."""
    return {name: value for name, value in function.items() if name != "strict" and value is not None}


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, Sequence)
        or len(stops) > MAX_STOPS
        or not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARACTERS for text in stops)
    ):
        raise RefusedRequest(f"`stop` must be at most {MAX_STOPS} texts of at most {MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


def _written(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": arguments}}


def _usage(turn: SpokenTurn) -> dict[str, int]:
    before, spoken = turn.prompt_tokens, turn.completion_tokens
    return {"prompt_tokens": before, "completion_tokens": spoken, "total_tokens": before + spoken}


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
