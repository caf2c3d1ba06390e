"""The chat completions API of OpenAI: a request's body as a `TurnRequest`, turns of the model as an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mindspeed_rl_plugin.gateway import api_parts as parts
from mindspeed_rl_plugin.gateway.agent_messages import MAX_ANSWERS, JobSampling, RefusedRequest, SpokenTurn, TurnRequest

CHAT_FIELDS = ("messages", "stop", "max_tokens", "max_completion_tokens", "stream_options", "n")
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
}
CHAT_NEVER = dict.fromkeys(
    ("chat_template", "chat_template_kwargs", "functions", "function_call", "audio", "modalities", "prediction"),
    "the job's chat template makes the tokens; remove it",
)


def read(body: Any, sampling: JobSampling) -> TurnRequest:
    """See `AgentApi`."""
    given = parts.fields(body, "messages")
    notes = parts.ignored(given, sampling, CHAT_FIELDS, CHAT_NEUTRAL, CHAT_NEVER)
    n = given.get("n", 1)
    if type(n) is not int or not 1 <= n <= MAX_ANSWERS:
        raise RefusedRequest(f"`n` is {n!r:.40}; give a number from 1 to {MAX_ANSWERS}")
    return parts.turn_request(
        (_message(f"message {at}", message) for at, message in enumerate(given["messages"])),
        given,
        tools=parts.tools_of(given, _function),
        most=parts.longest(given, "max_completion_tokens", "max_tokens"),
        stop=parts.stops_of(given, "stop", sampling),
        notes=notes,
        n=n,
    )


def _message(where: str, message: Any) -> dict[str, Any]:
    out: dict[str, Any] = {"role": parts.role_of(where, message, parts.ROLES)}
    out["content"] = parts.text_of(where, message.get("content"))
    if out["role"] == "assistant":
        if reasoning := message.get("reasoning_content") or message.get("reasoning"):
            out["reasoning"] = parts.text_of(where, reasoning)
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise RefusedRequest(f"{where} has `tool_calls` that are no list: {json.dumps(calls):.80}")
            out["tool_calls"] = [_call(where, call if isinstance(call, dict) else {}) for call in calls]
    if out["role"] == "tool":
        out["tool_call_id"] = parts.call_id(where, message.get("tool_call_id"))
    return out


def _call(where: str, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    return parts.call_of(where, function.get("name"), function.get("arguments"), call.get("id"))


def _function(tool: Mapping[str, Any]) -> Any:
    """What a chat template shows of a tool. `strict` is for servers that force the form of calls."""
    function = tool.get("function") if tool.get("type") == "function" else None
    if not isinstance(function, dict):
        return None
    return {name: value for name, value in function.items() if name != "strict" and value is not None}


def _answer(answers: parts.Answers) -> dict[str, Any]:
    choices = []
    for index, turn in enumerate(answers.turns):
        message: dict[str, Any] = {"role": "assistant", "content": turn.content or (None if turn.tool_calls else "")}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.tool_calls:
            message["tool_calls"] = [_written(call) for call in turn.tool_calls]
        choices.append({"index": index, "message": message, "logprobs": None, "finish_reason": turn.finish})
    return {**_head(answers, "chat.completion"), "choices": choices, "usage": _usage(answers)}


def _events(answers: parts.Answers) -> Iterator[str]:
    head = _head(answers, "chat.completion.chunk")
    for index, turn in enumerate(answers.turns):
        for delta, finish in _deltas(turn):
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
            yield parts.event({**head, "choices": [choice]})
    if isinstance(options := answers.body.get("stream_options"), dict) and options.get("include_usage"):
        yield parts.event({**head, "choices": [], "usage": _usage(answers)})
    yield "data: [DONE]\n\n"


def _deltas(turn: SpokenTurn) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    yield {"role": "assistant", "content": ""}, None
    if turn.reasoning:
        yield {"reasoning_content": turn.reasoning}, None
    if turn.content:
        yield {"content": turn.content}, None
    for index, call in enumerate(turn.tool_calls):
        yield {"tool_calls": [{"index": index, **_written(call)}]}, None
    yield {}, turn.finish


def _head(answers: parts.Answers, kind: str) -> dict[str, Any]:
    head = {"id": f"chatcmpl-{answers.name}", "object": kind}
    return {**head, "created": answers.created, "model": answers.model}


def _written(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {"id": call["id"], "type": "function", "function": function}


def _usage(answers: parts.Answers) -> dict[str, int]:
    before, spoken = answers.turns[0].prompt_tokens, sum(turn.completion_tokens for turn in answers.turns)
    return {"prompt_tokens": before, "completion_tokens": spoken, "total_tokens": before + spoken}


CHAT_API = parts.AgentApi(
    read, _answer, _events, parts.openai_error, lambda refused: [parts.event(parts.openai_error(refused))]
)
