"""A machine dies: within a heartbeat its rows are not ready, and once put again all states do them anew."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from mindspeed_rl_plugin.dock import ColumnSpec, DistributedDock, StateSpec
from mindspeed_rl_plugin.dock.distributed import succession
from mindspeed_rl_plugin.dock.distributed.connections import WarehouseLost
from mindspeed_rl_plugin.dock.distributed.controller import Controller
from mindspeed_rl_plugin.dock.distributed.fleet import Member
from mindspeed_rl_plugin.dock.distributed.frames import Message
from mindspeed_rl_plugin.dock.distributed.hosting import Host
from mindspeed_rl_plugin.dock.distributed.picking import Ask
from mindspeed_rl_plugin.dock.distributed.records import Cells, Record, Shape
from mindspeed_rl_plugin.dock.distributed.service import Address, Directory
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

COLUMNS = [
    ColumnSpec("prompt", torch.int32, "group", ragged=True),
    ColumnSpec("tokens", torch.int32, "token", ragged=True),
]
STATES = [StateSpec("generate", ("prompt",), ("tokens",)), StateSpec("train", ("tokens",), ())]
NODES = ["a", "a", "a", "b", "b"]  # controllers lie on ranks 0 and 2; rank 3 holds the warehouse of b
GROUPS, MEMBERS = 4, 2
IDS = [SampleId(0, g, m) for g in range(GROUPS) for m in range(MEMBERS)]
HEARTBEAT = 1.2


@pytest.fixture
def members():
    """One member a rank, each in a thread of its own while they find each other."""
    box: list[object] = [None] * len(NODES)
    barrier = threading.Barrier(len(NODES), timeout=20)

    def member(rank: int) -> Member:
        def exchange(value: object) -> list[object]:
            box[rank] = value
            barrier.wait()
            found = list(box)
            barrier.wait()
            return found

        return Member(
            COLUMNS,
            STATES,
            rank=rank,
            world=len(NODES),
            exchange=exchange,
            node=NODES[rank],
            host="127.0.0.1",
            patience=20,
            heartbeat=HEARTBEAT,
        )

    with ThreadPoolExecutor(len(NODES)) as pool:
        found = list(pool.map(member, range(len(NODES))))
    yield found
    for each in found:
        each.connections.close()


def prompts(groups: list[int]) -> Rows:
    rows = [torch.full((3,), g, dtype=torch.int32) for g in groups]
    return Rows(tuple(SampleId(0, g, 0) for g in groups), {"prompt": Ragged.from_rows(rows)})


def respond(rows: Rows) -> Rows:
    pairs = zip(rows.ids, rows["prompt"].rows(), strict=True)
    tokens = [torch.tensor([int(p[0]), i.member], dtype=torch.int32) for i, p in pairs]
    return Rows(rows.ids, {"tokens": Ragged.from_rows(tokens)})


def train_all(worker: DistributedDock) -> None:
    """Every row is there, with what was drawn for it, and is given out once."""
    done = worker.lease("train", ids=IDS, deadline=10)
    assert [r.tolist() for r in done.rows["tokens"].rows()] == [[i.group, i.member] for i in IDS]
    worker.commit(done)
    assert worker.remaining("train") == 0


def dock_of(member: Member) -> DistributedDock:
    dock = DistributedDock(COLUMNS, STATES, member.connections, deadline=20)
    dock.open(0, GROUPS, MEMBERS)
    return dock


def test_rows_of_a_dead_machine_come_again(members: list[Member]) -> None:
    producer, worker = dock_of(members[0]), dock_of(members[1])
    producer.put(prompts(list(range(GROUPS))))
    first = worker.lease("generate", ids=IDS[:6], deadline=10)  # groups 0, 1 on a; 2 on b
    worker.commit(first, respond(first.rows))
    held = worker.lease("generate", ids=IDS[6:], deadline=10)  # group 3 on b
    assert producer.lost() == []

    members[3].service.close()
    begin = time.monotonic()
    while producer.lost() != [(0, 2), (0, 3)]:
        assert time.monotonic() - begin < 6 * HEARTBEAT
        time.sleep(0.05)
    # What was drawn on the dead machine is dropped with its group; nothing of it is trained on.
    worker.commit(held, respond(held.rows))
    assert worker.remaining("generate") == 4
    with pytest.raises(TimeoutError, match=r"column 'tokens' \(written by state 'generate'\) is missing"):
        worker.lease("train", ids=IDS, deadline=0.2)

    producer.put(prompts([2, 3]))
    assert producer.lost() == []
    again = worker.lease("generate", ids=IDS[4:], deadline=10)
    worker.commit(again, respond(again.rows))
    train_all(worker)
    producer.clear(0)
    assert members[0].host.warehouse.used == 0


def test_a_reader_waits_for_rows_that_died_under_it(members: list[Member]) -> None:
    """The lease was granted before anybody noticed; its cells come from where they were written anew."""
    producer, worker = dock_of(members[0]), dock_of(members[1])
    producer.put(prompts(list(range(GROUPS))))
    members[3].service.close()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.lease, "generate", ids=IDS[4:], deadline=15)
        while not producer.lost():
            time.sleep(0.05)
        producer.put(prompts([2, 3]))
        rows = waiting.result(timeout=20).rows
    assert [r.tolist() for r in rows["prompt"].rows()] == [[i.group] * 3 for i in IDS[4:]]


@contextlib.contextmanager
def stalled(member: Member) -> Iterator[None]:
    """Its service does not run, as while other code holds the interpreter; connections stay, nobody answers."""
    again = threading.Event()
    member.service.call(lambda: again.wait(60))
    try:
        yield
    finally:
        again.set()


def until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_machine_that_stalls_comes_back_with_its_rows(members: list[Member], capsys) -> None:
    producer, worker = dock_of(members[0]), dock_of(members[1])
    producer.put(prompts(list(range(GROUPS))))
    first = worker.lease("generate", ids=IDS[:6], deadline=10)
    worker.commit(first, respond(first.rows))
    with stalled(members[3]):
        until(lambda: producer.lost() == [(0, 2), (0, 3)])
        with pytest.raises(TimeoutError, match=r"is missing.*; warehouse 1 on b \(127.0.0.1\) gives no sign of life"):
            worker.lease("train", ids=IDS, deadline=0.2)
        assert (
            "[rl] warehouse 1 on b (127.0.0.1) gave rank 0 no sign of life for 1.2 s: given up"
            in capsys.readouterr()[0]
        )
    until(lambda: producer.lost() == [])
    assert producer._net.dead == set() == worker._net.dead
    until(lambda: worker.remaining("generate") == 2)
    second = worker.lease("generate", ids=IDS[6:], deadline=10)
    worker.commit(second, respond(second.rows))
    train_all(worker)
    assert "[rl] warehouse 1 on b (127.0.0.1) answers rank 0 again: its rows are back" in capsys.readouterr()[0]
    # It can be given up again.
    with stalled(members[3]):
        until(lambda: members[0].host.dead == members[2].host.dead == {1})
    until(lambda: not members[0].host.dead and not members[2].host.dead)


def test_what_was_put_anew_meanwhile_stays_where_it_is(members: list[Member]) -> None:
    """Of a group that lies on two machines the copy of the one that came back is out of date, for everybody."""
    producer, worker, other = dock_of(members[0]), dock_of(members[1]), dock_of(members[4])
    producer.put(prompts(list(range(GROUPS))))
    first = worker.lease("generate", ids=IDS, deadline=10)
    worker.commit(first, respond(first.rows))
    assert worker.remaining("train") == len(IDS)
    with stalled(members[3]):
        until(lambda: members[0].host.dead == members[2].host.dead == {1} and len(producer.lost()) == 2)
        producer.put(prompts([2]))
        assert worker.lost() == [(0, 3)]
    until(lambda: not members[0].host.dead and not members[2].host.dead and worker.remaining("generate") == 2)
    again = other.lease("generate", min_rows=2, deadline=10)  # by a process that has noticed nothing
    assert set(again.rows.ids) == {SampleId(0, 2, 0), SampleId(0, 2, 1)}, "group 3 is done, as it was"
    anew = [torch.tensor([77, i.member], dtype=torch.int32) for i in again.rows.ids]
    other.commit(again, Rows(again.rows.ids, {"tokens": Ragged.from_rows(anew)}))
    for dock in (producer, worker, other):
        assert [r[0].item() for r in dock.read(again.rows.ids, ["tokens"])["tokens"].rows()] == [77, 77]
    (saved,) = producer.snapshot()["epochs"]
    assert saved["columns"]["tokens"]["values"][::2].tolist() == [0, 0, 1, 1, 77, 77, 3, 3]
    assert saved["columns"]["prompt"]["slots"].tolist() == [0, 1, 2, 3]
    done = worker.lease("train", ids=IDS, deadline=10)
    assert [r.tolist() for r in done.rows["tokens"].rows()] == [
        [77 if i.group == 2 else i.group, i.member] for i in IDS
    ]
    worker.commit(done)
    assert worker.remaining("train") == worker.remaining("generate") == 0
    producer.clear(0)
    assert [members[rank].host.warehouse.used for rank in (0, 3)] == [0, 0]


def test_what_was_cleared_meanwhile_is_cleared_there_too(members: list[Member], monkeypatch) -> None:
    """Also where a clearing just missed its coming back: it hears with the next sign of life."""
    producer, there = dock_of(members[0]), members[3].host
    producer.put(prompts(list(range(GROUPS))))
    house, ask = there.warehouse, producer._net.warehouse
    assert house.rows == 0 and house.used > 0

    def out_of_reach(index: int, message: Message, seconds: float = 0.0) -> Message:
        if index == 1:
            raise WarehouseLost("a cable is out")
        return ask(index, message, seconds)

    with stalled(members[3]):
        until(lambda: members[0].host.dead == members[2].host.dead == {1})
        monkeypatch.setattr(producer._net, "warehouse", out_of_reach)
        producer.clear(0, [2])
    until(lambda: house.manifest()[0].cleared is not None)
    assert house.manifest()[0].cleared.tolist() == [2] and house.used > 0
    assert not members[0].host.dead
    producer.clear(0)
    until(lambda: house.used == 0 and 0 in house.gone)
    assert producer.remaining("generate") == 0


@pytest.mark.parametrize("refuses", [True, False], ids=["refused", "no answer"])
def test_within_a_heartbeat_a_silent_machine_is_given_up_and_not_before(monkeypatch, refuses: bool) -> None:
    """By a clock of its own. Two signs of life in a row may be lost."""
    now, asked, lost = [0.0], [], [False, True, True] * 5 + [False] + [True] * 9
    directory = Directory(warehouses={1: Address("b", "there")})
    host = Host("me", "a", b"", directory, heartbeat=12.0, clock=lambda: now[0])
    nap = asyncio.sleep

    async def request(address: Address, kind: str, note: dict) -> Message:
        assert not host.dead
        asked.append(now[0])
        if not lost[len(asked) - 1]:
            return Message("ok")
        if not refuses:
            now[0] += waits[-1]
        raise ConnectionRefusedError if refuses else asyncio.TimeoutError

    async def wait_for(coroutine, seconds: float) -> Message:
        waits.append(seconds)
        return await coroutine

    async def sleep(seconds: float) -> None:
        now[0] += seconds
        await nap(0)

    waits: list[float] = []
    host._request = request
    monkeypatch.setattr(succession.asyncio, "sleep", sleep)
    monkeypatch.setattr(succession.asyncio, "wait_for", wait_for)
    with pytest.raises(AssertionError):
        asyncio.run(host._watch(1))
    answered = [at for at, gone in zip(asked, lost, strict=False) if not gone]
    assert len(answered) == 6 and 9.0 < now[0] - answered[-1] <= 12.0
    assert max(np.diff(asked)) <= 4.0


def test_the_newer_copy_counts_in_whatever_order_they_are_heard_of() -> None:
    """Also for a controller that is built anew from the manifests of both."""
    shape = Shape(2, 1)

    def told(house: int, seq: int, groups: list[int], offset: int, done: bool) -> Record:
        at = np.array(groups, np.int32)
        parts = (np.zeros(len(at), np.int32), np.full(len(at), offset), np.ones(len(at), np.int32))
        return Record(house, 1, seq, 0, shape, {"tokens": Cells(at, *parts)}, {"train": at} if done else {})

    first, anew = told(1, 1, [0, 1], 64, True), told(0, 1, [1], 128, False)
    for order in ([first, anew], [anew, first], [first, anew, told(1, 2, [1], 192, True)]):
        train = Controller(STATES[1], {c.name: c for c in COLUMNS}, {s.name: s for s in STATES})
        train.assigned = lambda epoch, groups: np.ones(groups, np.int64)  # all in warehouse 1 at first
        for record in order:
            train.apply(record)
        assert train.moved().tolist() == [[0, 1, 0]] and train.remaining() == 1
        grant = train.take(Ask(), "me", 0, 9)
        assert train.ids(grant.rows).tolist() == [[0, 1, 0]] and train.locations(grant, ["tokens"])[1].tolist() == [
            [128]
        ]


def test_peers_stay_in_step_when_rows_die_under_one_of_them(members: list[Member]) -> None:
    """One had copied its cells, the other asks again: as the same call, within the time that it was given."""
    producer = dock_of(members[0])
    first, second = (
        DistributedDock(COLUMNS, STATES, members[rank].connections, consumer=0, peer=peer, peers=2, deadline=20)
        for peer, rank in enumerate((4, 1))  # one reads from its own machine, the other through a socket
    )
    producer.put(prompts(list(range(GROUPS))))
    for peer in (first, second):
        peer.open(0, GROUPS, MEMBERS)
    held = first.lease("generate", ids=IDS[4:], deadline=10)
    members[3].service.close()
    asked, ask = [], second._net.state

    def heard(state: str, message: Message, seconds: float = 0.0) -> Message:
        if message.kind == "lease":
            asked.append((message.note["ask"]["join"], message.note["deadline"]))
        return ask(state, message, seconds)

    second._net.state = heard
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.lease, "generate", ids=IDS[4:], deadline=15)
        while not producer.lost():
            time.sleep(0.05)
        producer.put(prompts([2, 3]))
        again = waiting.result(timeout=20)
    assert len(asked) > 1 and len({join for join, _ in asked}) == 1
    seconds = [deadline for _, deadline in asked]
    assert seconds == sorted(set(seconds), reverse=True), "not granted anew"
    assert again.token == held.token and again.rows.ids == held.rows.ids
    first.release(held)
    second.release(again)
    for ids in (IDS[:2], IDS[2:4]):
        leases = [peer.lease("generate", ids=ids, deadline=10) for peer in (first, second)]
        assert [tuple(lease.rows.ids) for lease in leases] == [tuple(ids)] * 2 and leases[0].token == leases[1].token
        for peer, lease in zip((first, second), leases, strict=True):
            peer.release(lease)


def test_a_record_lost_with_its_connection_is_asked_for(members: list[Member]) -> None:
    """The last record before a wait: nothing after it shows that it is missing."""
    producer = dock_of(members[0])
    producer.put(prompts([0, 1, 2, 3]))
    host = members[0].host
    warehouse = members[3].host.warehouse
    assert producer.remaining("train") == GROUPS * MEMBERS
    lost = []
    broadcast = members[3].host._broadcast
    members[3].host._broadcast = lost.append  # of machine b
    lease = producer.lease("generate", ids=IDS, deadline=10)
    producer.commit(lease, respond(lease.rows))
    members[3].host._broadcast = broadcast
    assert len(lost) == 1 and host.controllers["generate"].applied[1] == warehouse.seq - 1
    assert producer.remaining("generate") == 0
    assert len(producer.lease("train", ids=IDS, deadline=10)) == len(IDS)
