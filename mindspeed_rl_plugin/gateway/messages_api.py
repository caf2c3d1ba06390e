"""The Messages API of Anthropic: a request's body as a `TurnRequest`, a turn of the model as an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import Any

from mindspeed_rl_plugin.gateway import api_parts as parts
from mindspeed_rl_plugin.gateway.agent_messages import JobSampling, RefusedRequest, SpokenTurn, TurnRequest

MESSAGES_FIELDS = ("messages", "system", "max_tokens", "stop_sequences")
MESSAGES_NEUTRAL = {"output_config.format": (None,), "output_format": (None,)}
MESSAGES_NEVER = dict.fromkeys(("mcp_servers", "container"), "the agent runs its tools itself; turn it off there")
BILLING_START = "x-anthropic-billing-header"  # of a block of Claude Code that differs in each request
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTA_TYPES = {  # type of a block -> its fields that come in events of their own, and the types of these
    "thinking": {"thinking": "thinking_delta", "signature": "signature_delta"},
    "text": {"text": "text_delta"},
    "tool_use": {"input": "input_json_delta"},
}
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


def read(body: Any, sampling: JobSampling) -> TurnRequest:
    """See `AgentApi`."""
    given = parts.fields(body, "messages", "output_config")
    choice, system = given.get("tool_choice"), given.get("system")
    if isinstance(choice, dict) and choice.get("type") in ("auto", "any"):
        given |= {"tool_choice" if key == "type" else f"tool_choice.{key}": value for key, value in choice.items()}
    notes = parts.ignored(given, sampling, MESSAGES_FIELDS, MESSAGES_NEUTRAL, MESSAGES_NEVER)
    if isinstance(system, list) and (kept := [block for block in system if not _is_billing(block)]) != system:
        system, notes = kept, (*notes, f"a block {BILLING_START!r} of agents' system prompts is ignored")
    text = parts.text_of("`system`", system)
    messages = [{"role": "system", "content": text}] if text else []
    for at, message in enumerate(given["messages"]):
        messages += _messages(f"message {at}", message)
    tools = parts.tools_of(given, partial(parts.shown, "input_schema", (None, "custom")))
    most, stop = parts.longest(given, "max_tokens"), parts.stops_of(given, "stop_sequences", sampling)
    return parts.turn_request(messages, given, tools=tools, most=most, stop=stop, notes=notes)


def _is_billing(block: Any) -> bool:
    return isinstance(block, dict) and str(block.get("text")).startswith(BILLING_START)


def _is_result(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_result"


def _messages(where: str, message: Any) -> Iterator[dict[str, Any]]:
    """The messages that a message is: a user's is split into results of tools, and the texts around them."""
    role, content = parts.role_of(where, message, ("user", "assistant", "system")), message.get("content")
    if role == "assistant":
        yield _assistant(where, content if isinstance(content, list) else [{"type": "text", "text": content or ""}])
    elif role == "user" and isinstance(content, list) and any(map(_is_result, content)):
        for result, blocks in groupby(content, _is_result):
            if result:
                for block in blocks:
                    text = parts.text_of(where, block.get("content"))
                    yield {
                        "role": "tool",
                        "content": text,
                        "tool_call_id": parts.call_id(where, block.get("tool_use_id")),
                    }
            elif text := parts.text_of(where, [*blocks]):
                yield {"role": "user", "content": text}
    else:
        yield {"role": role, "content": parts.text_of(where, content)}


def _assistant(where: str, blocks: list[Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"role": "assistant"}
    texts = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            out["reasoning"] = out.get("reasoning", "") + parts.text_of(where, block.get("thinking"))
            if isinstance(signature := block.get("signature"), str):
                out.setdefault("mark", signature)
        elif kind == "tool_use":
            call = parts.call_of(where, block.get("name"), block.get("input"), block.get("id"))
            out.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":
            texts.append(block)
    return {**out, "content": parts.text_of(where, texts)}


def _answer(answers: parts.Answers) -> dict[str, Any]:
    (turn,) = answers.turns
    head = {"id": f"msg_{answers.name}", "type": "message", "role": "assistant", "model": answers.model}
    usage = {"input_tokens": turn.prompt_tokens, "output_tokens": turn.completion_tokens}
    ends = {"stop_reason": STOP_REASONS[turn.finish], "stop_sequence": None}
    return {**head, "content": _blocks(turn), **ends, "usage": usage}


def _blocks(turn: SpokenTurn) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if turn.reasoning:
        blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": turn.mark})
    if turn.content:
        blocks.append({"type": "text", "text": turn.content})
    for call in turn.tool_calls:
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["name"], "input": call["arguments"]})
    return blocks


def _events(answers: parts.Answers) -> Iterator[str]:
    whole = _answer(answers)
    begun = {"content": [], "stop_reason": None, "usage": {**whole["usage"], "output_tokens": 0}}
    yield _event("message_start", message={**whole, **begun})
    for index, block in enumerate(whole["content"]):
        empty = {field: type(block[field])() for field in DELTA_TYPES[block["type"]]}
        yield _event("content_block_start", index=index, content_block={**block, **empty})
        for field, kind in DELTA_TYPES[block["type"]].items():
            text = {"partial_json": json.dumps(block[field])} if field == "input" else {field: block[field]}
            yield _event("content_block_delta", index=index, delta={"type": kind, **text})
        yield _event("content_block_stop", index=index)
    ends = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield _event("message_delta", delta=ends, usage=whole["usage"])
    yield _event("message_stop")


def _event(name: str, **more: Any) -> str:
    return parts.event({"type": name, **more}, name)


def _error(refused: RefusedRequest) -> dict[str, Any]:
    kind = ERROR_TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    error = {"type": kind, "message": str(refused), "details": {"error_code": refused.code}}
    return {"type": "error", "error": error}


MESSAGES_API = parts.AgentApi(
    read, _answer, _events, _error, lambda refused: [parts.event(_error(refused), "error")], waiting=_event("ping")
)
