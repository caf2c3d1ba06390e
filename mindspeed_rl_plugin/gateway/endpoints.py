"""The HTTP endpoints of agents. A key opens the conversation of one agent, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from mindspeed_rl_plugin.gateway.agent_messages import JobSampling, RefusedRequest, TurnRequest, parsed
from mindspeed_rl_plugin.gateway.api_parts import MODEL_NAMES, AgentApi, Answers
from mindspeed_rl_plugin.gateway.chat_api import CHAT_API
from mindspeed_rl_plugin.gateway.conversation import Conversation, PendingCall
from mindspeed_rl_plugin.gateway.messages_api import MESSAGES_API
from mindspeed_rl_plugin.gateway.responses_api import RESPONSES_API

APIS = {"/v1/chat/completions": CHAT_API, "/v1/messages": MESSAGES_API, "/v1/responses": RESPONSES_API}
MAX_BODY_BYTES = 32 << 20
READ_SECONDS = 60.0  # for the head of a request to arrive, and again for its body
MAX_CONNECTIONS = 4096  # or half of the files that the process may open
CONNECTION_SECONDS = 60  # of a connection, before it is closed
KEEPALIVE_SECONDS = 15.0  # between two signs of life in a stream whose turn is not sampled yet
SHUT_SECONDS = 2.0
CLIENT_LOOK_SECONDS = 0.5  # between two looks whether a client still waits


class HastyProtocol(H11Protocol):
    """HTTP with an end to heads that do not end: the size is h11's, and the time READ_SECONDS, at most twice."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        # asyncio does it only for sockets with a protocol's number; without it each answer takes 40 ms more.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.loop.call_later(READ_SECONDS, self._look, None)

    def _look(self, before: Any) -> None:
        """before: the request at the last look."""
        if self.transport.is_closing():
            return
        if self.cycle is before and (before is None or before.response_complete):
            self.transport.close()
        else:
            self.loop.call_later(READ_SECONDS, self._look, self.cycle)


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
            *(Route(path, partial(self._turn, dialect), methods=["POST"]) for path, dialect in APIS.items()),
            Route("/v1/messages/count_tokens", self._count, methods=["POST"]),
            Route("/v1/models", self._models),
        ]
        trusted = Middleware(TrustedHostMiddleware, allowed_hosts=[host, "localhost"], www_redirect=False)
        handlers = {RefusedRequest: _refused, 404: _unknown, 405: _unknown}
        app = self._app = Starlette(routes=routes, middleware=[trusted], exception_handlers=handlers)
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 2)
        # Clients drop idle connections after 5 s; where a server does it at the same time, requests are lost.
        how = {
            "timeout_keep_alive": CONNECTION_SECONDS,
            "http": HastyProtocol,
            "ws": "none",
            "lifespan": "off",
            "log_level": "error",
            "access_log": False,
        }
        self._server = uvicorn.Server(uvicorn.Config(app, limit_concurrency=most, **how))
        self._server.capture_signals = contextlib.nullcontext  # the process has handlers of its own

    def add(self, *routes: Route) -> None:
        self._app.routes.extend(routes)

    async def serve(self) -> None:
        await self._server.serve(sockets=[self._socket])

    async def shut(self, serving: asyncio.Task) -> None:
        """End `serve`, the task `serving`, when the requests have their answers, or after SHUT_SECONDS."""
        self._server.should_exit = True
        await asyncio.wait([serving], timeout=SHUT_SECONDS)
        serving.cancel()

    def open(self, conversation: Conversation) -> None:
        self._conversations[conversation.name] = conversation

    def close(self, conversation: Conversation) -> None:
        """From now on the key opens nothing."""
        self._conversations.pop(conversation.name, None)

    # endpoints

    async def _models(self, request: Request) -> Response:
        self._known(request)
        model = {"object": "model", "created": 0, "owned_by": "job"}
        return json_response({"object": "list", "data": [{"id": name, **model} for name in MODEL_NAMES]})

    async def _count(self, request: Request) -> Response:
        conversation = self._known(request)
        _, _, asked = await self._read(MESSAGES_API, request)
        return json_response({"input_tokens": await conversation.count(asked)})

    async def _turn(self, dialect: AgentApi, request: Request) -> Response:
        conversation = self._known(request)
        raw, body, asked = await self._read(dialect, request)
        again = request.headers.get("x-stainless-retry-count", "0") != "0"
        call = await conversation.ask(asked, raw, again)
        answers = partial(Answers, body=body, created=int(time.time()), conversation=conversation.name)
        call.gone = request.is_disconnected
        if body.get("stream"):
            return StreamingResponse(_stream(dialect, call, answers), media_type="text/event-stream")
        while not call.turns.done() and not await request.is_disconnected():
            await asyncio.wait([call.turns], timeout=CLIENT_LOOK_SECONDS)
        if await request.is_disconnected():  # the turn is kept for the same request, sent again
            return Response(status_code=499)
        turns, call.heard = call.turns.result(), True
        return json_response(dialect.answer(answers(turns)))

    async def _read(self, dialect: AgentApi, request: Request) -> tuple[bytes, Any, TurnRequest]:
        """The body, as bytes and as JSON, and what it asks for. Raises RefusedRequest."""
        raw = await read_body(request)
        body = read_json(raw)
        asked = dialect.read(body, self._sampling)
        for note in asked.notes:
            self._note(note)
        return raw, body, asked

    def _known(self, request: Request) -> Conversation:
        """The conversation that the request's key opens."""
        for key in (request.headers.get("x-api-key", ""), bearer(request)):
            conversation = self._conversations.get(key.partition("-")[0])
            if conversation is not None and hmac.compare_digest(conversation.key.encode(), key.encode()):
                return conversation
        raise RefusedRequest("this key opens no conversation; it ends with its agent", 401, "invalid_api_key")


def bearer(request: Request) -> str:
    """The token of the header Authorization, or an empty text."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def _stream(dialect: AgentApi, call: PendingCall, answers: Callable[..., Answers]) -> AsyncIterator[str]:
    """The events of turns, and signs of life while they are sampled."""
    while not call.turns.done():
        await asyncio.wait([call.turns], timeout=KEEPALIVE_SECONDS)
        if not call.turns.done():
            yield dialect.waiting
    try:
        *events, last = dialect.events(answers(call.turns.result()))
    except RefusedRequest as refused:
        for event in dialect.error_events(refused):
            yield event
        return
    for event in events:
        yield event
    call.heard = True  # if the client has gone, this generator was closed before
    yield last


async def read_body(request: Request) -> bytes:
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


def read_json(raw: bytes) -> Any:
    try:
        return parsed(raw)
    except ValueError as error:
        raise RefusedRequest(f"the body is no JSON that is read here: {error}") from None


def json_response(value: Any, status: int = 200) -> Response:
    """In ASCII, because texts may have halves of characters, which are no UTF-8."""
    return Response(json.dumps(value), status, media_type="application/json")


async def _refused(request: Request, refused: Exception) -> Response:
    assert isinstance(refused, RefusedRequest)
    dialect = next((dialect for path, dialect in APIS.items() if request.url.path.startswith(path)), CHAT_API)
    return json_response(dialect.error(refused), refused.status)


async def _unknown(request: Request, _: Exception) -> Response:
    why = (
        f"there is no {request.method} {request.url.path:.80}; this gateway has POST {', '.join(APIS)}; the base URL "
        "of OpenAI's clients ends with /v1, that of Anthropic's is the same without /v1"
    )
    return await _refused(request, RefusedRequest(why, 404, "not_found"))
