"""Fail-stop: the ranks of a job watch each other. When a rank is lost, all end, each with a line that names that rank.

A torchrun job cannot continue without one of its ranks. So a process ends immediately when a link to another rank
breaks, or brings nothing for `heartbeat` seconds (a machine without power breaks no connection), even if its main
thread hangs in a collective. Each rank is linked to the lowest rank of its machine, these lowest ranks to rank 0, and
every warehouse to the controllers. Generators that are ranks of the launcher (the ranks after the trainers) are linked
to rank 0, which expects them. A rank that stops sends over its links which rank was the cause. A rank that leaves
without an error sends `Bye` first; then the other ranks continue.
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
from mindspeed_rl_plugin.status.status_file import also
from mindspeed_rl_plugin.status.story import at_deadline

PINGS_PER_HEARTBEAT = 4  # signs of life that a rank sends in one heartbeat
SLOW_READER_SECONDS = 5.0  # most time that a leaving rank waits for slow readers to take its notes
STATUS = 1  # exit status of a rank that stops
SILENT = "silent"  # first word of the reason if a rank sent nothing for a heartbeat
HEARTBEATS = 10  # number of heartbeats in the time that ranks wait for each other
HEARTBEAT = 30.0  # least seconds of a heartbeat, so that a busy rank does not count as lost


def heartbeat_of(deadline: float) -> float:
    """Seconds without a sign of life after which a rank counts as lost. deadline: seconds that ranks wait for each
    other."""
    return max(HEARTBEAT, deadline / HEARTBEATS)


class Link(Stream):
    """A connection between two ranks for notes (messages without an answer) in both directions; `note` never waits.
    rank, node: of the other rank; heard: time of its last note."""

    def __init__(self, connection: socket.socket, rank: int, node: str) -> None:
        super().__init__(connection)
        self.rank, self.node, self.heard = rank, node, time.monotonic()
        self._left: deque[bytes] = deque()
        self._more = threading.Condition()
        self._writer: threading.Thread | None = None

    def note(self, message: Message) -> None:
        """Send a note after the earlier ones. A thread sends what the socket does not accept now."""
        data = frame(message)[0]
        with self._more:
            if not self._left:
                with contextlib.suppress(OSError):  # the thread that reads notices a broken connection
                    data = data[self.socket.send(data, socket.MSG_DONTWAIT) :]
            if data:
                self._left.append(data)
                self._more.notify_all()
                if self._writer is None:
                    self._writer = thread(self._write)

    def leave(self, last: Message) -> None:
        """As `Stream.leave`, once the earlier notes are sent; if this takes SLOW_READER_SECONDS, only close."""
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
        also(f"links {id(self)}", self._silent)

    def add(self, link: Link) -> None:
        """Watch a link from now on."""
        link.heard = self._clock()
        self._links.add(link)
        self._expected.pop(link.rank, None)

    def expect(self, ranks: Iterable[int]) -> None:
        """Expect these ranks: each must be linked within a heartbeat from now."""
        self._expected = dict.fromkeys(ranks, self._clock())

    def remove(self, link: Link) -> None:
        """The other rank has sent `Bye`: watch the link no longer."""
        self._links.discard(link)

    def broke(self, link: Link) -> None:
        """The connection has ended; if the other rank had not sent `Bye`, stop."""
        if link in self._links:
            self.stop(link.rank, "connection broke", link.node)

    def pause(self) -> float:
        """Seconds from one `tick` to the next."""
        return self.heartbeat / PINGS_PER_HEARTBEAT / 2

    def tick(self) -> None:
        """Send a sign of life when it is time. Stop if, for a heartbeat, a link was silent or an expected rank did not
        connect."""
        now = self._clock()
        asleep, self._ticked = now - self._ticked > self.heartbeat / 2, now
        if now - self._sent >= self.heartbeat / PINGS_PER_HEARTBEAT:
            self._sent = now
            for link in list(self._links):
                link.note(Ping())
        for link in list(self._links):
            if asleep:  # this process itself was suspended: notes that arrived meanwhile are not read yet
                link.heard = now
            elif now - link.heard > self.heartbeat:
                self.stop(link.rank, f"{SILENT} for {self.heartbeat:g} s", link.node)
        for rank, since in list(self._expected.items()):
            if asleep:
                self._expected[rank] = now
            elif now - since > self.heartbeat:
                self.stop(rank, f"it should generate, but did not connect within {self.heartbeat:g} s; see its output")

    def _silent(self) -> list[tuple[str, float]]:
        """Ranks that have missed two signs of life, each with the seconds since its last note."""
        late, now = 2 * self.heartbeat / PINGS_PER_HEARTBEAT + 1.0, self._clock()
        return [(f"rank {x.rank}", now - x.heard) for x in list(self._links) if now - x.heard > late]

    def stop(self, rank: int, why: str, node: str = "") -> None:
        """End this process because a rank, on machine `node`, is lost. Returns only if `end` returns, or if
        `rank` is this rank: then nothing is done."""
        if rank == self.rank:  # this rank was the cause: it has told another rank, which tells all
            return None
        if not self._stopping.acquire(blocking=False):
            return None if self._end is not os._exit else threading.Event().wait()  # another thread ends this process
        where = f" on {node.split()[0]}" if node else ""
        line = f"rank {self.rank} stops: rank {rank}{where} is gone ({why})"
        silent = why.startswith(SILENT)  # at a deadline, not when a connection broke
        last_words(f"{line}\n{at_deadline()}".strip() if silent else line, later=1)
        for link in list(self._links):
            link.note(Stopped(rank, why, node))
        flush_output()
        self._end(STATUS)
        return None
