"""Fail-stop: the ranks of a job watch each other, and when one is gone all end, each with a line that names it.

A torchrun job cannot go on without one of its ranks. So a link between two ranks that breaks, or over which nothing
comes for the heartbeat (a machine without power breaks no connection), ends the process at once, even if its main
thread hangs in a collective. Each rank is linked to the lowest rank of its machine, these to rank 0, and every
warehouse to the controllers; generators of the launcher, the ranks after those that train, to rank 0, which expects
them. Who stops says over its links because of whom; who leaves in order says so first, and nobody stops for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from mindspeed_rl_plugin.dock.messages import Message, Ping, Stopped
from mindspeed_rl_plugin.dock.rpc import Stream, frame, thread
from mindspeed_rl_plugin.environment import flush_output, last_words

PINGS_PER_HEARTBEAT = 4  # of life, that are sent in one heartbeat
SLOW_READER_SECONDS = 5.0  # for a reader that is slow
STATUS = 1  # exit status of a rank that stops
HEARTBEATS = 10  # in the time that ranks wait for each other
HEARTBEAT = 30.0  # seconds, at least: one that is only busy is not given up


def heartbeat_of(deadline: float) -> float:
    """Seconds without a sign of life after which a rank counts as gone. deadline: that ranks wait for each other."""
    return max(HEARTBEAT, deadline / HEARTBEATS)


class Link(Stream):
    """A connection between two ranks over which notes go both ways, without waiting for the other side. rank, node: of
    the other one; heard: when something came over it last."""

    def __init__(self, connection: socket.socket, rank: int, node: str) -> None:
        super().__init__(connection)
        self.rank, self.node, self.heard = rank, node, time.monotonic()
        self._left: deque[bytes] = deque()
        self._more = threading.Condition()
        self._writer: threading.Thread | None = None

    def note(self, message: Message) -> None:
        """Send in order: now what the socket takes, the rest soon."""
        data = frame(message)[0]
        with self._more:
            if not self._left:
                with contextlib.suppress(OSError):  # the end shows when it is read
                    data = data[self.socket.send(data, socket.MSG_DONTWAIT) :]
            if data:
                self._left.append(data)
                self._more.notify_all()
                if self._writer is None:
                    self._writer = thread(self._write)

    def leave(self, last: Message) -> None:
        """As `Stream.leave`, once the notes before are sent, for which it waits a little."""
        with self._more:
            sent = self._more.wait_for(lambda: not self._left, SLOW_READER_SECONDS)
            super().leave(last) if sent else self.close()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                with self._more:
                    self._more.wait_for(lambda: self._left)
                self.socket.sendall(self._left[0])
                with self._more:
                    self._left.popleft()
                    self._more.notify_all()


class Watch:
    """Watches the links of one rank. heartbeat: seconds; end: ends the process."""

    def __init__(
        self,
        rank: int,
        heartbeat: float,
        end: Callable[[int], object] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank, self.heartbeat = rank, heartbeat
        self._end, self._clock = end, clock
        self._links: set[Link] = set()
        self._expected: dict[int, float] = {}  # rank -> since when
        self._ticked = self._sent = clock()
        self._stopping = threading.Lock()

    def add(self, link: Link) -> None:
        """Watch a link from now on."""
        link.heard = self._clock()
        self._links.add(link)
        self._expected.pop(link.rank, None)

    def expect(self, ranks: Iterable[int]) -> None:
        """Others, which are to have links within a heartbeat from now."""
        self._expected = dict.fromkeys(ranks, self._clock())

    def remove(self, link: Link) -> None:
        """It has ended in order."""
        self._links.discard(link)

    def broke(self, link: Link) -> None:
        """It has ended, and nobody said that it would."""
        if link in self._links:
            self.stop(link.rank, "connection broke", link.node)

    def pause(self) -> float:
        """Seconds from one `tick` to the next."""
        return self.heartbeat / PINGS_PER_HEARTBEAT / 2

    def tick(self) -> None:
        """Send a sign of life when it is time, and look for links without one."""
        now = self._clock()
        asleep, self._ticked = now - self._ticked > self.heartbeat / 2, now
        if now - self._sent >= self.heartbeat / PINGS_PER_HEARTBEAT:
            self._sent = now
            for link in list(self._links):
                link.note(Ping())
        for link in list(self._links):
            if asleep:  # this process itself stood still: what came meanwhile is not read yet
                link.heard = now
            elif now - link.heard > self.heartbeat:
                self.stop(link.rank, f"silent for {self.heartbeat:g} s", link.node)
        for rank, since in list(self._expected.items()):
            if asleep:
                self._expected[rank] = now
            elif now - since > self.heartbeat:
                self.stop(rank, f"it should generate, and has not come for {self.heartbeat:g} s: look at what it says")

    def stop(self, rank: int, why: str, node: str = "") -> None:
        """End this process because of another rank, on a machine. Does not return then, but where `end` does."""
        if rank == self.rank:  # it told the others, and one of them tells all
            return None
        if not self._stopping.acquire(blocking=False):
            return None if self._end is not os._exit else threading.Event().wait()  # another thread is about to
        where = f" on {node.split()[0]}" if node else ""
        line = f"rank {self.rank} stops: rank {rank}{where} is gone ({why})"
        last_words(line, later=1)
        for link in list(self._links):
            link.note(Stopped(rank, why, node))
        flush_output()
        self._end(STATUS)
        return None
