"""The APIs of agents, each plain and streaming, with real clients: turns come whole, and come back as they were."""

import asyncio
import json
import socket
import time

import anthropic
import httpx
import openai
import pytest

from mindspeed_rl_plugin.gateway import endpoints
from mindspeed_rl_plugin.gateway.agent_messages import JobSampling, RefusedRequest, SpokenTurn, difference
from mindspeed_rl_plugin.gateway.conversation import Conversation, PendingCall

JOB = JobSampling(1.0, 1.0, 0, False, "")
CALLS = ({"id": "a", "name": "say", "arguments": {"text": 'a  "b" é'}}, {"id": "b", "name": "look", "arguments": {}})
TURNS = [
    SpokenTurn("It is 12.", "", (), "stop", 5, 3, "0-ab"),
    SpokenTurn("So.", "Let me\nthink.", (), "stop", 5, 3, "1-ab"),
    SpokenTurn("", "", CALLS, "tool_calls", 5, 3, "2-ab"),
    SpokenTurn("I look.", "Hm.", CALLS, "tool_calls", 5, 3, "3-ab"),
    SpokenTurn("It is", "", (), "length", 5, 3, "4-ab"),
    SpokenTurn("", "", (), "stop", 5, 0, "5-ab"),
]
ASKED, AND = [{"role": "user", "content": "What?"}], {"role": "user", "content": "And?"}
PATHS = {"/chat/completions": "messages", "/messages": "messages", "/responses": "input"}
CHAT, MESSAGES, RESPONSES = PATHS
TOOL = {"name": "say", "description": "Says.", "parameters": {"type": "object", "properties": {}}}
CANONICAL_TOOL = {"type": "function", "function": TOOL}


class Spoken(Conversation):
    """Speaks the turns of a script: tuples of turns, or errors."""

    def __init__(self, script, seconds):
        super().__init__(7, print)
        self.script, self.seconds, self.asked, self.calls = [*script], seconds, [], []

    async def ask(self, request, body, again):
        self.asked.append(request)
        self.calls.append(call := PendingCall(b"", (0,), request, None, asyncio.get_running_loop().create_future()))
        what = self.script.pop(0)
        settle = call.turns.set_exception if isinstance(what, Exception) else call.turns.set_result
        asyncio.get_running_loop().call_later(self.seconds, settle, what)
        return call

    async def count(self, request):
        return len(request.messages) + 11


def served(play, *script, sampling=JOB, seconds=0.0):
    """What `await play(conversation)` returns; the lines for the user."""

    async def serve():
        conversation, notes = Spoken(script, seconds), []
        listener = socket.create_server(("127.0.0.1", 0))
        gateway = endpoints.Gateway("127.0.0.1", listener, sampling, notes.append)
        more = {"api_key": conversation.key, "max_retries": 0, "_strict_response_validation": True}
        conversation.openai = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", **more)
        conversation.anthropic = anthropic.AsyncAnthropic(base_url=gateway.url, **more)
        gateway.open(conversation)
        serving = asyncio.create_task(gateway.serve())
        try:
            return await play(conversation), notes
        finally:
            gateway._server.should_exit = True
            await serving

    return asyncio.run(serve())


async def chat(conversation, history, stream, **more):
    """The answer to a history, how it ended, and what it adds to the history."""
    api = conversation.openai.chat.completions
    given = {"model": "policy", "messages": history, "tools": [CANONICAL_TOOL], **more}
    if stream:
        async with api.stream(**given, stream_options={"include_usage": True}) as events:
            try:
                answer = await events.get_final_completion()
            except openai.LengthFinishReasonError as error:  # of the client, for a turn that is cut
                answer = error.completion
    else:
        answer = await api.create(**given)
    return answer, answer.choices[0].finish_reason, [answer.choices[0].message.to_dict()]


async def messages(conversation, history, stream):
    tool = {"name": "say", "description": "Says.", "input_schema": TOOL["parameters"], "cache_control": None}
    given = {"model": "policy", "messages": history, "max_tokens": 99, "tools": [tool]}
    if stream:
        async with conversation.anthropic.messages.stream(**given) as events:
            answer = await events.get_final_message()
    else:
        answer = await conversation.anthropic.messages.create(**given)
    said = {"role": "assistant", "content": [block.to_dict() for block in answer.content]}
    return answer, answer.stop_reason, [said]


