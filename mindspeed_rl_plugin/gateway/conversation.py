"""One agent's conversations with the model: its requests wait here for the turns that the engine samples."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mindspeed_rl_plugin.gateway.agent_messages import (
    AT_A_LIMIT,
    HeldTurn,
    History,
    Match,
    RefusedRequest,
    SpokenTurn,
    TurnRequest,
    calls_of,
    for_template,
    split_reasoning,
)

MOST_COUNTED = 1024  # requests for the number of tokens of a prompt: an agent that only counts does not go on for ever
MOST_REFUSED = 64  # requests beyond a limit; further ones get an error at once


class TurnRewards(dict[int, float]):
    """Rewards by the numbers of turns."""


@dataclass(eq=False)
class PendingCall:
    """A request for turns, or for the number of tokens of its prompt."""

    digest: bytes  # of its body; empty: for this number
    calls: tuple[int, ...]  # numbers of its turns
    request: TurnRequest
    match: Match
    turns: asyncio.Future[Any]  # the `SpokenTurn`s, or this number
    spoken: dict[int, SpokenTurn] = field(default_factory=dict)
    heard: bool = False  # whether an answer was given to a client that was there to read it
    gone: Callable[[], Awaitable[bool]] | None = None  # whether its client does not wait any more


class Conversation:
    """number: of the rollout. say: sends a report to the engine's process."""

    def __init__(self, number: int, say: Callable[[Any], None]) -> None:
        self.name = str(number)
        self.key = f"{self.name}-{secrets.token_urlsafe(24)}"
        self._say, self._since = say, time.monotonic()  # since when the agent works, and not the model
        self._history, self._numbers = History(), itertools.count()
        self._calls: dict[int, PendingCall] = {}  # by the numbers of their turns
        self._refused = self._counted = 0
        self.over: str | None = None  # why no further turn is sampled
        self.limited = False  # whether a request had an error, because the job has reached a limit

    def tell(self, **what: Any) -> None:
        """Send a report, with the seconds of the agent's work before it."""
        waits = any(not call.turns.done() for call in self._calls.values())
        seconds = 0.0 if waits else time.monotonic() - self._since
        self._say({"number": int(self.name), "seconds": seconds, **what})

    @property
    def heard(self) -> list[int]:
        """Numbers of the turns that have reached the agent."""
        return [number for number, call in self._calls.items() if call.heard and call.request.trained]

    def turn_of(self, response: str) -> int | None:
        """Number of the turn of a response that is trained, by its id; None: this conversation has none."""
        spoken = (pair for call in self._calls.values() if call.request.trained for pair in call.spoken.items())
        name = response.replace("_", "-")  # of Chat completions `chatcmpl-...`, else `msg_...` or `resp_...`
        return next((n for n, turn in spoken if name.endswith(f"-{turn.mark}-{self.name}")), None)

    async def ask(self, request: TurnRequest, body: bytes, again: bool) -> PendingCall:
        """The call that a request begins, or joins, if a client sends its request again because the connection was lost
        (again: it says so). Raises RefusedRequest."""
        digest = hashlib.sha256(body).digest()
        same = [call for call in self._calls.values() if call.digest == digest][::-1]
        for call in same:  # each of several equal requests that come again joins another one
            gone = call.gone
            if not call.heard and gone is not None and await gone() and call.gone is gone:
                call.gone = None
                return call
        if again and same:
            return same[0]
        return self._begin(request, digest)

    async def count(self, request: TurnRequest) -> int:
        """Number of tokens of the prompt of a request. Raises RefusedRequest."""
        self._counted += 1
        if self._counted > MOST_COUNTED:
            raise RefusedRequest(f"an agent may count tokens {MOST_COUNTED} times", code=AT_A_LIMIT)
        return await self._begin(request, b"").turns

    # answers of the engine's process

    def speak(
        self,
        number: int,
        text: str,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        numbers: tuple[int, int, bool],
    ) -> None:
        """Take a turn of a waiting request. text: without the calls; numbers: tokens of the prompt and of the turn, and
        whether a limit has cut it."""
        call = self._calls.get(number)
        if call is None or call.turns.done():
            return
        before, spoken, cut = numbers
        for stop in call.request.stop:
            text = text.partition(stop)[0]
        reasoning, content = split_reasoning(text)
        mark = f"{number}-{call.digest.hex()[:8]}"  # not random: agents show it to the model
        made = calls_of(calls, mark)
        finish = "length" if cut else "tool_calls" if made else "stop"
        turn = call.spoken[number] = SpokenTurn(content, reasoning, made, finish, before, spoken, mark)
        if call.request.trained:
            parent = call.match.turn
            self._history.add(HeldTurn(number, parent, tuple(call.match.new), call.request.tools, turn))
        if len(call.spoken) == len(call.calls):
            self._since = time.monotonic()
            call.turns.set_result(tuple(call.spoken[one] for one in call.calls))

    def refuse(self, numbers: Sequence[int], why: str, code: str) -> None:
        """Answer a waiting request with an error."""
        self.limited |= code == AT_A_LIMIT
        self._refused += 1
        if self._refused >= MOST_REFUSED:
            self.over = why
        for number in numbers:
            _fail(self._calls.pop(number), RefusedRequest(why, code=code))
        self._since = time.monotonic()

    def counted(self, number: int, tokens: int) -> None:
        self._calls.pop(number).turns.set_result(tokens)

    def finish(self, why: str) -> None:
        """No further turn is sampled. Requests that wait get this as an error."""
        self.over = why
        for call in self._calls.values():
            _fail(call, RefusedRequest(why, code=AT_A_LIMIT))

    # inside

    def _begin(self, request: TurnRequest, digest: bytes) -> PendingCall:
        numbers = tuple(next(self._numbers) for _ in range(request.n))
        call = PendingCall(digest, numbers, request, self._matched(request), asyncio.get_running_loop().create_future())
        self._tell_request(call)
        call.request = replace(request, messages=())  # which grow with each request
        self._calls |= dict.fromkeys(numbers, call)
        return call

    def _matched(self, request: TurnRequest) -> Match:
        if self.over is not None:
            raise RefusedRequest(self.over, code=AT_A_LIMIT)
        match, held = self._history.match(request), None
        held = match.turn
        while held is not None:  # a turn that comes back has reached the agent
            self._calls[held.call].heard, held = True, held.parent
        return match

    def _tell_request(self, call: PendingCall) -> None:
        match, request = call.match, call.request
        asked = {
            "calls": call.calls,
            "messages": [for_template(message) for message in match.new],
            "parent": match.turn and match.turn.call,
            "tools": request.tools,
            "limits": {"most": request.most, "stop": request.stop},
            "trained": request.trained,
            "only_count": not call.digest,
            "differs": match.differs,
            "why": match.why,
        }
        self.tell(request=asked)


def _fail(call: PendingCall, error: RefusedRequest) -> None:
    if not call.turns.done():
        call.turns.set_exception(error)
        call.turns.exception()  # read, so that asyncio does not report it if nobody waits
