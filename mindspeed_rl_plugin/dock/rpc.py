"""Connections between the processes of a dock: handshake, messages followed by bulk, blocking requests.

    magic "MSTD" | version | 3 zero bytes | head bytes (uint32) | bulk bytes (uint64) | head | bulk

The head is a message. Cells are sent as bulk; neither side copies bulk of 64 KiB or more. Processes of one machine use
abstract Unix sockets, which have no file and accept only processes of the same user or root; processes of different
machines use TCP. Both sides prove that they know the job's secret before anything else is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mindspeed_rl_plugin.dock.messages import Address, Bye, FrameError, Hello, Message, Stopped, pack, unpack
from mindspeed_rl_plugin.status.status_file import doing

MAGIC, FRAME_VERSION = b"MSTD", 10
FRAME_PREFIX = struct.Struct("<4sB3xIQ")
MAX_HEAD = 256 << 20  # bytes
MAX_BULK = 1 << 40  # bytes
JOIN = 64 << 10  # bytes; smaller buffers are copied together, since a system call costs more than the copy
NONCE = 32  # bytes
REFUSED = bytes(NONCE)  # sent by a server instead of its proof: the client does not know the secret
CONNECT_SECONDS = 20.0
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # seconds, seconds, number of probes
REPLY_TIMEOUT = 120.0  # seconds for an answer in addition to the request's deadline; enough for a busy machine
ALIVE_SECONDS = 10.0  # seconds of silence after which `ask` checks whether the other side lives


class Process(NamedTuple):
    """A process of the dock."""

    name: str  # unique in the job
    rank: int  # of the job; -1: outside of the job
    node: str  # its machine
    secret: bytes  # of the job


class Silent(ConnectionError):
    """A connection was not made in time: the other side may hang."""


class Lost(ConnectionError):
    """A connection broke, and the other side had not sent `Bye` or `Stopped`."""


class Closed(ConnectionError):
    """The other side has left without an error."""


class Oversized(ValueError):
    """A message with more bytes of cells than its sender may put into one message."""


class Stream:
    """Messages over a connected socket; several threads may send."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._sending = threading.Lock()
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(connection)

    def send(self, message: Message, bulk: Sequence[Any] = ()) -> None:
        """Send a message and its bulk. Raises FrameError above the limits."""
        buffers = frame(message, bulk)
        with self._sending:
            for buffer in buffers:
                self.socket.sendall(buffer)

    def receive(self, most: int = MAX_BULK) -> tuple[Message, np.ndarray | None]:
        """The next message and its bulk, `[bytes]` uint8. Raises EOFError at the end of the connection, FrameError for
        data that is not a message, and Oversized (the message is skipped) for a bulk of more than `most` bytes."""
        magic, version, head, bulk = FRAME_PREFIX.unpack(self.exactly(FRAME_PREFIX.size))
        if magic != MAGIC or version != FRAME_VERSION or head > MAX_HEAD or bulk > MAX_BULK:
            raise FrameError(f"not a message within limits: {magic!r}, version {version}, {head} + {bulk} bytes")
        message, out = unpack(self.exactly(head)), np.empty(JOIN if bulk > most else bulk, np.uint8)
        if bulk > most:
            for left in range(bulk, 0, -JOIN):
                self._fill(memoryview(out)[:left])
            kind = type(message).__name__.lower()
            raise Oversized(f"{kind}: {bulk} bytes of cells at once, the limit is {most}; give fewer rows at a time")
        self._fill(memoryview(out))
        return message, out if bulk else None

    def exactly(self, nbytes: int) -> bytearray:
        """The next `nbytes` bytes. Raises EOFError if the connection ends earlier."""
        data = bytearray(nbytes)
        self._fill(memoryview(data))
        return data

    def ready(self, seconds: float) -> bool:
        """Whether data arrives or the connection ends within `seconds`."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(1000 * max(seconds, 0.0)))

    def ended(self) -> bool:
        """Whether the other side has closed the connection; False while data waits to be read."""
        try:
            return self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def leave(self, last: Message) -> None:
        """Try to send the `last` message (`Bye` or `Stopped`), then close."""
        sending = self._sending.acquire(timeout=1.0)
        if sending:
            with contextlib.suppress(OSError):
                self.socket.send(frame(last)[0], socket.MSG_DONTWAIT)
        self.close()
        if sending:
            self._sending.release()

    def close(self) -> None:
        """End the connection, also for a thread that waits for its data. Idempotent."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _fill(self, view: memoryview) -> None:
        while len(view):
            got = self.socket.recv_into(view)
            if not got:
                raise EOFError("the connection ended")
            view = view[got:]


def frame(message: Message, bulk: Sequence[Any] = ()) -> list[Any]:
    """Buffers to send, in order; a single one if the bulk is small. Raises FrameError above the limits."""
    head, total = pack(message), sum(len(piece) for piece in bulk)
    if len(head) > MAX_HEAD or total > MAX_BULK:
        raise FrameError(
            f"{type(message).__name__} has a head of {len(head)} bytes (limit {MAX_HEAD}) and {total} bytes of cells "
            f"(limit {MAX_BULK}); send fewer rows at a time"
        )
    start = FRAME_PREFIX.pack(MAGIC, FRAME_VERSION, len(head), total)
    if total < JOIN:
        return [b"".join((start, head, *bulk))]
    return [start + head, *(memoryview(piece) for piece in bulk if len(piece))]