async def responses(conversation, history, stream):
    api = conversation.openai.responses
    given = {"model": "policy", "input": history, "tools": [{"type": "function", **TOOL, "strict": False}]}
    if stream:
        async with api.stream(**given) as events:
            answer = [event async for event in events][-1].response
    else:
        answer = await api.create(**given)
    why = answer.status if answer.status == "completed" else answer.incomplete_details.reason
    return answer, why, [item.to_dict() for item in answer.output]


APIS = {  # how each says that a turn stopped, was cut, or calls tools; the result of a call
    chat: ("stop", "length", "tool_calls", lambda at: {"role": "tool", "tool_call_id": at, "content": "done"}),
    messages: (
        *("end_turn", "max_tokens", "tool_use"),
        lambda at: {"role": "user", "content": [{"type": "tool_result", "tool_use_id": at, "content": "done"}]},
    ),
    responses: (
        *("completed", "max_output_tokens", "completed"),
        lambda at: {"type": "function_call_output", "call_id": at, "output": "done"},
    ),
}
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


@STREAM
@pytest.mark.parametrize("api", APIS)
def test_turns_come_whole_and_come_back_as_they_were(api, stream, monkeypatch):
    monkeypatch.setattr(endpoints, "KEEPALIVE_SECONDS", 0.01)
    *ends, result = APIS[api]

    async def play(conversation):
        for turn in TURNS:
            conversation.script, conversation.asked = [(turn,)] * 2, []
            answer, end, said = await api(conversation, ASKED, stream)
            await api(conversation, [*ASKED, *said, *(result(call["id"]) for call in turn.tool_calls), AND], stream)
            first, second = conversation.asked
            assert first.messages == second.messages[:1] == tuple(ASKED) and first.tools == (CANONICAL_TOOL,), turn
            assert difference(turn.message, came := second.messages[1]) is None, turn
            marks = {chat: None, messages: turn.mark if turn.reasoning else None, responses: turn.mark}
            assert (came.get("reasoning", ""), came.get("mark")) == (turn.reasoning, marks[api]), turn
            results = [{"role": "tool", "content": "done", "tool_call_id": call["id"]} for call in turn.tool_calls]
            assert [*second.messages[2:]] == [*results, AND], turn
            assert end == ends[("stop", "length", "tool_calls").index(turn.finish)] and turn.mark in answer.id, turn
            usage = [*answer.usage.to_dict().values()]
            assert 5 in usage and turn.completion_tokens in usage, turn
        assert all(call.heard for call in conversation.calls)

    assert served(play, seconds=0.05 * stream)[1] == []


@STREAM
def test_several_answers_have_an_index(stream):
    answer, *_ = served(lambda conversation: chat(conversation, ASKED, stream, n=2, tools=[]), TURNS[:2])[0]
    assert [(c.index, c.message.content) for c in answer.choices] == [(0, "It is 12."), (1, "So.")]
    assert answer.usage.completion_tokens == 6 and answer.choices[1].message.reasoning_content == "Let me\nthink."


@STREAM
@pytest.mark.parametrize("api", APIS)
def test_an_error_is_one_of_the_client(api, stream):
    async def play(conversation):
        with pytest.raises((openai.APIError, anthropic.APIStatusError), match="too long") as raised:
            await api(conversation, ASKED, stream)
        return raised.value, conversation.calls[0].heard

    (error, heard), _ = served(play, RefusedRequest("too long", code="context_length_exceeded"))
    assert (error.error_code if api is messages else error.code) == "context_length_exceeded" and not heard


def sent(*requests, headers=None, script=((TURNS[3],),) * 99, **more):
    """What raw requests, each a path and a body, get: statuses and texts; their conversation; lines for the user."""

    async def play(conversation):
        given = {"Authorization": "bearer {}"} if headers is None else headers
        given = {name: value.format(conversation.key) for name, value in given.items()}
        async with httpx.AsyncClient(base_url=str(conversation.openai.base_url), headers=given) as client:
            answers = [await client.request("POST" if body else "GET", path, json=body) for path, body in requests]
        return [(answer.status_code, answer.text) for answer in answers], conversation

    (answers, conversation), notes = served(play, *script, **more)
    return answers, conversation, notes


