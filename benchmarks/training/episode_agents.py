"""Agents of episodes.py: the tools of episode_tools.py, called by an agent's own loop, and a question of one turn."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import openai
from episode_tools import SlowWorkAsync, Work, work

PART = {"part": {"type": "string", "description": "Which one."}}
PARAMETERS = {"type": "object", "properties": PART, "required": ["part"]}
# As transformers' `get_json_schema` has it, on which the model was trained; its import takes long.
TOOL = {"name": "work", "description": "Do a part of the work.", "parameters": PARAMETERS, "return": {"type": "string"}}


def agent(begin: Callable[[Mapping[str, Any]], Callable[..., Any]]) -> Callable[..., Coroutine[Any, Any, None]]:
    """An agent that makes the calls itself. begin: the function `work` for a row."""

    async def play(row: Mapping[str, Any], base_url: str, api_key: str) -> None:
        model, act = client(base_url, api_key).chat.completions, begin(row)
        messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
        while True:  # to the limit of turns, which raises
            answer = await model.create(
                model="policy", messages=messages, tools=[{"type": "function", "function": TOOL}]
            )
            turn = answer.choices[0].message
            messages.append(turn.model_dump(exclude_none=True))
            for call in turn.tool_calls or ():
                said = act(**json.loads(call.function.arguments))
                said = await said if inspect.isawaitable(said) else said
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
            if not turn.tool_calls:
                return

    return play


def _method(kind: type[Work], row: Mapping[str, Any]) -> Callable[..., Any]:
    made = kind()
    made.reset(row["who"], row["rounds"])
    return made.work


play_work = agent(lambda row: work)
play_Work = agent(functools.partial(_method, Work))
play_SlowWork = play_SlowWorkAsync = agent(functools.partial(_method, SlowWorkAsync))


async def ask(prompt: str, tokens: int, base_url: str, api_key: str) -> float:
    """An agent of one turn of so many tokens. Its reward is the latency of the answer [seconds]."""
    model, messages = client(base_url, api_key).chat.completions, [{"role": "user", "content": prompt}]
    begin = time.perf_counter()
    answer = await model.create(
        model="policy", messages=messages, max_completion_tokens=tokens, extra_body={"ignore_eos": True}
    )
    seconds = time.perf_counter() - begin
    assert answer.usage.completion_tokens == tokens, answer.usage
    return seconds


def ask_all(rows: Sequence[Mapping[str, Any]], base_url: str) -> list[float]:
    """`ask` for all rows at once, without the gateway."""

    async def together() -> list[float]:
        http.cache_clear()  # its connections are of the last loop
        return await asyncio.gather(*(ask(row["prompt"], row["tokens"], base_url, "none") for row in rows))

    return asyncio.run(together())


def client(base_url: str, api_key: str) -> openai.AsyncOpenAI:
    """Of one agent."""
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http())


@functools.cache
def http() -> Any:
    """Of all clients, since it takes long to make one."""
    return openai.DefaultAsyncHttpxClient()
