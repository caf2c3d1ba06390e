"""The calling side: addresses, the handshake, and one blocking connection to a server of the dock.

Processes of one machine talk over nameless (abstract) Unix sockets, which the kernel lets only this user's processes
use here, the others over TCP. Both sides prove that they know the job's secret before anything else is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mindspeed_rl_plugin.dock.wire import Address, Bye, Failed, Hello, Message, Reader, frame

NONCE = 32  # bytes
REFUSED = bytes(NONCE)  # in the place of a server's proof: the client has not shown the secret
MARGIN = 15.0  # seconds the caller waits longer than the other side, whose error knows more
CONNECT_SECONDS = 60.0
ERRORS = {"ValueError": ValueError, "TimeoutError": TimeoutError}


class Left(ConnectionError):
    """The other side has left the dock in order."""


def proof(secret: bytes, side: str, nonces: Sequence[bytes]) -> bytes:
    """What `side` ("client" or "server") shows to prove that it knows the secret, without showing it."""
    return hmac.new(secret, side.encode() + b"".join(nonces), hashlib.sha256).digest()


def connect(
    address: Address, secret: bytes, node: str, hello: Hello, seconds: float = CONNECT_SECONDS
) -> socket.socket:
    """A connection past the handshake, made by a process of `node`.

    Raises ConnectionError when nobody answers there, PermissionError when it is another job's.
    """
    connection, target = _endpoint(address, node)
    try:
        connection.settimeout(CONNECT_SECONDS)
        connection.connect(target)
        tune(connection)
        nonce, mine = _exactly(connection), secrets.token_bytes(NONCE)
        connection.sendall(mine + proof(secret, "client", (nonce, mine)))
        shown = _exactly(connection)
        if shown == REFUSED:
            raise PermissionError(f"the dock at {address} refuses this process: it is another job's")
        if not hmac.compare_digest(shown, proof(secret, "server", (mine, nonce))):
            raise PermissionError(f"what answers at {address} is not the dock of this job")
        connection.sendall(frame(hello)[0])
        return connection
    except PermissionError:
        connection.close()
        raise
    except (EOFError, OSError) as error:
        connection.close()
        raise ConnectionError(f"no dock answers at {address}: {error}") from error


def tune(connection: socket.socket) -> None:
    """No delay for small messages."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _endpoint(address: Address, node: str) -> tuple[socket.socket, Any]:
    if address.node == node:
        return socket.socket(socket.AF_UNIX), "\0" + address.unix
    if not address.port:
        raise ConnectionError(f"the dock on {address.node} listens on its own machine only; {node} cannot reach it")
    return socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET), (address.host, address.port)


def _exactly(connection: socket.socket, nbytes: int = NONCE) -> bytes:
    data = b""
    while len(data) < nbytes:
        got = connection.recv(nbytes - len(data))
        if not got:
            raise EOFError("the connection ended")
        data += got
    return data


class Channel:
    """A connection to a server, made now. lost: called where it breaks, or gives no answer; patience: seconds for an
    ordinary answer."""

    def __init__(
        self,
        address: Address,
        secret: bytes,
        node: str,
        hello: Hello,
        patience: float,
        lost: Callable[[Address, str], None] = lambda address, why: None,
    ) -> None:
        self.address, self._patience, self._lost = address, patience, lost
        self._socket = connect(address, secret, node, hello)
        self._reader, self._limit = Reader(), CONNECT_SECONDS

    def ask(
        self,
        message: Message,
        bulk: Sequence[np.ndarray] = (),
        seconds: float = 0.0,
        scatter: Sequence[np.ndarray] = (),
    ) -> Message:
        """Send a request and wait for its answer. seconds: how long the other side itself may wait; scatter: uint8
        arrays that the answer's bulk goes to, one after the other.

        Raises what the other side raised, TimeoutError when it does not answer, ConnectionError when it is gone.
        """
        kind, begin = type(message).__name__, time.monotonic()
        self._reader.scatter = scatter
        limit = seconds + self._patience + MARGIN
        if limit != self._limit:  # a system call, and deadlines seldom change
            self._limit = limit
            self._socket.settimeout(limit)
        try:
            for buffer in frame(message, bulk):  # one, where nothing is large
                self._socket.sendall(buffer)
            answer = self._message()
        except TimeoutError as error:
            self.close()  # a late answer would be taken for that of the next request
            spent = time.monotonic() - begin
            raise TimeoutError(f"{self.address} gave no answer to {kind} for {spent:.0f} s") from error
        except Left:
            self.close()
            raise
        except (EOFError, OSError) as error:
            self.close()
            self._lost(self.address, "connection broke")
            raise ConnectionError(f"lost the dock at {self.address} during {kind}: {error}") from error
        except BaseException:
            self.close()
            raise
        if isinstance(answer, Failed):
            raise ERRORS.get(answer.kind, ValueError)(answer.text)
        return answer

    @property
    def closed(self) -> bool:
        """Whether nothing can be asked here any more."""
        return self._socket.fileno() < 0

    @property
    def quiet(self) -> bool:
        """Whether the connection stands and nothing has come: between two requests that would be its end."""
        if self.closed:
            return False
        ready = select.poll()
        ready.register(self._socket, select.POLLIN)
        return not ready.poll(0)

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._socket.close()

    def __del__(self) -> None:
        if "_socket" in self.__dict__:  # its thread has ended, or nothing is asked there any more
            with contextlib.suppress(OSError):
                self._socket.close()

    def _message(self) -> Message:
        while (found := self._reader.message()) is None:
            got = self._socket.recv_into(self._reader.space())
            if not got:
                raise EOFError("the connection ended")
            self._reader.got(got)
        message, bulk = found
        if isinstance(message, Bye):
            raise Left(f"the rank at {self.address} has left the dock")
        if bulk is not None:
            raise ConnectionError(f"{self.address} sent {len(bulk)} bytes that were not asked for")
        return message
