"""The answering side: one thread of a process that serves its `Core` on a Unix and a TCP socket.

A request costs one wake-up, one read and one write. The process's own requests are direct calls; all calls, and all
that is sent, happen under one lock. A dock of one process has no thread until somebody outside is invited.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mindspeed_rl_plugin.dock.core import Answer, Core
from mindspeed_rl_plugin.dock.rpc import ERRORS, NONCE, REFUSED, connect, proof, tune
from mindspeed_rl_plugin.dock.watch import Watch
from mindspeed_rl_plugin.dock.wire import (
    Address,
    Bye,
    Failed,
    FrameError,
    Hello,
    Message,
    Ping,
    Reader,
    Record,
    Stopped,
    frame,
)

HANDSHAKE_SECONDS = 20.0
UNADMITTED = 256  # connections that have not shown the secret yet; more are closed at once
EXHAUSTED_SECONDS = 0.1  # until the next try to accept, where descriptors or memory have run out
GATHERED = 256  # buffers of one system call
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Connection:
    """One connection of a server. rank, watched: as its hello said; peer: name, "" before it is admitted."""

    def __init__(self, server: Server, connection: socket.socket, peer: str = "", rank: int = -1) -> None:
        connection.setblocking(False)
        self.peer, self.rank, self.watched = peer, rank, bool(peer)
        self.admitted, self.heard = bool(peer), time.monotonic()
        self.socket, self._server = connection, server
        self._reader, self._left, self._busy = Reader(), deque[Any](), False
        self._nonce, self._shown = secrets.token_bytes(NONCE), b""
        if not peer:
            self._put([self._nonce])

    def ready(self, events: int) -> None:
        """The socket can be read or written. In the server's thread."""
        if events & WRITE:
            self.flush()
            if not self._left:
                self._server.selector.modify(self.socket, READ, self)
        if not events & READ:
            return
        try:
            if not (self._receive() if self.admitted else self._admit()):
                self._server.ended(self)
        except (BlockingIOError, InterruptedError):
            return
        except FrameError:
            self._server.core.refused["malformed"] += 1
            self._server.ended(self)
        except PermissionError:
            self._server.core.refused["stranger"] += 1
            self.flush()
            self._server.ended(self)
        except OSError:
            self._server.ended(self)

    def send(self, message: Message, bulk: Sequence[Any] = ()) -> None:
        """Now what the socket takes, the rest when it can. With the server's lock held, in any thread."""
        try:
            self._put(frame(message, bulk))
        except FrameError as error:
            self._put(frame(Failed("ValueError", str(error))))

    def answer(self, answer: Answer) -> None:
        """What a request waited for."""
        self._busy = False
        self.send(*answer)
        if self._reader.pending:
            self._server.continued(self)

    def proceed(self) -> None:
        """Serve what has come, one message after the other."""
        while not self._busy and (found := self._reader.message()) is not None:
            self._serve(*found)

    def flush(self) -> None:
        """Send what the socket takes."""
        with contextlib.suppress(OSError):  # the end shows when it is read
            while self._left:
                first = [self._left[i] for i in range(min(len(self._left), GATHERED))]
                sent = self.socket.sendmsg(first)
                while self._left and sent >= len(self._left[0]):
                    sent -= len(self._left.popleft())
                if sent:
                    self._left[0] = memoryview(self._left[0])[sent:]

    def _put(self, buffers: Sequence[Any]) -> None:
        waits = bool(self._left)
        self._left.extend(buffers)
        if not waits:
            self.flush()
        if self._left:
            self._server.blocked(self)

    def _receive(self) -> bool:
        space = self._reader.space()
        if not space:  # a whole message waits for the answer to the one before
            self._server.selector.unregister(self.socket)
            return True
        got = self.socket.recv_into(space)
        self._reader.got(got)
        self.heard = time.monotonic()
        if got:
            self.proceed()
        return bool(got)

    def _admit(self) -> bool:
        """The client's part of the handshake. Raises PermissionError where it does not know the secret."""
        got = self.socket.recv(2 * NONCE - len(self._shown))
        self._shown += got
        if len(self._shown) < 2 * NONCE:
            return bool(got)
        theirs, shown, secret = self._shown[:NONCE], self._shown[NONCE:], self._server.secret
        if not hmac.compare_digest(shown, proof(secret, "client", (self._nonce, theirs))):
            self._put([REFUSED])
            raise PermissionError("a peer does not know the secret of this job")
        self.admitted = True
        self._put([proof(secret, "server", (theirs, self._nonce))])
        return True

    def _serve(self, message: Message, bulk: np.ndarray | None) -> None:
        server = self._server
        if not self.peer:
            if not isinstance(message, Hello) or not message.name:
                raise FrameError("a connection must begin with hello")
            self.peer, self.rank, self.watched = message.name, message.rank, message.watch
            server.met(self)
        elif isinstance(message, Bye):
            server.leaves(self)
        elif isinstance(message, Stopped) and server.watch is not None:
            server.watch.stop(message.rank, message.why)
        elif isinstance(message, Record):
            server.core.handle(self.peer, message, None, self.answer)
        elif not isinstance(message, Ping):
            answer = server.core.handle(self.peer, message, bulk, self.answer)
            if answer is None:
                self._busy = True
            else:
                self.send(*answer)


