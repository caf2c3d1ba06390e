"""The answering side: one thread of a process that serves the dock's messages on a Unix and a TCP socket."""

from __future__ import annotations

import asyncio
import functools
import hmac
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from mindspeed_rl_plugin.dock.distributed import frames
from mindspeed_rl_plugin.dock.distributed.conversation import Answer, Conversation, send_all
from mindspeed_rl_plugin.dock.distributed.frames import FrameError, Message, Reader

HANDSHAKE_SECONDS = 20.0
UNADMITTED = 256  # connections that have not shown the secret yet; more are closed at once, and come again
EXHAUSTED_SECONDS = 0.1  # until the next try to accept, where descriptors or memory have run out
START_SECONDS = 30.0


@dataclass(frozen=True)
class Address:
    """Where a service answers: a Unix socket for processes of its `node`, TCP for the others (port 0: none)."""

    node: str
    unix: str
    host: str = ""
    port: int = 0


@dataclass
class Directory:
    """Where everything of a dock answers. warehouses: by number; controllers: by state; hosts: processes that hold a
    part of the dock and may take a controller over, in the order of the job; terms: of controllers that have moved.

    A warehouse that its placement starts anew somewhere else gets a new entry here.
    """

    warehouses: dict[int, Address] = field(default_factory=dict)
    controllers: dict[str, Address] = field(default_factory=dict)
    hosts: list[Address] = field(default_factory=list)
    terms: dict[str, int] = field(default_factory=dict)

    def move(self, state: str, address: Address, term: int) -> bool:
        """Note where a controller is since `term`; False for what is no news."""
        if term <= self.terms.get(state, 0):
            return False
        self.controllers[state], self.terms[state] = address, term
        return True


class Handler(Protocol):
    """What a service serves. Both run in the service's thread only."""

    def handle(self, peer: str, message: Message) -> Answer:
        """Answer one message of the process `peer`, at once or as something to await; None: the sender waits for no
        answer."""

    def gone(self, peer: str) -> None:
        """The last connection of a process ended."""


class Service:
    """Serve `handler` until `close`. secret: what peers must prove to know; node: name of this machine; unix: path of
    the Unix socket; host: address of the job's interface to listen on as well, "" for none; on_end: called in the
    service's thread when it ends.

    refused: connections and messages that were turned away, by reason.
    """

    def __init__(
        self,
        handler: Handler,
        secret: bytes,
        *,
        node: str,
        unix: str,
        host: str = "",
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._handler, self._secret, self._on_end = handler, secret, on_end
        self._node, self._unix, self._host = node, unix, host
        self.refused = {"stranger": 0, "malformed": 0}
        self._peers: dict[str, int] = {}
        self._unadmitted = 0
        self._ready: Future[Address] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="rl-dock", daemon=True)

    def start(self) -> Address:
        """Listen, and say where. Raises OSError where the sockets cannot be made."""
        self._thread.start()
        return self._ready.result(START_SECONDS)

    def submit(self, coroutine: Awaitable[Any]) -> Any:
        """Run a coroutine in the service's thread and wait for its result."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the service's thread, soon."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Stop listening and end the thread. Idempotent."""
        if self._loop is not None and not self._loop.is_closed() and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(START_SECONDS)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            listeners = self._listen()
        except OSError as error:
            self._ready.set_exception(error)
            return
        tasks = [self._loop.create_task(self._accept(listener)) for listener in listeners]
        port = listeners[1].getsockname()[1] if self._host else 0
        self._ready.set_result(Address(self._node, self._unix, self._host, port))
        await self._stop.wait()
        self._on_end()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in listeners:
            listener.close()

    def _listen(self) -> list[socket.socket]:
        path = socket.socket(socket.AF_UNIX)
        path.bind(self._unix)
        os.chmod(self._unix, 0o600)
        found = [path]
        if self._host:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            net = socket.socket(family)
            net.bind((self._host, 0))
            found.append(net)
        for listener in found:
            listener.listen(1024)
            listener.setblocking(False)
        return found

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # of this one connection, or of a process that has too much open
                await asyncio.sleep(EXHAUSTED_SECONDS)
                continue
            if self._unadmitted >= UNADMITTED:
                self.refused["stranger"] += 1
                connection.close()
                continue
            self._unadmitted += 1
            task = loop.create_task(self._attend(connection))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _attend(self, connection: socket.socket) -> None:
        """One connection from its handshake to its end."""
        connection.setblocking(False)
        peer, reader = None, Reader()
        try:
            try:
                tune(connection)
                peer = await asyncio.wait_for(self._admit(connection, reader), HANDSHAKE_SECONDS)
            finally:
                self._unadmitted -= 1
            self._peers[peer] = self._peers.get(peer, 0) + 1
            await Conversation(connection, reader, functools.partial(self._answer, peer)).hold()
        except FrameError:
            self.refused["malformed"] += 1
        except PermissionError:
            self.refused["stranger"] += 1
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError, EOFError):
            pass
        finally:
            connection.close()
            if peer is not None:
                self._peers[peer] -= 1
                if not self._peers[peer]:
                    del self._peers[peer]
                    self._handler.gone(peer)

    async def _admit(self, connection: socket.socket, reader: Reader) -> str:
        """Handshake; returns the name that the other process gives itself."""
        loop = asyncio.get_running_loop()
        nonce = secrets.token_bytes(frames.NONCE)
        await loop.sock_sendall(connection, nonce)
        answer = await receive_exactly(connection, 2 * frames.NONCE)
        theirs, shown = bytes(answer[: frames.NONCE]), bytes(answer[frames.NONCE :])
        if not hmac.compare_digest(shown, frames.proof(self._secret, "client", (nonce, theirs))):
            await loop.sock_sendall(connection, frames.REFUSED)  # the end alone may mean that this process ends
            raise PermissionError("a peer does not know the secret of this job")
        await loop.sock_sendall(connection, frames.proof(self._secret, "server", (theirs, nonce)))
        hello = await receive(connection, reader)
        if hello.kind != "hello" or not isinstance(hello.note.get("name"), str):
            raise FrameError("a connection must begin with hello")
        return hello.note["name"]

    def _answer(self, peer: str, message: Message) -> Answer:
        """The handler's answer, or how it went wrong; a waiting one as something to await."""
        try:
            answer = self._handler.handle(peer, message)
        except (ValueError, TimeoutError, OSError) as error:
            return self._failed(error)
        return answer if answer is None or isinstance(answer, Message) else self._awaited(answer)

    async def _awaited(self, answer: Awaitable[Message | None]) -> Message | None:
        try:
            return await answer
        except (ValueError, TimeoutError, OSError) as error:
            return self._failed(error)

    def _failed(self, error: Exception) -> Message:
        if isinstance(error, FrameError):
            self.refused["malformed"] += 1
        kind = "TimeoutError" if isinstance(error, TimeoutError) else "ValueError"
        return Message("error", {"type": kind, "text": str(error)})


