"""The HTTP endpoints of agents. A key opens the conversation of one agent, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mindspeed_rl_plugin.gateway import chat_api
from mindspeed_rl_plugin.gateway.agent_messages import JobSampling, RefusedRequest, SpokenTurn, parsed
from mindspeed_rl_plugin.gateway.conversation import Conversation, PendingCall

POLICY_NAME = "policy"  # the name under which the model is listed; a request may give any other
MAX_BODY_BYTES = 32 << 20
READ_SECONDS = 60.0  # for a request to arrive, once its head has
MAX_CONNECTIONS = 4096
KEEPALIVE_SECONDS = 15.0  # between two comments in a stream whose turn is not sampled yet
CLIENT_LOOK_SECONDS = 0.5  # between two looks whether a client still waits


class Gateway:
    """Endpoints for the conversations of one process.

    host: address of the listener; sampling: of the job; note: takes lines for the user.
    """

    def __init__(self, host: str, listener: socket.socket, sampling: JobSampling, note: Callable[[str], None]) -> None:
        self._sampling, self._note = sampling, note
        self._conversations: dict[str, Conversation] = {}  # by name
        self._socket = listener
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models),
        ]
        trusted = Middleware(TrustedHostMiddleware, allowed_hosts=[host, "localhost"], www_redirect=False)
        handlers = {RefusedRequest: _refused, 404: _unknown}
        app = Starlette(routes=routes, middleware=[trusted], exception_handlers=handlers)
        config = uvicorn.Config(
            app, log_level="error", access_log=False, lifespan="off", ws="none", limit_concurrency=MAX_CONNECTIONS
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # the process has handlers of its own

    async def serve(self) -> None:
        await self._server.serve(sockets=[self._socket])

    def open(self, conversation: Conversation) -> None:
        self._conversations[conversation.name] = conversation

    def close(self, conversation: Conversation) -> None:
        """From now on the key opens nothing."""
        self._conversations.pop(conversation.name, None)

    # endpoints

    async def _models(self, request: Request) -> Response:
        self._known(request)
        return JSONResponse({"object": "list", "data": [{"id": POLICY_NAME, "object": "model", "owned_by": "job"}]})

    async def _chat(self, request: Request) -> Response:
        conversation = self._known(request)
        raw = await _body(request)
        body = _json(raw)
        asked = chat_api.read(body, self._sampling)
        for note in asked.notes:
            self._note(note)
        again = request.headers.get("x-stainless-retry-count", "0") != "0"
        call = await conversation.ask(asked, raw, again)
        made = (
            f"chatcmpl-{conversation.name}-{conversation.turns}",
            body.get("model") or POLICY_NAME,
            int(time.time()),
        )
        if body.get("stream"):
            usage = isinstance(options := body.get("stream_options"), dict) and bool(options.get("include_usage"))
            events = _stream(call, lambda turn: chat_api.events(turn, *made, usage))
            return StreamingResponse(events, media_type="text/event-stream")
        while not call.turns.done() and not await request.is_disconnected():
            await asyncio.wait([call.turns], timeout=CLIENT_LOOK_SECONDS)
        if await request.is_disconnected():  # the turn is kept for the same request, sent again
            return Response(status_code=499)
        (turn, *_), call.heard = call.turns.result(), True
        return JSONResponse(chat_api.answer(turn, *made))

    def _known(self, request: Request) -> Conversation:
        """The conversation that the request's key opens."""
        key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        conversation = self._conversations.get(key.partition("-")[0])
        if conversation is None or not hmac.compare_digest(conversation.key.encode(), key.encode()):
            raise RefusedRequest("this key opens no conversation; it ends with its agent", 401, "invalid_api_key")
        return conversation


async def _stream(call: PendingCall, form: Callable[[SpokenTurn], Iterable[str]]) -> AsyncIterator[str]:
    """The events of a turn; comments while it is sampled, so that no client takes the connection for dead."""
    while not call.turns.done():
        await asyncio.wait([call.turns], timeout=KEEPALIVE_SECONDS)
        if not call.turns.done():
            yield ": the turn is not sampled yet\n\n"
    try:
        *events, last = form(call.turns.result()[0])
    except RefusedRequest as refused:
        yield chat_api.error_event(refused)
        return
    for event in events:
        yield event
    call.heard = True  # if the client has gone, this generator was closed before
    yield last


async def _body(request: Request) -> bytes:
    """The body. Raises RefusedRequest if it is too long, or does not come."""
    body = bytearray()

    async def collect() -> None:
        async for part in request.stream():
            body.extend(part)
            if len(body) > MAX_BODY_BYTES:
                raise RefusedRequest(f"the body is longer than {MAX_BODY_BYTES} bytes", 413, "too_large")

    try:
        await asyncio.wait_for(collect(), READ_SECONDS)
    except asyncio.TimeoutError:
        raise RefusedRequest(f"the body did not arrive within {READ_SECONDS:g} s", 408, "timeout") from None
    return bytes(body)


def _json(raw: bytes) -> Any:
    try:
        return parsed(raw)
    except ValueError as error:
        raise RefusedRequest(f"the body is no JSON that is read here: {error}") from None


async def _refused(request: Request, refused: Exception) -> Response:
    assert isinstance(refused, RefusedRequest)
    return JSONResponse(chat_api.error(refused), status_code=refused.status)


async def _unknown(request: Request, _: Exception) -> Response:
    why = f"there is no {request.method} {request.url.path:.80}; this gateway has POST /v1/chat/completions"
    return await _refused(request, RefusedRequest(why, 404, "not_found"))
