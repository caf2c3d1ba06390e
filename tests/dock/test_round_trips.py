"""What makes the dock fast keeps its promises: lent memory, answers in the callback, reads into their place."""

import socket
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.dock import ColumnSpec, DistributedDock, StateSpec
from mindspeed_rl_plugin.dock.distributed import frames
from mindspeed_rl_plugin.dock.distributed.arena import LINE, Arena, Extent
from mindspeed_rl_plugin.dock.distributed.channel import Channel
from mindspeed_rl_plugin.dock.distributed.fleet import Limits
from mindspeed_rl_plugin.dock.distributed.frames import Message, Reader
from mindspeed_rl_plugin.dock.distributed.reservations import MOST, Reservations
from mindspeed_rl_plugin.dock.distributed.service import Service
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

COLUMNS = [ColumnSpec("tokens", torch.int32, "token", True), ColumnSpec("logp", torch.float32, "token", True)]
STATES = [StateSpec("logp", ("tokens",), ("logp",))]
LONG = 50_000  # tokens: too many to travel with a message


def rows(group: int, value: int, column: str = "tokens") -> Rows:
    values = torch.full((LONG,), value, dtype=torch.int32 if column == "tokens" else torch.float32)
    return Rows((SampleId(0, group, 0),), {column: Ragged(values, torch.tensor([0, LONG]))})