def tune(connection: socket.socket) -> None:
    """No delay for small messages, and notice a dead machine."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def receive(connection: socket.socket, reader: Reader) -> Message:
    """The next message. Raises EOFError at the end of the connection, FrameError for what is no message."""
    while (message := reader.message()) is None:
        await more(connection, reader)
    return message


async def more(connection: socket.socket, reader: Reader) -> None:
    """Some more bytes of a connection. Raises EOFError at its end."""
    if not (room := reader.room()):
        return
    got = await asyncio.get_running_loop().sock_recv_into(connection, room)
    if not got:
        raise EOFError("the connection ended")
    reader.got(got)


async def receive_exactly(connection: socket.socket, nbytes: int) -> bytearray:
    """`nbytes` from a connection. Raises EOFError when it ends before."""
    loop, data = asyncio.get_running_loop(), bytearray(nbytes)
    view, at = memoryview(data), 0
    while at < nbytes:
        got = await loop.sock_recv_into(connection, view[at:])
        if not got:
            raise EOFError("the connection ended")
        at += got
    return data


async def send(connection: socket.socket, message: Message) -> None:
    """Send one message."""
    await send_all(connection, deque(frames.encode(message)))


async def connect(address: Address, secret: bytes, node: str, name: str) -> socket.socket:
    """A connection from inside a service to another one, past the handshake."""
    loop = asyncio.get_running_loop()
    connection, target = endpoint(address, node)
    connection.setblocking(False)
    try:
        await loop.sock_connect(connection, target)
        tune(connection)
        nonce = bytes(await receive_exactly(connection, frames.NONCE))
        mine = secrets.token_bytes(frames.NONCE)
        await loop.sock_sendall(connection, mine + frames.proof(secret, "client", (nonce, mine)))
        shown = bytes(await receive_exactly(connection, frames.NONCE))
        check_server(shown, secret, mine, nonce, address)
        await send(connection, Message("hello", {"name": name}))
    except BaseException:
        connection.close()
        raise
    return connection


def endpoint(address: Address, node: str) -> tuple[socket.socket, Any]:
    """An unconnected socket, and what to connect it to, for a process of `node`."""
    if address.node == node:
        return socket.socket(socket.AF_UNIX), address.unix
    if not address.port:
        raise ConnectionError(f"the dock on {address.node} listens on its own machine only; {node} cannot reach it")
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return socket.socket(family), (address.host, address.port)


def check_server(shown: bytes, secret: bytes, mine: bytes, nonce: bytes, address: Address) -> None:
    """Raise PermissionError unless the other side lets this one in and knows the secret too."""
    if shown == frames.REFUSED:
        raise PermissionError(f"the dock at {address} refuses this process: it is another job's")
    if not hmac.compare_digest(shown, frames.proof(secret, "server", (mine, nonce))):
        raise PermissionError(f"what answers at {address} is not the dock of this job")
