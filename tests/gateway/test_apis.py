"""The APIs of agents, each plain and streaming, with real clients: turns come whole, and come back as they were."""

import asyncio
import contextlib
import json
import socket

import anthropic
import httpx
import openai
import pytest

from mindspeed_rl_plugin.gateway import endpoints
from mindspeed_rl_plugin.gateway.agent_messages import JobSampling, RefusedRequest, SpokenTurn, difference
from mindspeed_rl_plugin.gateway.conversation import Conversation, PendingCall
from mindspeed_rl_plugin.gateway.endpoints import Gateway

JOB = JobSampling(1.0, 1.0, 0, False, "")
CALLS = tuple(
    {"id": f"call_{number}", "name": name, "arguments": arguments}
    for number, (name, arguments) in enumerate([("say", {"text": 'a  "b" é'}), ("look", {})])
)
TURNS = {
    "text": SpokenTurn("It is 12.", "", (), "stop", 5, 3, "0-ab"),
    "reasoning": SpokenTurn("So.", "Let me\nthink.", (), "stop", 5, 3, "1-ab"),
    "calls": SpokenTurn("", "", CALLS, "tool_calls", 5, 3, "2-ab"),
    "all": SpokenTurn("I look.", "Hm.", CALLS, "tool_calls", 5, 3, "3-ab"),
    "cut": SpokenTurn("It is", "", (), "length", 5, 3, "4-ab"),
    "empty": SpokenTurn("", "", (), "stop", 5, 0, "5-ab"),
}
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOL = {"name": "say", "description": "Says.", "parameters": SCHEMA}
CANONICAL_TOOL = {"type": "function", "function": TOOL}


class Spoken(Conversation):
    """Speaks the turns of a script: tuples of turns, or errors."""

    def __init__(self, *script, seconds=0.0):
        super().__init__(7, print)
        self.script, self.seconds, self.asked, self.calls, self.clients = [*script], seconds, [], [], {}

    def client(self, kind, url):
        if kind not in self.clients:
            more = {"max_retries": 0, "_strict_response_validation": True}
            self.clients[kind] = kind(base_url=url, api_key=self.key, **more)
        return self.clients[kind]

    async def ask(self, request, body, again):
        self.asked.append(request)
        self.calls.append(call := PendingCall(b"", asyncio.get_running_loop().create_future()))
        what = self.script.pop(0)
        settle = call.turns.set_exception if isinstance(what, Exception) else call.turns.set_result
        asyncio.get_running_loop().call_later(self.seconds, settle, what)
        return call

    async def count(self, request):
        self.asked.append(request)
        return 12


def served(play, *script, sampling=JOB, **more):
    """What `await play(url, conversation)` returns; the lines for the user."""

    async def serve():
        conversation, notes = Spoken(*script, **more), []
        gateway = Gateway("127.0.0.1", socket.create_server(("127.0.0.1", 0)), sampling, notes.append)
        gateway.open(conversation)
        serving = asyncio.create_task(gateway.serve())
        try:
            return await play(gateway.url, conversation), notes
        finally:
            gateway._server.should_exit = True
            await serving

    return asyncio.run(serve())


async def chat(url, conversation, history, stream, **more):
    """The answer of chat completions to a history, and the history with it."""
    client = conversation.client(openai.AsyncOpenAI, f"{url}/v1")
    given = {"model": "policy", "messages": history, "tools": [CANONICAL_TOOL], **more}
    if stream:
        async with client.chat.completions.stream(**given, stream_options={"include_usage": True}) as events:
            try:
                answer = await events.get_final_completion()
            except openai.LengthFinishReasonError as error:  # of the client, for a turn that is cut
                answer = error.completion
    else:
        answer = await client.chat.completions.create(**given)
    return answer, [*history, answer.choices[0].message.to_dict()]


async def messages(url, conversation, history, stream, **more):
    client = conversation.client(anthropic.AsyncAnthropic, url)
    tools = [{"name": "say", "description": "Says.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}]
    given = {"model": "policy", "messages": history, "max_tokens": 99, "tools": tools, **more}
    if stream:
        async with client.messages.stream(**given) as events:
            answer = await events.get_final_message()
    else:
        answer = await client.messages.create(**given)
    return answer, [*history, {"role": "assistant", "content": [block.to_dict() for block in answer.content]}]


async def responses(url, conversation, history, stream, **more):
    given = {"model": "policy", "input": history, "tools": [{"type": "function", **TOOL, "strict": False}], **more}
    client = conversation.client(openai.AsyncOpenAI, f"{url}/v1").responses
    if stream:
        last = None
        async with client.stream(**given) as events:
            async for event in events:
                last = event
        answer = last.response
    else:
        answer = await client.create(**given)
    return answer, [*history, *(item.to_dict() for item in answer.output)]


RESULTS = {  # of the calls, as each API has them
    chat: lambda calls: [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls],
    messages: lambda calls: [
        {
            "role": "user",
            "content": [
                *({"type": "tool_result", "tool_use_id": call["id"], "content": "done"} for call in calls),
                {"type": "text", "text": "And?"},
            ],
        }
    ],
    responses: lambda calls: [
        {"type": "function_call_output", "call_id": call["id"], "output": "done"} for call in calls
    ],
}
FINISH = {
    chat: lambda answer: answer.choices[0].finish_reason,
    messages: lambda answer: answer.stop_reason,
    responses: lambda answer: answer.incomplete_details.reason if answer.status == "incomplete" else answer.status,
}
FINISHES = {
    chat: {"stop": "stop", "length": "length", "tool_calls": "tool_calls"},
    messages: {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"},
    responses: {"stop": "completed", "length": "max_output_tokens", "tool_calls": "completed"},
}
USAGE = [("input_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens")]
ASKED = [{"role": "user", "content": "What?"}]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("api", RESULTS)
def test_turns_come_whole_and_come_back_as_they_were(api, stream, monkeypatch):
    monkeypatch.setattr(endpoints, "KEEPALIVE_SECONDS", 0.01)

    async def play(url, conversation):
        for name, turn in TURNS.items():
            conversation.script, conversation.asked = [(turn,), (TURNS["text"],)], []
            answer, history = await api(url, conversation, ASKED, stream)
            history += RESULTS[api](turn.tool_calls) or [{"role": "user", "content": "And?"}]
            await api(url, conversation, history, stream)
            first, second = conversation.asked
            assert first.messages == second.messages[:1] == tuple(ASKED) and first.tools == (CANONICAL_TOOL,), name
            assert difference(turn.message, came := second.messages[1]) is None, name
            assert (came.get("reasoning") or "") == turn.reasoning, name
            marks = {chat: None, messages: turn.mark if turn.reasoning else None, responses: turn.mark}
            assert came.get("mark") == marks[api] and answer.id.endswith(turn.mark), name
            results = [{"role": "tool", "content": "done", "tool_call_id": call["id"]} for call in turn.tool_calls]
            user = [{"role": "user", "content": "And?"}] if api is messages or not results else []
            assert [*second.messages[2:]] == results + user, name
            assert FINISH[api](answer) == FINISHES[api][turn.finish], name
            usage = answer.usage.to_dict()
            tokens = [usage.get(key, usage.get(other)) for key, other in USAGE]
            assert tokens == [5, turn.completion_tokens], name
        assert all(call.heard for call in conversation.calls)

    assert served(play, seconds=0.05 * stream)[1] == []
