"""A token bucket in the transport: what a process sends to and receives from other machines, as if over a slow link.

For `dock_scaling.py` where network namespaces are not allowed. The dock's code runs unchanged, on sockets that wait for
tokens before they pass bytes of a TCP connection on; those within the machine are as fast as ever.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

MICROSECOND = 1e-6  # seconds; what rounding leaves of a wait
PIECE = 32 << 10  # bytes that pass at a time, so that both ends of a link are busy together


class TokenBucket:
    """One direction of a link. rate: bytes per second; burst: bytes that pass at once after a pause; total: so far."""

    def __init__(self, rate: float, burst: float) -> None:
        self.rate, self.burst, self.total = rate, burst, 0
        self._level, self._at = burst, time.monotonic()
        self._lock = threading.Lock()

    def spend(self, nbytes: int) -> float:
        """Take tokens for bytes that pass now; returns the seconds until the next byte may."""
        with self._lock:
            now = time.monotonic()
            self._level = min(self.burst, self._level + (now - self._at) * self.rate) - nbytes
            self._at, self.total = now, self.total + nbytes
            debt = -self._level / self.rate
            return debt if debt > MICROSECOND else 0.0

    def pass_on(self, move: Callable[[], int]) -> int:
        """Wait for tokens, then let `move` pass as many bytes as it says."""
        while wait := self.spend(0):
            time.sleep(wait)
        moved = move()
        self.spend(moved)
        return moved


class Link:
    """Both directions of one node's link."""

    def __init__(self, mbit: float, burst: int = 64 << 10) -> None:
        self.sent, self.received = (TokenBucket(mbit * 1e6 / 8, burst) for _ in range(2))

    @property
    def nbytes(self) -> int:
        """Bytes so far, of the busier direction."""
        return max(self.sent.total, self.received.total)

    def install(self) -> None:
        """Put every TCP connection that this process makes or accepts from now on on this link."""
        LimitedSocket.on = self
        socket.socket = LimitedSocket


class LimitedSocket(socket.socket):
    """A socket on a link. on: the link of this process."""

    on: Link

    def send(self, data: Any, *flags: int) -> int:
        """Send a piece, once the link allows."""
        if self.family == socket.AF_UNIX:
            return super().send(data, *flags)
        send, piece = super().send, memoryview(data).cast("B")[:PIECE]
        return self.on.sent.pass_on(lambda: send(piece, *flags))

    def sendall(self, data: Any, *flags: int) -> None:
        """Send all of it, as fast as the link allows."""
        left = memoryview(data).cast("B")
        while left:
            left = left[self.send(left, *flags) :]

    def sendmsg(self, buffers: Any, *more: Any) -> int:
        """Send a piece of the first buffer that is not empty, as a kernel may that has little free space."""
        if self.family == socket.AF_UNIX:
            return super().sendmsg(buffers, *more)
        return self.send(next((b for b in buffers if len(b)), b""))

    def recv(self, nbytes: int, *flags: int) -> bytes:
        """Receive a piece, once the link allows."""
        data = bytearray(min(nbytes, PIECE))
        return bytes(data[: self.recv_into(data, 0, *flags)])

    def recv_into(self, buffer: Any, nbytes: int = 0, *flags: int) -> int:
        """Receive a piece, once the link allows."""
        if self.family == socket.AF_UNIX:
            return super().recv_into(buffer, nbytes, *flags)
        receive, view = super().recv_into, memoryview(buffer).cast("B")
        view = view[: min(nbytes or len(view), PIECE)]
        return self.on.received.pass_on(lambda: receive(view, 0, *flags))