def test_streams_show_life_and_responses_are_those_that_codex_reads(monkeypatch):
    monkeypatch.setattr(endpoints, "KEEPALIVE_SECONDS", 0.02)
    bodies = [(path, {field: ASKED, "stream": True}) for path, field in PATHS.items()]
    script = [*[(TURNS[3],)] * 3, RefusedRequest("no")]
    ((_, one), (_, two), (_, three), (_, failed)), *_ = sent(*bodies, bodies[-1], script=script, seconds=0.2)
    assert one.startswith(": the turn") and two.startswith("event: ping\ndata: ") and one.endswith("[DONE]\n\n")
    assert two.count('{"type": "input_json_delta", ') == 2 and two.count('"input": {}') == 2
    events = [line.removeprefix("event: ") for line in three.splitlines() if line.startswith("event")]
    assert (events[0], events[-1]) == ("response.created", "response.completed") and three.startswith(": the turn")
    assert events.count("response.output_item.done") == 4 and "event: response.failed\n" in failed


IMAGE = [{"role": "user", "content": [{"type": "image", "source": {"url": "http://127.0.0.1"}}]}]
REFUSED = [
    (CHAT, {"n": 17}, "`n` is 17"),
    (MESSAGES, {"top_k": 7}, "`top_k` is 7"),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "say"}}, "`tool_choice` is"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "`output_config.format` is"),
    (MESSAGES, {"stop_sequences": [""]}, "`stop_sequences` must be"),
    (MESSAGES, {"max_tokens": 0}, "`max_tokens` is 0"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "a tool must be a function"),
    (MESSAGES, {"mcp_servers": [{"url": "http://127.0.0.1"}]}, "`mcp_servers` is not supported"),
    (MESSAGES, {"messages": IMAGE}, "message 0 has a part of type 'image'"),
    (MESSAGES, {"messages": [{"role": "tool", "content": ""}]}, "message 0 has no role"),
    (MESSAGES, {"messages": [*ASKED, {"role": "assistant", "content": "It"}]}, "the last message is the assistant's"),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "say"}}, "`tool_choice` is"),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "`text.format` is"),
    (RESPONSES, {"previous_response_id": "resp_0"}, "`previous_response_id` is not supported: nothing is stored"),
    (RESPONSES, {"background": True}, "`background` is not supported"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "a tool must be a function"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "item 0 is of type 'item_reference'"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "a", "arguments": "no"}]}, "item 0 has a tool call"),
    *((path, {PATHS[path]: []}, "the body must be") for path in PATHS),
    *(
        (path, {field: [1]}, f"{'item' if field == 'input' else 'message'} 0 has no role")
        for path, field in PATHS.items()
    ),
]


def test_what_would_be_wrong_is_refused_in_the_apis_own_form():
    answers, conversation, _ = sent(*((path, {PATHS[path]: ASKED, **more}) for path, more, _ in REFUSED))
    for (status, text), (path, more, start) in zip(answers, REFUSED, strict=True):
        assert status == 400 and (error := json.loads(text))["error"]["message"].startswith(start), (more, text)
        assert error["error"]["type"] == "invalid_request_error" and ("type" in error) == (path == MESSAGES), text
    assert conversation.asked == []
    body = {"messages": ASKED, "tool_choice": {"type": "tool", "name": "say"}, "temperature": 0.5}
    (answer,), _, notes = sent((MESSAGES, body), sampling=JOB._replace(replaces=True))
    assert answer[0] == 200 and sum("is ignored (--rl-agent-sampling)" in note for note in notes) == 2


def part(text, kind="text", **more):
    return {"type": kind, "text": text, **more}


def said(role, *content, **more):
    return {"role": role, "content": [*content], **more}


