"""One agent's conversation with the model: its requests wait here for the turns that the engine samples."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_rl_plugin.gateway.agent_messages import (
    History,
    RefusedRequest,
    SpokenTurn,
    TurnRequest,
    calls_of,
    for_template,
)


@dataclass(eq=False)
class PendingCall:
    """The last request for a turn."""

    digest: bytes  # of its body
    turns: asyncio.Future[tuple[SpokenTurn, ...]]  # the answers
    heard: bool = False  # whether an answer was given to a client that was there to read it


class Conversation:
    """number: of the rollout. say: sends a report to the engine's process."""

    def __init__(self, number: int, say: Callable[[Any], None]) -> None:
        self.name = str(number)
        self.key = f"{self.name}-{secrets.token_urlsafe(24)}"
        self._say, self._since = say, time.monotonic()  # since when the agent works, and not the model
        self._history = History()
        self._calls = 0  # tool calls of the model
        self._stop: tuple[str, ...] = ()  # of the pending request
        self._call: PendingCall | None = None
        self.over: str | None = None  # why no further turn is sampled
        self.turns = 0  # turns of the model

    def tell(self, **what: Any) -> None:
        """Send a report, with the seconds of the agent's work before it."""
        self._say({"number": int(self.name), "seconds": time.monotonic() - self._since, **what})

    @property
    def heard(self) -> int:
        """Turns of the model that have reached the agent: maybe not the last one."""
        last = self._call
        return self.turns - (last is not None and last.turns.done() and not last.heard)

    async def ask(self, request: TurnRequest, body: bytes, again: bool) -> PendingCall:
        """The call that a request begins, or joins, if a client sends its request again because the connection was lost
        (again: it says so). Raises RefusedRequest."""
        digest, last = hashlib.sha256(body).digest(), self._call
        if last is not None and last.digest == digest and (again or not last.heard):
            return last
        if self.over is not None:
            raise RefusedRequest(self.over, code="context_length_exceeded")
        if last is not None and not last.turns.done():
            raise RefusedRequest("another request of this conversation has no answer yet; wait for it", code="busy")
        if request.n > 1 or not request.trained:
            raise RefusedRequest("several answers, and answers that are not trained, are not supported yet", 501)
        asked: dict[str, Any] = {"most": request.most, "stop": request.stop}
        if self.turns:
            new = self._history.behind(request)
            asked["messages"] = [for_template(message) for message in new]
        else:
            new, self._history.tools = [*request.messages], request.tools
            asked["opening"] = {"messages": [for_template(m) for m in new], "tools": request.tools}
        self._history.messages += new
        self._stop = request.stop
        self._call = PendingCall(digest, asyncio.get_running_loop().create_future())
        self.tell(**asked)
        return self._call

    async def count(self, request: TurnRequest) -> int:
        """The number of tokens of a request's prompt. Raises RefusedRequest."""
        raise RefusedRequest("the tokens of a prompt are not counted yet", 501)

    def speak(self, text: str, calls: Sequence[tuple[str, Mapping[str, Any]]], numbers: tuple[int, int, bool]) -> None:
        """Answer the waiting request with a turn. text: without the calls; numbers: tokens of the prompt and of the
        turn, and whether a limit has cut it."""
        if self._call is None or self._call.turns.done():
            return
        before, spoken, cut = numbers
        for stop in self._stop:
            text = text.partition(stop)[0]
        reasoning, content = split_reasoning(text)
        made = calls_of(calls, self._calls)
        finish = "length" if cut else "tool_calls" if made else "stop"
        mark = f"{self.turns}-{secrets.token_hex(4)}"
        turn = SpokenTurn(content, reasoning, made, finish, before, spoken, mark)
        self._calls += len(made)
        self.turns += 1
        self._since = time.monotonic()
        self._history.messages.append(turn.message)
        self._call.turns.set_result((turn,))

    def finish(self, why: str) -> None:
        """No further turn is sampled. A request that waits gets this as an error."""
        self.over, self._since = why, time.monotonic()
        if self._call is not None and not self._call.turns.done():
            self._call.turns.set_exception(RefusedRequest(why, code="context_length_exceeded"))
            self._call.turns.exception()  # read, so that asyncio does not report it if nobody waits
            self._call = None


def split_reasoning(text: str) -> tuple[str, str]:
    """The text of a `<think>` block, which the prompt may have begun, and the text behind it."""
    before, end, behind = text.partition("</think>")
    if end:
        return before.strip().removeprefix("<think>").strip(), behind.strip()
    return "", text.strip()
