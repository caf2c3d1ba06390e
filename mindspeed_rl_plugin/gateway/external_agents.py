"""`--rl-agent external`: programs that the job did not start take episodes by HTTP, and end them with a reward.

A file of mode 600 in the run's folder, agents-HOST-PORT.json, has the gateway's `url` and the job's `secret`, which is
sent as Authorization: Bearer. `POST /episodes` answers {"id", "row", "base_url", "api_key"}, 204 if there is none for
TAKE_SECONDS, or 410 if the job has ended. `POST /episodes/ID/end` takes {"reward": number}, {"rewards": {id of a
response: number}} or {"failure": text}; an empty object where no reward is graded. The key of an episode opens none of
the two.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mindspeed_rl_plugin.gateway import agent_process
from mindspeed_rl_plugin.gateway.agent_messages import RefusedRequest
from mindspeed_rl_plugin.gateway.command import AgentFailed
from mindspeed_rl_plugin.gateway.conversation import Conversation, TurnRewards
from mindspeed_rl_plugin.gateway.endpoints import bearer, json_response, read_body, read_json

TAKE_SECONDS = 20.0
OFFER_LOOK_SECONDS = 0.1  # between two looks whether there is an episode


class OfferedEpisode(NamedTuple):
    """An episode for a program that the job did not start."""

    conversation: Conversation
    row: Mapping[str, Any]
    over: asyncio.Future[Any]  # its reward, or rewards by turn


class ExternalAgents(agent_process.Agents):
    """The arguments are those of `Agents`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._offers, self._taken = deque[OfferedEpisode](), dict[str, OfferedEpisode]()
        self._ended = False  # whether the job has
        self._secret = secrets.token_urlsafe(32)
        self.gateway.add(
            Route("/episodes", self._take, methods=["POST"]), Route("/episodes/{name}/end", self._end, methods=["POST"])
        )
        name = f"agents-{socket.gethostname()}-{self.gateway.url.rpartition(':')[2]}.json"
        self._file = Path(self._setup.run or ".").absolute() / name
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(self._file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            json.dump({"url": self.gateway.url, "secret": self._secret}, file)
        self._note(f"agents take episodes at {self.gateway.url}/episodes; URL and secret are in {self._file}")

    async def close(self) -> None:
        self._ended = True
        self._file.unlink(missing_ok=True)
        await super().close()

    async def _play(self, row: Mapping[str, Any], conversation: Conversation, episode: str) -> Any:
        offer = OfferedEpisode(conversation, row, asyncio.get_running_loop().create_future())
        self._offers.append(offer)
        try:
            return await offer.over
        finally:
            self._taken.pop(conversation.name, None)
            if offer in self._offers:
                self._offers.remove(offer)

    async def _take(self, request: Request) -> Response:
        self._admit(request)
        end = time.monotonic() + TAKE_SECONDS
        while (gone := await request.is_disconnected()) or not self._offers:
            if self._ended:
                raise RefusedRequest("the job has ended", 410, "not_found")
            if gone or time.monotonic() >= end:
                return Response(status_code=204)
            await asyncio.sleep(OFFER_LOOK_SECONDS)
        offer = self._offers.popleft()
        conversation = offer.conversation
        self._taken[conversation.name] = offer
        conversation.tell(taken=True)
        address = {"base_url": f"{self.gateway.url}/v1", "api_key": conversation.key}
        return json_response({"id": conversation.name, "row": offer.row, **address})

    async def _end(self, request: Request) -> Response:
        self._admit(request)
        body = read_json(await read_body(request) or b"{}")
        if (offer := self._taken.get(name := request.path_params["name"])) is None or offer.over.done():
            raise RefusedRequest(f"there is no running episode {name:.40}; it has ended, or was late", 404, "not_found")
        known = ("reward", "rewards", "failure")
        if not isinstance(body, dict) or len(body) > 1 or set(body) - set(known):
            raise RefusedRequest(f"the body must be a JSON object with one of {', '.join(known)}")
        if not body and self._setup.rewarded and not offer.conversation.limited:
            raise RefusedRequest("give `reward`: --rl-reward has the grader environment, which grades by it")
        if "failure" in body:
            offer.over.set_exception(AgentFailed(f"failed: {body['failure']!s:.2000}"))
        elif "rewards" in body:
            offer.over.set_result(_by_turn(offer.conversation, body["rewards"]))
        else:
            offer.over.set_result(_number(body["reward"]) if "reward" in body else None)
        return json_response({"heard": len(offer.conversation.heard)})

    def _admit(self, request: Request) -> None:
        if not hmac.compare_digest(self._secret.encode(), bearer(request).encode()):
            raise RefusedRequest(f"this is not the secret of {self._file.name}", 401, "invalid_api_key")


def _by_turn(conversation: Conversation, rewards: Any) -> TurnRewards:
    """Rewards by number of the turn. rewards: by id of a response."""
    if not isinstance(rewards, dict) or not rewards:
        raise RefusedRequest("`rewards` must be a JSON object {id of a response: number}")
    turns = {name: conversation.turn_of(name) for name in rewards}
    if unknown := [name for name, turn in turns.items() if turn is None]:
        raise RefusedRequest(f"no response of this episode has the id {unknown[0]!r:.60}")
    return TurnRewards({turns[name]: _number(value) for name, value in rewards.items()})


def _number(value: Any) -> float:
    try:
        assert not isinstance(value, (bool, str))
        return float(value)
    except (AssertionError, TypeError, OverflowError):
        raise RefusedRequest(f"a reward is {value!r:.40}; give a number") from None


main = partial(agent_process.main, kind=ExternalAgents)