class Server:
    """Serves `core` to this process, and after `start` to others. node: name of this machine; secret: what others must
    prove to know; watch: of the rank that this process is, None outside of a job."""

    def __init__(self, core: Core, node: str, secret: bytes, watch: Watch | None = None, rank: int = 0) -> None:
        self.core, self.node, self.secret, self.watch, self.rank = core, node, secret, watch, rank
        self.selector = selectors.DefaultSelector()
        self.address: Address | None = None
        self._lock = threading.RLock()
        self._connections: set[Connection] = set()
        self._listeners: dict[int, socket.socket] = {}
        self._todo: deque[Any] = deque()  # for the server's thread
        self._wakes, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._stop = False

    # this process's own requests

    def call(self, peer: str, message: Message, bulk: np.ndarray | None = None) -> Answer:
        """Serve a request of this process: its answer and bulk. Raises what its answer says."""
        box: list[Answer] = []
        done = threading.Event()

        def later(answer: Answer) -> None:
            box.append(answer)
            done.set()

        with self._lock:
            answer = self.core.handle(peer, message, bulk, later)
        while answer is None and not box:
            with self._lock:
                pause = self.core.pause()
            if not done.wait(pause):
                with self._lock:
                    self.core.tick()
        answer = answer or box[0]
        if isinstance(answer[0], Failed):
            raise ERRORS.get(answer[0].kind, ValueError)(answer[0].text)
        return answer

    # other processes

    def start(self, host: str = "") -> Address:
        """Listen, on the address of a network interface too where one is given; where. Raises OSError where the
        sockets cannot be made."""
        with self._lock:
            if self.address is None:
                self.address = Address(self.node, f"rl-dock-{secrets.token_hex(16)}", rank=self.rank)
                self._listen(socket.AF_UNIX, "\0" + self.address.unix)
            if host and not self.address.port:
                port = self._listen(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, 0)).getsockname()[1]
                self.address = self.address._replace(host=host, port=port)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rl-dock", daemon=True)
            self._thread.start()
        self._wake()
        return self.address

    def link(self, address: Address) -> Connection:
        """A connection to another rank's server that stands as long as both."""
        hello = Hello(f"rank {self.rank}", self.rank, watch=True)
        made = Connection(self, connect(address, self.secret, self.node, hello), f"rank {address.rank}", address.rank)
        with self._lock:
            self._connections.add(made)
            self.met(made)
            self._later(self.selector.register, made.socket, READ, made)
        return made

    def tell(self, links: Iterable[Connection], record: Record) -> None:
        """Send a record. With the lock held."""
        for link in links:
            link.send(record)

    def close(self) -> None:
        """Say that this process leaves, stop listening and end the thread. Idempotent."""
        with self._lock:
            for connection in self._connections:
                if connection.peer:
                    connection.send(Bye())
            self._stop = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._wake()
            self._thread.join(HANDSHAKE_SECONDS)
        for one in (*self._listeners.values(), *(c.socket for c in self._connections), self._wakes, self._woken):
            one.close()
        self.selector.close()

    # what connections say; with the lock held

    def met(self, connection: Connection) -> None:
        """A connection has said who it is."""
        if connection.watched and self.watch is not None:
            self.watch.add(connection)

    def leaves(self, connection: Connection) -> None:
        """Its other side leaves in order."""
        if self.watch is not None:
            self.watch.remove(connection)

    def blocked(self, connection: Connection) -> None:
        """It has more to send than its socket takes."""
        self._later(self._register, connection, READ | WRITE)

    def continued(self, connection: Connection) -> None:
        """A request of it that waited is answered."""
        self._later(self._go_on, connection)

    def ended(self, connection: Connection) -> None:
        """It is over. In the server's thread."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(connection.socket)
        connection.socket.close()
        self.core.cancel(connection.answer)
        if connection.watched and self.watch is not None:
            self.watch.broke(connection)
            self.watch.remove(connection)
        if connection.peer and connection.rank < 0 and not any(c.peer == connection.peer for c in self._connections):
            self.core.gone(connection.peer)

    # the thread

    def _listen(self, family: int, where: Any) -> socket.socket:
        listener = socket.socket(family)
        listener.bind(where)
        listener.listen(1024)
        listener.setblocking(False)
        self._listeners[family] = listener
        self._later(self.selector.register, listener, READ, listener)
        return listener

    def _run(self) -> None:
        self.selector.register(self._woken, READ, None)
        ticks = self.watch.pause() if self.watch is not None else 1.0
        due = 0.0
        while not self._stop:
            with self._lock:
                while self._todo:
                    what, *arguments = self._todo.popleft()
                    what(*arguments)
                timeout = min(max(due - time.monotonic(), 0.0), self.core.pause())
            found = self.selector.select(timeout)
            with self._lock:
                for key, events in found:
                    self._happened(key, events)
                if found and time.monotonic() < due:
                    continue
                due = time.monotonic() + min(ticks, 1.0)
                self._expire()
                self.core.tick()
                if self.watch is not None:
                    self.watch.tick()

    def _happened(self, key: selectors.SelectorKey, events: int) -> None:
        if isinstance(key.data, Connection):
            if key.data in self._connections:
                key.data.ready(events)
        elif key.data is None:
            self._woken.recv(1 << 16)
        else:
            self._accept(key.data)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # of this one connection, or of a process that has too much open
            time.sleep(EXHAUSTED_SECONDS)
            return
        strangers = sum(not c.peer for c in self._connections)
        if strangers >= UNADMITTED or not _of_this_user(connection):
            self.core.refused["stranger"] += 1
            connection.close()
            return
        tune(connection)
        made = Connection(self, connection)
        self._connections.add(made)
        self.selector.register(connection, READ, made)

    def _expire(self) -> None:
        """End connections that take too long to say who they are."""
        now = time.monotonic()
        for connection in [c for c in self._connections if not c.peer and now > c.heard + HANDSHAKE_SECONDS]:
            self.ended(connection)

    def _register(self, connection: Connection, events: int) -> None:
        if connection not in self._connections:
            return
        try:
            self.selector.modify(connection.socket, events, connection)
        except KeyError:
            self.selector.register(connection.socket, events, connection)

    def _go_on(self, connection: Connection) -> None:
        """Serve what came while a request waited."""
        if connection in self._connections:
            self._register(connection, READ)
            try:
                connection.proceed()
            except FrameError:
                self.core.refused["malformed"] += 1
                self.ended(connection)

    def _later(self, what: Any, *arguments: Any) -> None:
        self._todo.append((what, *arguments))
        if threading.current_thread() is not self._thread:
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wakes.send(b"x")


def _of_this_user(connection: socket.socket) -> bool:
    """Whether a Unix connection comes from a process of this user; the secret is asked for in any case."""
    if connection.family != socket.AF_UNIX:
        return True
    shown = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", shown)[1] in (os.getuid(), 0)
