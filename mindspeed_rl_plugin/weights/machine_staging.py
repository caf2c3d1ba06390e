"""Reads the bytes of a version once per machine: one process, the reader, reads them, and the others map its memory.

The reader is the process that first binds the abstract Unix socket named by `Shared`'s key and a number; the others ask
it. When the reader ends, the kernel frees the name, and the next process with a request becomes the reader. If a reader
hangs, a process that notices this takes the next number: then there is another reader, with other buffers. A process
uses a buffer from its request for a version to its next request or its end; meanwhile nobody writes into the buffer.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import threading
import time
from collections.abc import Callable

import numpy as np

from mindspeed_rl_plugin.dock import Gone
from mindspeed_rl_plugin.dock import messages as m
from mindspeed_rl_plugin.dock.core import BulkAnswer
from mindspeed_rl_plugin.dock.memory import mapped, nameless_file
from mindspeed_rl_plugin.dock.rpc import ALIVE_SECONDS, Process, Silent, Stream, ask, connect
from mindspeed_rl_plugin.dock.server import DockServer
from mindspeed_rl_plugin.environment import say
from mindspeed_rl_plugin.weights.published_memory import LEAST_SECONDS, Found, Maps, Missed, Seek, check_memory

RETRY_SECONDS = 0.05  # between two attempts to replace a reader that has just ended

Fill = Callable[[int, float, np.ndarray], bytes]  # (version, seconds, memory to fill) -> description of the version
Got = tuple[np.ndarray, bytes, int]  # bytes of a version, its description, number of bytes read for this call


class _Buffer:
    """Memory in a nameless file. version: what it contains, None while it is written; users: processes that use it."""

    def __init__(self, nbytes: int) -> None:
        check_memory(1, nbytes, "start fewer engines on this machine, or divide each over more machines")
        self.file = nameless_file(max(nbytes, 1))
        self.memory = mapped(self.file, max(nbytes, 1))[:nbytes]
        self.version: int | None = None
        self.about = b""
        self.users: set[str] = set()


class _Reader:
    """What the reader does. A `DockServer` calls it in the place of a dock's core."""

    def __init__(self, nbytes: int, fill: Fill) -> None:
        self.nbytes, self.refused = nbytes, {"stranger": 0, "malformed": 0}
        self._fill, self._buffers = fill, list[_Buffer]()
        self._reading = threading.Lock()

    def give(self, user: str, version: int, seconds: float) -> tuple[_Buffer, int]:
        """A buffer with the version, which the user uses from now on, and the number of bytes read for this call."""
        until = time.monotonic() + seconds
        if not self._reading.acquire(timeout=max(seconds, 0.0)):
            raise TimeoutError(
                f"version {version} of the weights is not read: another pull on this machine took more than "
                f"{seconds:.1f} s"
            )
        try:
            self.gone(user)
            buffer = next((b for b in self._buffers if b.version == version), None)
            read = 0 if buffer else self.nbytes
            buffer = buffer or self._read(version, until - time.monotonic())
            buffer.users.add(user)
            return buffer, read
        finally:
            self._reading.release()

    def call(self, peer: str, message: m.Message, *_: object) -> BulkAnswer:
        """The answer to a request of another process."""
        try:
            if not isinstance(message, Seek):
                raise ValueError(f"{type(message).__name__} is no request to the reader of a machine")
            buffer, read = self.give(peer, message.version, message.wait)
        except Gone as error:
            return Missed(error.newest), ()
        except (ValueError, OSError, MemoryError) as error:
            return m.Failed.of(error), ()
        path = f"/proc/{os.getpid()}/fd/{buffer.file}"
        return Found(message.version, buffer.about, path, self.nbytes, read), ()

    def gone(self, peer: str) -> None:
        for buffer in self._buffers:
            buffer.users.discard(peer)

    def close(self) -> None:
        """Free all memory, unless a read is running. Memory that processes map is freed when they unmap it."""
        if self._reading.acquire(blocking=False):
            while self._buffers:
                os.close(self._buffers.pop().file)
            self._reading.release()

    def _read(self, version: int, seconds: float) -> _Buffer:
        buffer = next((b for b in self._buffers if not b.users), None)
        if buffer is None:
            buffer = _Buffer(self.nbytes)
            self._buffers.append(buffer)
        buffer.version = None
        buffer.about = self._fill(version, seconds, buffer.memory)
        buffer.version = version
        return buffer