MESSAGES_BODY = {
    **{"model": "policy-untrained", "thinking": {"type": "enabled"}, "metadata": {}, "tool_choice": {"type": "any"}},
    **{"stop_sequences": ["!"], "output_config": {"effort": "low"}, "max_tokens": 9},
    "system": [part("x-anthropic-billing-header: 7"), part("Be "), part("good.", cache_control={})],
    "messages": [
        said("user", part("What"), part("?")),
        said(
            "assistant",
            {"type": "redacted_thinking", "data": "x"},
            {"type": "thinking", "thinking": "Hm.", "signature": "foreign"},
            {"type": "tool_use", "id": "b", "name": "look", "input": {}, "caller": {"type": "direct"}},
        ),
        said(
            "user",
            {"type": "tool_result", "tool_use_id": "b", "content": [part("do"), part("ne")], "is_error": True},
            part("And?"),
        ),
        {"role": "system", "content": "Be brief."},
    ],
}
RESPONSES_BODY = {
    **{"reasoning": {"effort": "low"}, "metadata": {}, "tool_choice": "required", "store": False, "include": ["x"]},
    **{"max_output_tokens": 9, "background": False, "instructions": "Be good."},
    "input": [
        said("user", part("What", "input_text"), part("?", "input_text")),
        {"type": "reasoning", "id": "rs_foreign", "summary": [], "content": [part("Hm.", "reasoning_text")]},
        said("assistant", part("", "output_text", annotations=[]), type="message", status="x"),
        {"type": "function_call", "call_id": "b", "name": "look", "arguments": "", "id": None},
        {"type": "function_call_output", "call_id": "b", "output": [part("done", "input_text")]},
        *(AND, {"type": "message", "role": "developer", "content": "Be brief."}),
    ],
}


def test_what_is_read_is_canonical_and_what_is_ignored_is_said():
    answers, conversation, notes = sent((MESSAGES, MESSAGES_BODY), (RESPONSES, RESPONSES_BODY))
    assert [status for status, _ in answers] == [200, 200], answers
    one, other = conversation.asked
    turn = {"role": "assistant", "content": "", "reasoning": "Hm.", "mark": "foreign", "tool_calls": [CALLS[1]]}
    good, brief = ({"role": "system", "content": text} for text in ("Be good.", "Be brief."))
    expected = [good, *ASKED, turn, {"role": "tool", "content": "done", "tool_call_id": "b"}, AND, brief]
    assert [*one.messages] == [*other.messages] == expected
    assert (one.most, one.stop, one.trained, other.most, other.trained) == (9, ("!",), False, 9, True)
    fields = ("billing-header", "'thinking'", "'metadata'", "output_config.effort", "'reasoning'", "'include'")
    assert all(any(field in note for note in notes) for field in fields), notes
    assert sum('counts as "auto"' in note for note in notes) == 2 and len(notes) == 9, notes


def test_keys_counts_and_models():
    for headers in ({}, {"X-Api-Key": "7-x"}, {"Authorization": "Bearer"}):
        answers, *_ = sent(*((path, {PATHS[path]: "x"}) for path in PATHS), headers=headers)
        assert [status for status, _ in answers] == [401] * 3 and '"authentication_error"' in answers[1][1]
    for headers in ({"X-Api-Key": "{}"}, {"Authorization": "Bearer {}", "X-Api-Key": "another"}):
        assert sent(("/models", None), headers=headers)[0][0][0] == 200
    counted = ("/messages/count_tokens", {"messages": ASKED})
    ((_, count), (_, models), (status, unknown)), *_ = sent(counted, ("/models", None), ("/v1/messages", {"x": 1}))
    assert json.loads(count) == {"input_tokens": 12} and status == 404 and "without /v1" in unknown
    assert [model["id"] for model in json.loads(models)["data"]] == ["policy", "policy-untrained"]


def test_a_head_that_does_not_end_is_not_awaited(monkeypatch):
    monkeypatch.setattr(endpoints, "READ_SECONDS", 0.2)

    async def play(conversation):
        reader, writer = await asyncio.open_connection("127.0.0.1", conversation.openai.base_url.port)
        begin = time.monotonic()
        while not reader.at_eof() and time.monotonic() < begin + 10:
            writer.write(b"G")
            await asyncio.wait([reading := asyncio.ensure_future(reader.read(1))], timeout=0.05)
            reading.cancel()
        return time.monotonic() - begin

    assert served(play)[0] < 5