def keep_alive(connection: socket.socket) -> None:
    """Let KEEPALIVE end the connection to a machine that has lost power or its network."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    """The proof of a side ("client" or "server") that it knows the secret."""
    return hmac.new(secret, side + nonces, hashlib.sha256).digest()


def connect(address: Address, me: Process, *, watch: bool = False, patience: float = CONNECT_SECONDS) -> Stream:
    """A connection after its handshake. patience: seconds for each step, at most CONNECT_SECONDS. Raises
    ConnectionError if no process answers, PermissionError if the process belongs to another job."""
    unix, secret = address.node == me.node, me.secret
    if not unix and not address.port:
        raise ConnectionError(f"the dock on {address.node} listens on its own machine only; {me.node} cannot reach it")
    family = socket.AF_UNIX if unix else socket.AF_INET6 if ":" in address.host else socket.AF_INET
    stream = Stream(socket.socket(family))
    try:
        stream.socket.settimeout(min(patience, CONNECT_SECONDS))
        stream.socket.connect("\0" + address.unix if unix else (address.host, address.port))
        theirs, mine = bytes(stream.exactly(NONCE)), secrets.token_bytes(NONCE)
        stream.socket.sendall(mine + proof(secret, b"client", theirs + mine))
        shown = bytes(stream.exactly(NONCE))
        if not hmac.compare_digest(shown, proof(secret, b"server", mine + theirs)):
            what = "refuses this process: its secret is wrong" if shown == REFUSED else "has another secret"
            raise PermissionError(f"the job at {address} {what}")
        stream.send(Hello(me.name, me.rank, watch, me.node))
        stream.socket.settimeout(None)
        return stream
    except (EOFError, OSError) as error:
        stream.close()
        if isinstance(error, PermissionError):
            raise
        kind = Silent if isinstance(error, TimeoutError) else ConnectionError
        raise kind(f"no job answers at {address}: {error}") from error


def admit(connection: socket.socket, secret: bytes) -> tuple[Stream, Hello]:
    """The server's part of the handshake. Raises PermissionError if the other process belongs to another user (except
    root), or does not know the secret; EOFError, OSError or FrameError if the handshake breaks."""
    stream = Stream(connection)
    if connection.family == socket.AF_UNIX:
        shown = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", shown)[1] not in (os.getuid(), 0):
            raise PermissionError("a process of another user")
    connection.settimeout(CONNECT_SECONDS)
    mine = secrets.token_bytes(NONCE)
    connection.sendall(mine)
    answer = bytes(stream.exactly(2 * NONCE))
    theirs = answer[:NONCE]
    if not hmac.compare_digest(answer[NONCE:], proof(secret, b"client", mine + theirs)):
        connection.sendall(REFUSED)  # a closed connection could also mean that this process ends
        raise PermissionError("a process that does not know the secret")
    connection.sendall(proof(secret, b"server", theirs + mine))
    hello, _ = stream.receive()
    if not isinstance(hello, Hello) or not hello.name:
        raise FrameError("a connection must begin with hello")
    connection.settimeout(None)
    return stream, hello


def ask(
    stream: Stream,
    address: Address,
    message: Message,
    bulk: np.ndarray | None = None,
    patience: float = REPLY_TIMEOUT,
    alive: Callable[[], object] | None = None,
) -> tuple[Message, np.ndarray | None]:
    """Send a request and wait for its answer and bulk. patience: most seconds of silence, in addition to the request's
    deadline; alive: called every ALIVE_SECONDS without an answer, raises if no answer can come any more.

    Raises TimeoutError if no answer comes, `Closed` if the other side left, `Lost` if the connection broke,
    and ConnectionError if the other side stops. Do not use the stream after an error: a late answer may come.
    """
    kind, begin = type(message).__name__, time.monotonic()
    end = begin + getattr(message, "deadline", 0.0) + patience
    stream.socket.settimeout(end - begin)
    try:
        with doing(f"the answer to {kind}", f"rank {address.rank}" if address.rank >= 0 else "the reader of weights"):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its `Bye` or `Stopped` is read below
                stream.send(message, () if bulk is None else (bulk,))
            while alive and (left := end - time.monotonic()) > 0 and not stream.ready(min(left, ALIVE_SECONDS)):
                alive()
                stream.socket.settimeout(max(end - time.monotonic(), 0.001))
            answer, got = stream.receive()
    except TimeoutError as error:
        spent = time.monotonic() - begin
        raise TimeoutError(f"{address} gave no answer to {kind} for {spent:.0f} s") from error
    except Silent:
        raise
    except (EOFError, OSError) as error:
        raise Lost(f"lost the dock at {address} during {kind}: {error}") from error
    if isinstance(answer, Bye):
        raise Closed(f"rank {address.rank} at {address} has left the dock")
    if isinstance(answer, Stopped):
        raise ConnectionError(f"rank {answer.rank} at {address} {answer.why}")
    return answer, got


def thread(work: Callable[..., object], *arguments: object) -> threading.Thread:
    """Run `work` in a thread that ends with the process."""
    made = threading.Thread(target=work, args=arguments, name="rl-dock", daemon=True)
    made.start()
    return made