class Shared:
    """The bytes of a version for this process. This process, or another one of its machine, reads them.

    me: this process; key: equal for processes that need the same bytes; fill: reads a version.
    """

    def __init__(self, me: Process, key: str, nbytes: int, fill: Fill) -> None:
        self._me = me._replace(name=f"{me.name} {secrets.token_hex(4)}", rank=-1)
        self._key, self._passed = key, -1  # number of readers that did not answer and were replaced
        self._next_name()
        self._nbytes, self._fill = nbytes, fill
        self._reader: _Reader | None = None
        self._server: DockServer | None = None
        self._stream: Stream | None = None
        self._maps = Maps()

    def get(self, version: int, seconds: float) -> Got:
        """The bytes of the version, valid until the next call or `close`. A buffer is the same array object in every
        call, to be page-locked once. Raises Gone, TimeoutError, MemoryError, and ConnectionError if a read fails."""
        until = time.monotonic() + seconds
        while True:
            left = until - time.monotonic()
            try:
                if self._reader is None and self._stream is None:
                    self._find(left)
                if self._reader is None and (got := self._asked(version, left)) is not None:
                    return got
            except Silent:
                self._next_name()
                say(
                    "warning: the process that reads weights for this machine gives no sign of life for "
                    f"{ALIVE_SECONDS:g} s: another process reads them now, into other memory. If the first process "
                    "hangs, end it"
                )
            if self._reader is not None:
                buffer, read = self._reader.give(self._me.name, version, until - time.monotonic())
                return buffer.memory, buffer.about, read

    def close(self) -> None:
        """End the use of the buffer. If this process is the reader, another process replaces it. Idempotent."""
        if self._stream is not None:
            self._stream.close()
        if self._server is not None:
            self._server.close(m.Bye())
            self._reader.close()
        self._stream = self._server = self._reader = None
        self._maps = Maps()

    def _next_name(self) -> None:
        self._passed += 1
        text = f"{self._me.node} {self._key} {self._passed}".encode()
        name = hmac.new(self._me.secret, text, "blake2b").hexdigest()[:32]
        self._address = m.Address(self._me.node, f"rl-staging-{name}", rank=-1)

    def _alive(self) -> None:
        """Raises `Silent` if the reader hangs. If it has ended, the open connection to it raises."""
        try:
            connect(self._address, self._me, patience=ALIVE_SECONDS).close()
        except ConnectionError as error:
            if isinstance(error, Silent):
                raise

    def _find(self, seconds: float) -> None:
        """Become the reader, or connect to it."""
        reader = _Reader(self._nbytes, self._fill)
        server = DockServer(reader, self._me)
        with contextlib.suppress(OSError):  # the name is taken
            server.start(name=self._address.unix)
            self._reader, self._server = reader, server
            return
        try:
            patience = max(min(seconds, ALIVE_SECONDS), LEAST_SECONDS)
            self._stream = connect(self._address, self._me, patience=patience)
        except ConnectionError as error:  # the reader has ended
            if isinstance(error, Silent) or seconds <= 0:
                raise
            time.sleep(RETRY_SECONDS)

    def _asked(self, version: int, seconds: float) -> Got | None:
        """The reader's answer; None if the reader has ended."""
        if self._stream is None:
            return None
        try:
            message = Seek(version, max(seconds - LEAST_SECONDS, 0.0))
            patience = max(seconds, LEAST_SECONDS)
            answer, _ = ask(self._stream, self._address, message, patience=patience, alive=self._alive)
        except (TimeoutError, ConnectionError) as error:
            self._stream.close()
            self._stream, self._maps = None, Maps()  # memory of an ended reader is freed with its last mapping
            if isinstance(error, (TimeoutError, Silent)) or seconds <= 0:
                raise
            return None
        if isinstance(answer, Missed):
            raise Gone(version, answer.newest)
        if isinstance(answer, m.Failed):
            raise answer.raised() if answer.late else ConnectionError(answer.text)
        return self._maps.map(answer.path, answer.nbytes, write=True), answer.about, answer.read