# lent memory


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(1, 300), min_size=1, max_size=3)), max_size=30))
@settings(max_examples=60, deadline=None)
def test_lent_memory_is_nobody_elses_and_all_of_it_returns(tmp_path_factory, commits: list) -> None:
    arena = Arena(tmp_path_factory.mktemp("arena"), 1 << 20)
    held, spares = Reservations(arena, lends=True), {}
    taken: list[Extent] = []
    for owner, sizes in commits:
        rooms = [-(-size // LINE) * LINE for size in sizes]
        spare = spares.get(owner)
        if spare is not None and spare.nbytes >= sum(rooms):
            begins = spare.offset + np.cumsum([0, *rooms[:-1]])
            extents = [Extent(spare.segment, int(at), room) for at, room in zip(begins, rooms, strict=True)]
            rest = held.carve(owner, spare, extents)
        else:
            extents, rest = held.make(owner, sizes), spare
        for extent in extents:
            held.check(owner, "tokens", extent)
            held.take(extent)
        taken += extents
        spares[owner] = held.renew(owner, rest, sum(rooms))
        every = sorted([*taken, *(s for s in spares.values() if s is not None)])
        pairs = zip(every, every[1:], strict=False)
        assert all(a.segment != b.segment or a.offset + a.nbytes <= b.offset for a, b in pairs)
        assert arena.used == sum(e.nbytes for e in every) and len(held) == 0
        assert held.idle == sum(s.nbytes for s in spares.values() if s is not None)
    for owner in "ab":
        held.forget(owner)
    assert arena.used == sum(e.nbytes for e in taken) and held.idle == 0


def test_lent_memory_is_cut_only_by_its_owner_and_from_the_front(tmp_path) -> None:
    held = Reservations(Arena(tmp_path, 1 << 20), lends=True)
    spare = held.renew("a", None, 1000)
    part = Extent(spare.segment, spare.offset, LINE)
    bad = {
        "not lent": [("b", spare, [part]), ("a", part, [part])],
        "too small": [("a", spare, [spare._replace(nbytes=spare.nbytes + LINE)])],
        "not the next part": [
            ("a", spare, [part._replace(offset=part.offset + LINE)]),
            ("a", spare, [part, part]),
            ("a", spare, [part._replace(nbytes=LINE - 1)]),
            ("a", spare, [part._replace(segment=7)]),
        ],
    }
    for words, calls in bad.items():
        for call in calls:
            with pytest.raises(ValueError, match=words):
                held.carve(*call)
    assert held.renew("a", None, MOST + 1) is None and held.renew("a", None, 0) is None
    assert held.carve("a", spare, [part]).nbytes == spare.nbytes - LINE


@pytest.mark.parametrize("capacity", [None, 1 << 24])
def test_a_write_is_one_round_trip_unless_the_dock_has_a_cap(members, capacity: int | None) -> None:
    (member,) = members(COLUMNS, STATES, ["here"], limits=Limits(capacity=capacity, max_tokens=LONG))
    dock = DistributedDock(COLUMNS, STATES, member.connections)
    dock.open(0, 12, 1)
    trips = []
    for group in range(12):
        before = member.host.traffic["messages"]
        dock.put(rows(group, group))
        trips.append(member.host.traffic["messages"] - before)
    # Lent anew, with the answer to a commit, when the last is used up.
    assert trips == [2] * 12 if capacity else sum(trips) == 13, trips
    for group in range(12):
        lease = dock.lease("logp", max_rows=1, deadline=5)
        assert lease.rows["tokens"].values.unique().tolist() == [group]
        dock.commit(lease, rows(group, group, "logp"))
    dock.clear(0)
    assert member.host.warehouse.used == 0 and dock.remaining("logp") == 0


def test_lent_memory_is_not_written_after_its_connection_was_lost(members) -> None:
    (member,) = members(COLUMNS, STATES, ["here"])
    dock, net = DistributedDock(COLUMNS, STATES, member.connections), member.connections
    dock.open(0, 3, 1)
    dock.put(rows(0, 10))
    lost = net._local.spare.extent
    (channel,) = net._every
    channel._socket.shutdown(socket.SHUT_RDWR)
    house = member.host.warehouse
    for _ in range(200):  # until the warehouse has heard of it
        if not house.reservations.lent("rank 0 client", lost):
            break
        threading.Event().wait(0.01)
    (other,) = member.service.submit(reserved(house, lost.nbytes))
    assert other.offset == lost.offset and other.segment == lost.segment
    house.arena.view(*other)[:] = 7
    dock.put(rows(1, 11))
    dock.put(rows(2, 12))
    assert (house.arena.view(*other) == 7).all(), "the memory is another writer's now"
    found = dock.read([SampleId(0, g, 0) for g in range(3)], ["tokens"])["tokens"]
    assert [r.unique().tolist() for r in found.rows()] == [[10], [11], [12]]


async def reserved(house, nbytes: int) -> list[Extent]:
    return house.reservations.make("another", [nbytes])


# reads into their place


@given(st.lists(st.integers(0, 90), min_size=1, max_size=4), st.lists(st.integers(1, 200), max_size=40), st.booleans())
@settings(max_examples=80, deadline=None)
def test_bytes_are_read_to_where_they_belong(sizes: list[int], pieces: list[int], announced: bool) -> None:
    data = (np.arange(sum(sizes)) % 251).astype(np.uint8)
    outs = [np.zeros(n, np.uint8) for n in sizes]
    stream = b"".join(map(bytes, frames.encode(Message("cells", {"n": 1}, {"data": data}))))
    stream += b"".join(map(bytes, frames.encode(Message("next", {}, {"x": np.arange(3)}))))
    reader, found = Reader(), []
    reader.scatter = outs if announced else [*outs, np.zeros(64, np.uint8)]  # else of another size: not for them
    at = 0
    for piece in [*pieces, *[len(stream)] * 50]:
        room = reader.room()
        size = min(piece, len(room), len(stream) - at)
        room[:size] = stream[at : at + size]
        at += size
        if size:
            reader.got(size)
        while (message := reader.message()) is not None:
            found.append(message)
            reader.scatter = None
    first, second = found
    got = np.concatenate(outs) if announced else first.arrays["data"]
    assert np.array_equal(got, data) and first.note == {"n": 1} and bool(first.arrays) is not announced
    assert second.arrays["x"].tolist() == [0, 1, 2] and reader.idle


# answers


class Echo:
    """Answers at once, or waits for a signal, with as many bytes as are asked for."""

    def __init__(self) -> None:
        self.left = threading.Event()

    def handle(self, peer: str, message: Message):
        if message.kind == "broken":
            raise ValueError("a broken request")
        answer = Message("answer", message.note, {"data": [np.full(n, 5, np.uint8) for n in message.note["sizes"]]})
        return answer if message.kind == "now" else self.later(answer)

    async def later(self, answer: Message) -> Message:
        return answer

    def gone(self, peer: str) -> None:
        self.left.set()


def test_requests_are_answered_in_order_whatever_they_are(tmp_path) -> None:
    echo = Echo()
    service = Service(echo, b"secret", node="here", unix=str(tmp_path / "socket"))
    channel = Channel(service.start(), b"secret", "here", "me", 10)
    asked = [("now", [3]), ("later", [9, 1]), ("now", [5 << 20] * 3), ("now", [4096] * 700), ("later", [8 << 20])]
    for i, (kind, sizes) in enumerate(asked):  # all before the first answer is read
        channel.tell(Message(kind, {"sizes": sizes, "i": i}))
    for i, (_, sizes) in enumerate(asked):
        answer = channel._message()
        assert answer.note["i"] == i and len(answer.arrays["data"]) == sum(sizes) and (answer.arrays["data"] == 5).all()
    with pytest.raises(ValueError, match="a broken request"):
        channel.ask(Message("broken"))
    outs = [np.zeros(n, np.uint8) for n in (70_000, 3, 1 << 20)]
    channel.ask(Message("now", {"sizes": [70_000, 3, 1 << 20], "i": 0}), scatter=outs)
    assert all((out == 5).all() for out in outs)
    channel.close()
    assert echo.left.wait(10)
    service.close()
