"""Agents of episodes.py: loops of their own with the tools of episode_tools.py, and one that has a single turn."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import openai
from episode_tools import SlowWorkAsync, Work, work

PART = {"part": {"type": "string", "description": "Which one."}}
PARAMETERS = {"type": "object", "properties": PART, "required": ["part"]}
# As transformers' `get_json_schema` has it, on which the model was trained; its import takes long.
TOOL = {"name": "work", "description": "Do a part of the work.", "parameters": PARAMETERS, "return": {"type": "string"}}


def agent(who: Callable[..., Any]) -> Callable[..., Any]:
    """An agent that makes the calls itself. who: function or class of episode_tools.py."""

    async def play(row: Mapping[str, Any], base_url: str, api_key: str) -> None:
        model, act = client(base_url, api_key).chat.completions, who
        if inspect.isclass(who):
            made = who()
            made.reset(row["who"], row["rounds"])
            act = made.work
        tools, messages = [{"type": "function", "function": TOOL}], [{"role": "user", "content": row["prompt"]}]
        while True:  # to the limit of turns, at which the client raises
            turn = (await model.create(model="policy", messages=messages, tools=tools)).choices[0].message
            messages.append(turn.model_dump(exclude_none=True))
            for call in turn.tool_calls or ():
                try:
                    said = act(**json.loads(call.function.arguments))
                    said = await said if inspect.isawaitable(said) else said
                except TypeError as error:  # the model wrote other arguments
                    said = str(error)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
            if not turn.tool_calls:
                return

    return play


play_work, play_Work, play_SlowWorkAsync = map(agent, (work, Work, SlowWorkAsync))
play_SlowWork = play_SlowWorkAsync


async def play_once(prompt: str, tokens: int, base_url: str, api_key: str) -> float:
    """One turn of so many tokens. The reward is the latency of the answer [seconds]."""
    asked = {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": tokens}
    model, begin = client(base_url, api_key).chat.completions, time.perf_counter()
    answer = await model.create(model="policy", **asked, extra_body={"ignore_eos": True})
    seconds = time.perf_counter() - begin
    assert answer.usage.completion_tokens == tokens, answer.usage
    return seconds


def ask_all(rows: Sequence[Mapping[str, Any]], base_url: str) -> list[float]:
    """`play_once` for all rows at once, at another server than the gateway."""

    async def together() -> list[float]:
        http.cache_clear()  # its connections are of the last loop
        return await asyncio.gather(*(play_once(row["prompt"], row["tokens"], base_url, "none") for row in rows))

    return asyncio.run(together())


def client(base_url: str, api_key: str) -> openai.AsyncOpenAI:
    """Of one agent. Retries would hide what they cost."""
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http(), max_retries=0)


@functools.cache
def http() -> Any:
    """Of all clients, since it takes long to make one."""
    return openai.DefaultAsyncHttpxClient()
