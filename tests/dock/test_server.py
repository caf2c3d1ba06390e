"""What becomes of the leases of an asker whose connection ends, however that comes."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest
from dock_help import COLUMNS, STATES, ids, prompts, tokens

from mindspeed_rl_plugin.dock import Dock, SampleId, rpc
from mindspeed_rl_plugin.dock import messages as m
from mindspeed_rl_plugin.service.guest_dock import GuestDock
from mindspeed_rl_plugin.service.job_service import JobService
from mindspeed_rl_plugin.service.notes import News


@pytest.fixture
def job(members, tmp_path):
    """A job of one rank with four rows, and two processes outside of it."""
    (member,) = members(COLUMNS, STATES, ["a"])
    dock, secret = member.dock(deadline=5), tmp_path / "secret"
    address = JobService(dock).invite(secret)
    dock.open(0, 2, 2)
    dock.put(prompts(2))
    asker, other = (GuestDock.join(address, secret, node="a") for _ in range(2))
    yield SimpleNamespace(member=member, asker=asker, other=other)
    asker.close()
    other.close()


def taken_by(dock: Dock) -> set[SampleId]:
    """All four rows, once they can be had."""
    taken = set()
    while len(taken) < 4:
        taken |= {*dock.lease("generate", deadline=5).rows.ids}
    return taken


@pytest.mark.parametrize("answered", [False, True])
def test_a_lease_that_its_asker_no_longer_waited_for_comes_again(job, answered: bool) -> None:
    """The asker goes on, over other connections. answered: whether the answer had come when it gave up."""
    assert job.asker.news(-1, 0.0)
    stream = rpc.connect(job.member.server.address, job.asker.calls.me)
    stream.send(m.Ask("generate", [], {}, None, 5.0, 60.0))
    if answered:
        assert stream.socket.recv(1, socket.MSG_PEEK)
    stream.close()
    assert taken_by(job.other) == {*ids(2, 2)}
    assert job.asker.calls.me.name in job.member.server._streams.values(), "else all that it has would come again"


def test_a_lease_that_was_heard_of_stays_when_its_connection_ends(job) -> None:
    stream = rpc.connect(job.member.server.address, job.asker.calls.me)
    rpc.ask(stream, job.member.server.address, m.Ask("generate", [], {}, None, 5.0, 60.0, max_rows=3))
    assert job.asker.news(-1, 0.0)
    rpc.ask(stream, job.member.server.address, News(-1, 0.0))
    stream.close()
    assert len(job.other.lease("generate", deadline=5)) == 1
    with pytest.raises(TimeoutError):
        job.other.lease("generate", deadline=0.3)


def test_an_error_while_rows_are_taken_in_ends_the_leases_of_their_sender(job, monkeypatch) -> None:
    """As where the check of rows has a mistake: the connection ends."""
    lease, raised = job.asker.lease("generate", deadline=5), []
    monkeypatch.setattr(threading, "excepthook", lambda about: raised.append(about.exc_type))
    job.member.core.serve({m.Put: lambda request: 1 // 0})
    with pytest.raises(ConnectionError):
        job.asker.commit(lease, tokens(lease.rows.ids))
    assert len(taken_by(job.other)) == 4 and raised == [ZeroDivisionError]
