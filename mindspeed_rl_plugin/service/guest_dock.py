"""The dock for a process outside of the job: rows of the states that are open to it, and the job's news. Also `linked`,
by which a rank that generates and the ranks of the dock end when one of them is lost."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mindspeed_rl_plugin.dock import Dock, Lease, SampleId
from mindspeed_rl_plugin.dock.api import Declared
from mindspeed_rl_plugin.dock.calls import Calls
from mindspeed_rl_plugin.dock.core import OUTSIDE
from mindspeed_rl_plugin.dock.gate import MOST_BYTES
from mindspeed_rl_plugin.dock.messages import Address, Bye, Failed, Grant, Join, Look, Message, Stopped
from mindspeed_rl_plugin.dock.places import ids_tuple
from mindspeed_rl_plugin.dock.rpc import REPLY_TIMEOUT, Process, ask, connect, thread
from mindspeed_rl_plugin.dock.server import DockServer
from mindspeed_rl_plugin.dock.watch import Watch
from mindspeed_rl_plugin.processes import machine
from mindspeed_rl_plugin.service.invitation import PRINTED, parse_address, read_secret
from mindspeed_rl_plugin.service.notes import Announced, Follow, News, Report, SubmitPrompts, Told

LEAVE_SECONDS = 5.0  # at the end of a job: most seconds from its first rank's `close` to its last rank's


class GuestDock(Dock):
    """Leases ready rows, reads, commits and releases. A lease ends when its time is over, when the job takes it back,
    or when the connection ends. Then its rows are leased again to others; the first commit of a cell wins. When the
    job has left the dock, `lease` returns the empty lease."""

    piece_bytes = MOST_BYTES // 2  # so that the job's gate accepts each message

    def __init__(self, declared: Declared, calls: Calls) -> None:
        super().__init__(declared, calls, leader=False)

    @classmethod
    def join(
        cls,
        address: str,
        secret: str | os.PathLike[str] | bytes,
        *,
        lease_seconds: float = 600.0,
        who: str = "a process",
        node: str = "",
    ) -> GuestDock:
        """Join from a machine of the job or from another machine. secret: of the job, or path of a file with it;
        lease_seconds: how long a lease lasts; who: name of this process in the job's log; node: another name for this
        machine, in tests. Raises ConnectionError if no job answers, and PermissionError for a wrong secret or a file
        that other users can read."""
        name = f"{OUTSIDE} {who} {secrets.token_hex(4)}"
        me = Process(name, -1, node or machine(), secret if isinstance(secret, bytes) else read_secret(secret))
        unix, host, port = parse_address(address)
        place = Address(me.node, unix) if unix else Address("", "", host, port)
        try:
            stream = connect(place, me)
        except PermissionError as error:
            given = "" if isinstance(secret, bytes) else f" (file {os.fspath(secret)})"
            mend = f"give the address {PRINTED}, and the secret file that is printed with it"
            raise PermissionError(f"{error}{given}; {mend}") from error
        except ConnectionError as error:
            mend = f"give the address {PRINTED}, while the job runs: each start has another address"
            raise ConnectionError(f"{error}; {mend}") from error
        directory, _ = ask(stream, place, Join())
        stream.close()
        if isinstance(directory, Failed):
            raise directory.raised()
        here = [i for i, place in enumerate(directory.warehouses) if place.node == me.node]
        calls = Calls(directory, me, warehouse=here[0] if here else None, lease_seconds=lease_seconds)
        return cls(Declared(directory.columns, directory.states), calls)

    # rows

    def lease(self, state: str, *, columns: Sequence[str] | None = None, **asked: Any) -> Lease:
        """As `Dock.lease`; the empty lease if the job has left the dock (`ended`)."""
        try:
            return super().lease(state, columns=columns, **asked)
        except ConnectionError:
            if not self.ended:
                raise
        empty = Grant.empty(len(self.states[state].reads))
        return Lease(0, state, self._rows_of(empty, state, self._declared.reads(state, columns)))

    def finished(self, state: str) -> list[SampleId]:
        """Ids of the rows that a state has acknowledged and that are not cleared."""
        grant = self.calls.query(Look, state, None, True)
        self.calls.epochs.learn(grant)
        return list(ids_tuple(grant.ids))

    # the job

    @property
    def ended(self) -> bool:
        """Whether a call has found that the job has left the dock."""
        return self.calls.ended

    def has_left(self) -> bool:
        """Ask whether the job has left the dock. After a connection broke, the job may be about to leave: this waits
        LEAVE_SECONDS for that, and twice as long if the job is silent."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            if not self.ended:
                self.news(sys.maxsize, LEAVE_SECONDS, patience=LEAVE_SECONDS)
        return self.ended

    @property
    def about(self) -> str:
        """The description of the job."""
        return self.calls.directory.about

    def records(self, after: int, deadline: float) -> Told:
        """The job's records after the first `after` records; waits at most `deadline` seconds until there is one."""
        return self._ask_leader(Follow(after, deadline))

    def submit_prompts(self, rows: Sequence[str], deadline: float) -> list[int]:
        """Give prompts (JSON) to the job; waits at most `deadline` s until it accepts them. Returns their numbers."""
        return self._ask_leader(SubmitPrompts(list(rows), deadline)).numbers

    def report(self, counts: Mapping[str, float], spans: Sequence[tuple[str, float, float]] = ()) -> Announced:
        """Send a `Report`. Returns the job's last announcement."""
        return self._ask_leader(Report(dict(counts), list(spans)))

    def news(self, after: int, deadline: float, patience: float = REPLY_TIMEOUT) -> Announced:
        """The job's last announcement; waits at most `deadline` seconds until its number is above `after`. patience:
        further seconds for the answer."""
        return self._ask_leader(News(after, deadline), patience)

    def _ask_leader(self, message: Message, patience: float = REPLY_TIMEOUT) -> Any:
        return self.calls.ask_rank(self.calls.directory.ranks[0], message, patience)


def here(what: str) -> str:
    """A readable name of this process. what: its role."""
    return f"{what}, process {os.getpid()} on {socket.gethostname()}"


@contextlib.contextmanager
def linked(
    address: str, secret: bytes, rank: int, heartbeat: float, end: Callable[[int], object] = os._exit
) -> Iterator[None]:
    """For a rank of the job's launcher that is not a rank of the dock: within this context it ends when another rank is
    lost, and the other ranks end when this rank is lost. rank: its number, above those of the dock's ranks; heartbeat,
    end: see `Watch`."""
    calls = GuestDock.join(address, secret).calls
    server = DockServer(None, calls.me._replace(name=f"rank {rank}", rank=rank), Watch(rank, heartbeat, end))
    server.link(calls.directory.ranks[0])
    thread(server.tick)
    last: Message = Bye()
    try:
        yield
    except Exception:
        last = Stopped(rank, "ended by an error", server.me.node)
        raise
    finally:
        server.close(last)
