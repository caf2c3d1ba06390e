"""A record, a question or an answer is lost on its way, or too large: nothing stays held, nobody waits in vain."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mindspeed_rl_plugin.dock import ColumnSpec, DistributedDock, LocalDock, StateSpec
from mindspeed_rl_plugin.dock.distributed import (
    asks,
    cells,
    channel,
    client,
    controller_calls,
    frames,
    reading,
    service,
)
from mindspeed_rl_plugin.dock.distributed.channel import Channel
from mindspeed_rl_plugin.dock.distributed.fleet import Member
from mindspeed_rl_plugin.dock.distributed.records import Record, Shape
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

COLUMNS = [
    ColumnSpec("tokens", torch.int32, "token", ragged=True),
    ColumnSpec("score", torch.float32, "sample", ragged=False),
]
STATES = [StateSpec("one", ("tokens",), ()), StateSpec("two", ("tokens",), ())]


@pytest.fixture
def made(members):
    """Members of a dock, one for each of `nodes`."""
    return lambda nodes, states=STATES, **more: members(COLUMNS, states, nodes, **more)


def dock_of(member: Member, groups: int = 4) -> DistributedDock:
    dock = DistributedDock(COLUMNS, STATES, member.connections, deadline=10)
    dock.open(0, groups, 1)
    return dock


def ids(*groups: int) -> list[SampleId]:
    return [SampleId(0, g, 0) for g in groups]


def rows(*groups: int, length: int = 3) -> Rows:
    return Rows(tuple(ids(*groups)), {"tokens": Ragged.from_rows([torch.full((length,), g).int() for g in groups])})


# records


def outbox_of(member: Member):
    (outbox,) = member.host._outbox.values()
    return outbox


@pytest.mark.parametrize("noticed", [True, False], ids=["ended", "silently"])
def test_the_last_record_before_a_wait_is_lost_with_its_connection(made, noticed: bool) -> None:
    """Another rank waits for the row: nothing that it asks, and nothing that follows, shows that the record is gone."""
    writer, reader = made(["a", "b"], heartbeat=120 if noticed else 1.2)
    dock, other = dock_of(writer), dock_of(reader)
    (state,) = reader.host.controllers
    dock.put(rows(0))
    assert len(other.lease(state, ids=ids(0), deadline=10)) == 1
    far = writer.service.submit(diverted(outbox_of(writer)))
    dock.put(rows(1))
    assert reader.host.controllers[state].applied[0] == writer.host.warehouse.seq - 1
    if noticed:
        far.close()
    begin = time.monotonic()
    assert len(other.lease(state, ids=ids(1), deadline=20)) == 1
    assert time.monotonic() - begin < 10
    far.close()


async def diverted(outbox) -> socket.socket:
    """What is sent is read by nobody any more; returns the other end."""
    loop = asyncio.get_running_loop()
    loop.remove_reader(outbox._connection)
    outbox._connection.close()
    outbox._connection, far = socket.socketpair()
    outbox._connection.setblocking(False)
    loop.add_reader(outbox._connection, outbox._readable)
    return far


def test_a_service_that_ends_tells_nothing_more(made) -> None:
    """Else the end of another process would begin work in a loop that nobody runs to its end."""
    writer, _ = made(["a", "b"])
    dock_of(writer).put(rows(0))
    outbox, spawned = outbox_of(writer), []
    outbox._spawn = spawned.append
    writer.service.close()
    assert outbox._connection is None
    outbox.put(Record(0, 1, 1, 0, Shape(1, 1)))
    assert not spawned


# grants


def test_a_grant_that_cannot_be_read_is_handed_back(made, monkeypatch: pytest.MonkeyPatch) -> None:
    dock = dock_of(made(["a"])[0])
    dock.put(rows(0))
    gather = reading.gather

    def fail(*args):
        raise MemoryError("no room for it")

    monkeypatch.setattr(reading, "gather", fail)
    with pytest.raises(MemoryError):
        dock.lease("one", ids=ids(0), deadline=1)
    monkeypatch.setattr(reading, "gather", gather)
    assert len(dock.lease("one", ids=ids(0), deadline=1)) == 1


def test_a_grant_that_cannot_be_answered_is_taken_back(made, monkeypatch: pytest.MonkeyPatch) -> None:
    dock = dock_of(made(["a"])[0])
    dock.put(rows(0))

    def fail(*args):
        raise KeyError("score")

    monkeypatch.setattr(controller_calls, "grant_message", fail)
    with pytest.raises(ValueError, match="malformed 'lease'"):
        dock.lease("one", ids=ids(0), deadline=1)
    monkeypatch.setattr(controller_calls, "grant_message", asks.grant_message)
    assert len(dock.lease("one", ids=ids(0), deadline=1)) == 1


@pytest.mark.parametrize("medium", ["local", "shm"])
@pytest.mark.parametrize("column", ["score", "unknown"])
def test_a_column_that_a_state_does_not_read_is_refused(made, medium: str, column: str) -> None:
    dock = LocalDock(COLUMNS, STATES) if medium == "local" else dock_of(made(["a"])[0])
    dock.open(0, 4, 1)
    dock.put(rows(0))
    with pytest.raises(ValueError, match=rf"state 'one' reads \['tokens'\], not \['{column}'\]"):
        dock.lease("one", ids=ids(0), deadline=1, columns=["tokens", column])
    assert len(dock.lease("one", ids=ids(0), deadline=1)) == 1


def test_an_answer_that_is_lost_is_given_once_more(made) -> None:
    """The process lives on with another connection, so that nothing tells that the lease has no holder."""
    member = made(["a"])[0]
    dock = dock_of(member, groups=2)
    dock.put(rows(0, 1))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(dock.remaining, "one").result() == 2  # its connection stands
        (mine,) = [c for c in member.connections._every if c in member.connections._channels().values()]
        exchange, lost = mine._message, []

        def lose():
            lost.append(exchange())
            raise ConnectionError("the answer is lost")

        mine._message = lose
        lease = dock.lease("one", max_rows=1, deadline=5)
        assert len(lost) == 1 and lost[0].note["token"] == lease.token and lease.rows.ids == tuple(ids(0))
        assert dock.lease("one", max_rows=1, deadline=1).rows.ids == tuple(ids(1)), "the next call gets the next row"
        dock.commit(lease)
        assert dock.remaining("one") == 1


def test_connections_end_with_their_threads(made) -> None:
    member = made(["a"])[0]
    dock = dock_of(member)
    dock.put(rows(0))
    for _ in range(20):
        thread = threading.Thread(target=dock.remaining, args=("one",))
        thread.start()
        thread.join()
    assert len(member.connections._every) == 1


# a controller that hangs


def test_a_controller_that_hangs_is_taken_over_after_a_turn(made, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in ((channel, "MARGIN", 0.2), (client, "TURN_SECONDS", 0.3)):
        monkeypatch.setattr(module, name, seconds)
    held = made(["a", "a", "b"], heartbeat=0.8)
    (state,) = (s for s, a in held[0].connections.directory.controllers.items() if a == held[1].host.address)
    docks = [dock_of(held[0]), dock_of(held[2])]
    docks[0].put(rows(0))
    assert docks[1].remaining(state) == 4
    for member in held:
        member.connections.settings.patience = 2.5
        for each in list(member.connections._every):
            each._patience = 2.5
    stuck = threading.Event()
    held[1].service.call(lambda: stuck.wait(20))
    begin = time.monotonic()
    try:
        lease = docks[1].lease(state, ids=ids(0), deadline=600)  # the deadline is not what it waits for
        assert lease.rows.ids == tuple(ids(0)) and time.monotonic() - begin < 15
        assert sum(member.host.successions for member in held) == 1
    finally:
        stuck.set()


def test_nobody_answers_for_a_state(made, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in ((channel, "MARGIN", 0.2), (client, "TURN_SECONDS", 0.3)):
        monkeypatch.setattr(module, name, seconds)
    (member,) = made(["a"])
    dock = dock_of(member)
    dock.put(rows(0))
    member.connections.settings.patience = 0.5
    for each in list(member.connections._every):
        each._patience = 0.5
    stuck = threading.Event()
    member.service.call(lambda: stuck.wait(20))
    try:
        with pytest.raises(TimeoutError, match=r"lease of rows \(0, 0, 0\) of state 'one', columns tokens: .* no "):
            dock.lease("one", ids=ids(0), deadline=600)
    finally:
        stuck.set()


def test_a_linger_goes_on_over_turns(made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "TURN_SECONDS", 0.1)
    dock = dock_of(made(["a"])[0])
    dock.put(rows(0))
    begin = time.monotonic()
    assert len(dock.lease("one", max_rows=2, linger=0.5, deadline=10)) == 1
    assert 0.5 <= time.monotonic() - begin < 5
    with pytest.raises(TimeoutError, match=r"waited 0\.4 s|0\.4 s"):
        dock.lease("two", ids=ids(1), deadline=0.4)


# sockets


def test_a_service_outlives_running_out_of_descriptors(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Quiet:
        def handle(self, peer: str, message: frames.Message) -> frames.Message:
            return frames.Message("answer")

        def gone(self, peer: str) -> None:
            """Nothing to give back."""

    serving = service.Service(Quiet(), b"secret", node="here", unix=str(tmp_path / "socket"))
    address = serving.start()
    loop, failed = serving._loop, []
    accept = loop.sock_accept

    async def exhausted(listener):
        found = await accept(listener)
        if len(failed) < 3:
            failed.append(found[0])
            found[0].close()
            raise OSError(24, "Too many open files")
        return found

    monkeypatch.setattr(loop, "sock_accept", exhausted)
    for _ in range(4):  # one accept was under way before
        with contextlib.suppress(ConnectionError):
            Channel(address, b"secret", "here", "me", 5).close()
    assert Channel(address, b"secret", "here", "me", 5).ask(frames.Message("a question")).kind == "answer"
    assert len(failed) == 3

    monkeypatch.setattr(service, "UNADMITTED", 2)
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for stranger in strangers:
        stranger.settimeout(5)
        stranger.connect(address.unix)
    greetings = [stranger.recv(frames.NONCE) for stranger in strangers]
    assert [len(g) for g in greetings] == [frames.NONCE, frames.NONCE, 0] and serving.refused["stranger"] == 1
    for stranger in strangers:
        stranger.close()
    time.sleep(0.2)
    assert Channel(address, b"secret", "here", "me", 5).ask(frames.Message("a question")).kind == "answer"
    serving.close()


# large messages


def test_what_one_message_cannot_hold_goes_in_several(made, monkeypatch: pytest.MonkeyPatch) -> None:
    dock = dock_of(made(["a"])[0], groups=6)
    net = dock._net
    net.settings.warehouse, net.segments = None, None  # as from another machine
    monkeypatch.setattr(cells, "FETCH_BYTES", 1000)
    monkeypatch.setattr(frames, "MAX_PAYLOAD", 1500)
    dock.put(rows(*range(6), length=100))
    got = dock.read(ids(5, 0, 1, 2, 3, 4), ["tokens"])
    assert [r.tolist() for r in got["tokens"].rows()] == [[g] * 100 for g in (5, 0, 1, 2, 3, 4)]
    with pytest.raises(ValueError, match=r"column 'tokens' of .*\(0, 9, 0\)|was not opened"):
        dock.read(ids(0, 1, 2, 3, 9), ["tokens"])
    with pytest.raises(ValueError, match="not committed: column 'score'"):
        dock.read(ids(0, 1, 2, 3), ["tokens", "score"])


def test_an_answer_above_the_limit_is_an_error_and_the_connection_stands(made, monkeypatch: pytest.MonkeyPatch) -> None:
    member = made(["a"])[0]
    dock = dock_of(member)
    dock.put(rows(0, length=400))
    monkeypatch.setattr(frames, "MAX_PAYLOAD", 1000)
    (before,) = member.connections._every
    with pytest.raises(ValueError, match="limit 1000"):
        dock.read(ids(0), ["tokens"])
    assert dock.remaining("one") == 4 and list(member.connections._every) == [before]


# what a user may get wrong


def test_the_rank_that_held_the_rows_has_ended(made) -> None:
    """Its error comes at once, whatever the deadlines, and says what happened."""
    held = made(["a", "a"])
    docks = [dock_of(member) for member in held]
    docks[0].put(rows(0, 1))
    lease = docks[1].lease("one", ids=ids(0), deadline=5)
    held[0].connections.close()
    begin = time.monotonic()
    for call in (
        lambda: docks[1].lease("two", ids=ids(1), deadline=600),
        lambda: docks[1].put(rows(2)),
        lambda: docks[1].commit(lease),
    ):
        with pytest.raises(ConnectionError, match="held this machine's part of the dock has ended"):
            call()
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("medium", ["local", "shm"])
def test_ids_may_be_plain_triples_or_a_tensor(made, medium: str) -> None:
    dock = LocalDock(COLUMNS, STATES) if medium == "local" else dock_of(made(["a"])[0])
    dock.open(0, 4, 1)
    dock.put(rows(0, 1, 2))
    assert dock.lease("one", ids=[(0, 1, 0)], deadline=1).rows.ids == tuple(ids(1))
    lease = dock.lease("one", ids=torch.tensor([[0, 2, 0], [0, 0, 0]]), deadline=1)
    assert lease.rows.ids == tuple(ids(2, 0)) and dock.read([(0, 2, 0)], ["tokens"]).ids == tuple(ids(2))
    dock.commit(lease)
    assert dock.remaining("one") == 2


@pytest.mark.parametrize("medium", ["local", "shm"])
def test_options_that_do_nothing_are_refused(made, medium: str) -> None:
    dock = LocalDock(COLUMNS, STATES) if medium == "local" else dock_of(made(["a"])[0])
    with pytest.raises(ValueError, match=r"lease of state 'one': no option \['min_row'\]; known: max_tokens, window"):
        dock.lease("one", deadline=1, min_row=2)
    with pytest.raises(ValueError, match=r"newest and max_staleness want .* Limits\(version_column=...\)"):
        dock.lease("one", deadline=1, newest=3, max_staleness=1)


@pytest.mark.parametrize("medium", ["local", "shm"])
def test_a_commit_that_is_refused_writes_nothing(made, medium: str) -> None:
    states = [StateSpec("score", ("tokens",), ("score",))]
    if medium == "local":
        dock = LocalDock(COLUMNS, states)
    else:
        dock = DistributedDock(COLUMNS, states, made(["a"], states=states)[0].connections, deadline=10)
    dock.open(0, 2, 1)
    dock.put(rows(0, 1))
    lease = dock.lease("score", deadline=1)
    with pytest.raises(ValueError, match=r"state 'score' must write column 'score'; it is missing for \(0, 1, 0\)"):
        dock.commit(lease, Rows(tuple(ids(0)), {"score": torch.tensor([7.0])}))
    dock.commit(lease, Rows(lease.rows.ids, {"score": torch.tensor([1.0, 2.0])}))
    assert dock.read(ids(0, 1), ["score"])["score"].tolist() == [1.0, 2.0]


def test_clearing_says_who_holds_the_rows(made) -> None:
    member = made(["a"])[0]
    dock = DistributedDock(COLUMNS, STATES, member.connections, deadline=0.3)
    dock.open(0, 4, 1)
    dock.put(rows(0))
    dock.lease("one", ids=ids(0), deadline=1)
    with pytest.raises(TimeoutError, match=r"still holds rows of epoch 0 after 0.3 s \(leases of rank 0 client\)"):
        dock.clear(0)
