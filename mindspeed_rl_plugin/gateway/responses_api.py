"""The Responses API of OpenAI, where nothing is stored: a request's body as a `TurnRequest`, a turn as an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any

from mindspeed_rl_plugin.gateway import api_parts as parts
from mindspeed_rl_plugin.gateway.agent_messages import JobSampling, RefusedRequest, SpokenTurn, TurnRequest

RESPONSES_FIELDS = ("input", "instructions", "max_output_tokens")
RESPONSES_NEUTRAL = {"text.format": ({"type": "text"},)}
RESPONSES_NEVER = dict.fromkeys(
    ("previous_response_id", "conversation", "background", "prompt"),
    "nothing is stored here; send the whole history as `input`",
)
RESPONSES_SAME = {
    "store": False,
    "truncation": "disabled",
    "include": ["reasoning.encrypted_content"],
}  # with or without them
ITEM_KINDS = ("message", "reasoning", "function_call", "function_call_output")
TEXT_KINDS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
# Type of an item with text -> field of its part, events of the part, events of the part's text, more of the latter.
PART_EVENTS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "message": ("content", "content_part", "output_text", {"logprobs": []}),
    "reasoning": ("summary", "reasoning_summary_part", "reasoning_summary_text", {}),
}


def read(body: Any, sampling: JobSampling) -> TurnRequest:
    """See `AgentApi`."""
    if isinstance(body, dict) and isinstance(body.get("input"), str):
        body = {**body, "input": [{"role": "user", "content": body["input"]}]}
    given = {
        name: value for name, value in parts.fields(body, "input", "text").items() if RESPONSES_SAME.get(name) != value
    }
    notes = parts.ignored(given, sampling, RESPONSES_FIELDS, RESPONSES_NEUTRAL, RESPONSES_NEVER)
    messages = _messages(given["input"])
    if instructions := parts.text_of("`instructions`", given.get("instructions")):
        messages.insert(0, {"role": "system", "content": instructions})
    tools = parts.tools_of(given, partial(parts.shown, "parameters", ("function",)))
    return parts.turn_request(messages, given, tools=tools, most=parts.longest(given, "max_output_tokens"), notes=notes)


def _messages(items: list[Any]) -> list[dict[str, Any]]:
    """The messages that the items are: what the assistant says one after the other is one message."""
    messages: list[dict[str, Any]] = []
    for at, item in enumerate(items):
        where, kind = f"item {at}", (item.get("type") or "message") if isinstance(item, dict) else "message"
        if kind not in ITEM_KINDS:
            raise RefusedRequest(
                f"{where} is of type {kind!r:.40}; only {', '.join(ITEM_KINDS)} are supported: nothing is stored here, "
                "and the agent runs its tools itself"
            )
        if kind == "function_call_output":
            text = parts.text_of(where, item.get("output"), TEXT_KINDS)
            messages.append(
                {"role": "tool", "content": text, "tool_call_id": parts.call_id(where, item.get("call_id"))}
            )
            continue
        roles = [role for role in parts.ROLES if role != "tool"]
        role = parts.role_of(where, item, roles) if kind == "message" else "assistant"
        if role != "assistant" or not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": role, "content": ""})
        _add(where, kind, item, messages[-1])
    return messages


def _add(where: str, kind: str, item: Mapping[str, Any], message: dict[str, Any]) -> None:
    """Add an item to the message that it belongs to."""
    if kind == "reasoning":
        text = parts.text_of(where, item.get("content") or item.get("summary"), TEXT_KINDS)
        message["reasoning"] = message.get("reasoning", "") + text
    elif kind == "function_call":
        call = parts.call_of(where, item.get("name"), item.get("arguments"), item.get("call_id"))
        message.setdefault("tool_calls", []).append(call)
    else:
        message["content"] += parts.text_of(where, item.get("content"), TEXT_KINDS)
    mark = item.get("encrypted_content") or item.get("id")
    if message["role"] == "assistant" and isinstance(mark, str):
        message.setdefault("mark", mark.rpartition("_")[2])


def _answer(answers: parts.Answers) -> dict[str, Any]:
    (turn,) = answers.turns
    status, why = ("incomplete", {"reason": "max_output_tokens"}) if turn.finish == "length" else ("completed", None)
    before, spoken = turn.prompt_tokens, turn.completion_tokens
    usage = {"input_tokens": before, "output_tokens": spoken, "total_tokens": before + spoken}
    usage["input_tokens_details"] = {"cached_tokens": 0, "cache_write_tokens": 0}
    usage["output_tokens_details"] = {"reasoning_tokens": 0}
    head = _head(f"resp_{answers.name}", answers.model, answers.created, status)
    return {**head, "incomplete_details": why, "output": [*_items(turn, status)], "usage": usage}


def _head(name: str, model: Any, created: int, status: str) -> dict[str, Any]:
    head = {"id": name, "object": "response", "created_at": created, "model": model, "status": status, "error": None}
    return {**head, "output": [], "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "store": False}


def _items(turn: SpokenTurn, status: str) -> Iterator[dict[str, Any]]:
    if turn.reasoning:
        summary = [{"type": "summary_text", "text": turn.reasoning}]
        yield {"type": "reasoning", "id": f"rs_{turn.mark}", "summary": summary, "encrypted_content": turn.mark}
    if turn.content or not (turn.reasoning or turn.tool_calls):
        content = [{"type": "output_text", "text": turn.content, "annotations": [], "logprobs": []}]
        head = {"type": "message", "id": f"msg_{turn.mark}", "role": "assistant", "status": status}
        yield {**head, "content": content}
    for number, call in enumerate(turn.tool_calls):
        head = {"type": "function_call", "id": f"fc_{number}_{turn.mark}", "call_id": call["id"], "status": status}
        yield {**head, "name": call["name"], "arguments": json.dumps(call["arguments"])}


def _events(answers: parts.Answers) -> Iterator[str]:
    whole, numbers = _answer(answers), count()

    def made(kind: str, **more: Any) -> str:
        name = f"response.{kind}"
        return parts.event({"type": name, "sequence_number": next(numbers), **more}, name)

    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield made("created", response=begun)
    yield made("in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        yield from _item_events(made, item, index)
    yield made(whole["status"], response=whole)


def _item_events(made: Callable[..., str], item: Mapping[str, Any], index: int) -> Iterator[str]:
    place = {"item_id": item["id"], "output_index": index}
    name, part_events, text_events, more = PART_EVENTS.get(item["type"], ("arguments", "", "", {}))
    empty = {**item, name: type(item[name])(), **({"status": "in_progress"} if "status" in item else {})}
    yield made("output_item.added", output_index=index, item=empty)
    if name == "arguments":
        yield made("function_call_arguments.delta", **place, delta=item[name])
        yield made("function_call_arguments.done", **place, arguments=item[name], name=item["name"])
    else:
        (part,), place[f"{name}_index"] = item[name], 0
        yield made(f"{part_events}.added", **place, part={**part, "text": ""})
        yield made(f"{text_events}.delta", **place, **more, delta=part["text"])
        yield made(f"{text_events}.done", **place, **more, text=part["text"])
        yield made(f"{part_events}.done", **place, part=part)
    yield made("output_item.done", output_index=index, item=item)


def _error_events(refused: RefusedRequest) -> Iterator[str]:
    """`error` is what OpenAI's clients raise, `response.failed` is what Codex does."""
    error = parts.openai_error(refused)["error"]
    yield parts.event({**error, "type": "error", "sequence_number": 0, "error": error}, "error")
    response = {
        **_head("resp_failed", parts.POLICY_NAME, 0, "failed"),
        "error": {key: error[key] for key in ("code", "message")},
    }
    yield parts.event({"type": "response.failed", "sequence_number": 1, "response": response}, "response.failed")


RESPONSES_API = parts.AgentApi(read, _answer, _events, parts.openai_error, _error_events)
