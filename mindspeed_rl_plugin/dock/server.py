"""The server of a process: one thread per connection, which calls the process's `Core`. Answers are sent outside of the
core's lock, so that a slow reader does not delay other processes."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time

from mindspeed_rl_plugin.dock import messages as m
from mindspeed_rl_plugin.dock.core import OUTSIDE, Core
from mindspeed_rl_plugin.dock.rpc import MAX_BULK, Oversized, Process, Stream, admit, connect, thread
from mindspeed_rl_plugin.dock.watch import Link, Watch

EXHAUSTED_SECONDS = 0.1  # pause before the next connection is accepted, after descriptors or memory ran out


class DockServer:
    """Serves `core` after `start`. me: this rank; watch: None if no other rank is watched."""

    def __init__(self, core: Core, me: Process, watch: Watch | None = None) -> None:
        self.core, self.me, self.watch = core, me, watch
        self.address: m.Address | None = None
        self._streams: dict[Stream, str] = {}  # -> name of its other side
        self._listeners: list[socket.socket] = []
        self._closed = threading.Event()
        self._last: m.Message = m.Bye()

    def start(self, host: str = "", name: str = "") -> m.Address:
        """Listen on an abstract Unix socket and, if `host` is given, on this address of a network interface. Returns
        the address of the server. name: of the Unix socket. Raises OSError if a socket cannot be made."""
        if self.address is None:
            address = m.Address(self.me.node, name or f"rl-dock-{secrets.token_hex(16)}", rank=self.me.rank)
            self._listen(socket.AF_UNIX, "\0" + address.unix)
            self.address = address
            if self.watch is not None:
                thread(self.tick)
        if host and not self.address.port:
            listener = self._listen(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, 0))
            self.address = self.address._replace(host=host, port=listener.getsockname()[1])
        return self.address

    def link(self, address: m.Address) -> Link:
        """A connection to another rank's server that lasts as long as both ranks."""
        link = Link(connect(address, self.me, watch=True).socket, address.rank, address.node)
        self._streams[link] = f"rank {address.rank}"
        self.watch.add(link)
        thread(self._converse, link, f"rank {address.rank}")
        return link

    def close(self, last: m.Message) -> None:
        """Tell the other sides that this process leaves or stops, and stop listening. Idempotent."""
        self._last = last
        self._closed.set()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for stream in list(self._streams):
            stream.leave(last)

    def _listen(self, family: int, where: object) -> socket.socket:
        listener = socket.socket(family)
        try:
            listener.bind(where)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
        self._listeners.append(listener)
        thread(self._accept, listener)
        return listener

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:  # an error of this connection, too many open files, or the end
                self._closed.wait(EXHAUSTED_SECONDS)
                continue
            thread(self._attend, connection)

    def _attend(self, connection: socket.socket) -> None:
        """Serve one connection of another process."""
        try:
            stream, hello = admit(connection, self.me.secret)
            if hello.watch and hello.rank >= 0 and self.watch is not None:
                stream = Link(connection, hello.rank, hello.node)
                self.watch.add(stream)
        except (OSError, EOFError, m.FrameError) as error:
            if isinstance(error, (PermissionError, m.FrameError)):
                self.core.refused["malformed" if isinstance(error, m.FrameError) else "stranger"] += 1
            return connection.close()
        name = hello.name if hello.rank >= 0 or hello.name.startswith(OUTSIDE) else f"{OUTSIDE} {hello.name}"
        self._streams[stream] = name
        if self._closed.is_set():  # this server was closed after it had accepted the connection
            stream.leave(self._last)
        try:
            return self._converse(stream, name)
        finally:
            if hello.rank < 0 and name not in list(self._streams.values()):
                self.core.gone(name)

    def _converse(self, stream: Stream, peer: str) -> None:
        """Serve the requests of a connection until it ends. A lease in the last answer is then given back, since this
        answer may not have arrived."""
        unheard: m.Release | None = None
        try:
            while True:
                try:
                    message, bulk = stream.receive(self._most(peer))
                except Oversized as error:
                    stream.send(m.Failed.of(error))
                    continue
                unheard = None
                if isinstance(stream, Link):
                    self._heard(stream, message)
                else:
                    answer = self.core.call(peer, message, bulk, stream.ended)
                    if isinstance(answer[0], m.Grant) and answer[0].token:
                        unheard = m.Release(message.state, [], {}, answer[0].token)
                    try:
                        stream.send(*answer)
                    except m.FrameError as error:
                        stream.send(m.Failed.of(error))
        except m.FrameError:
            self.core.refused["malformed"] += 1
        except (OSError, EOFError):
            pass
        finally:
            self._streams.pop(stream, None)
            stream.close()
            if unheard is not None:
                self.core.call(peer, unheard)
            if isinstance(stream, Link) and not self._closed.is_set():
                self.watch.broke(stream)

    def _most(self, peer: str) -> int:
        """Most bytes of cells that may come with one message."""
        gate = getattr(self.core, "gate", None) if peer.startswith(OUTSIDE) else None
        return MAX_BULK if gate is None else gate.most_bytes

    def _heard(self, link: Link, message: m.Message) -> None:
        link.heard = time.monotonic()
        if isinstance(message, m.Record):
            self.core.apply(message)
        elif isinstance(message, m.Bye):
            self.watch.remove(link)
        elif isinstance(message, m.Stopped):
            self.watch.stop(message.rank, message.why, message.node)

    def tick(self) -> None:
        """Send signs of life and check for those of other ranks, until this server is closed."""
        while not self._closed.wait(self.watch.pause()):
            self.watch.tick()
