"""Controllers that are taken over: in order, by one successor alone, with everything that the warehouses know."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mindspeed_rl_plugin.dock import ColumnSpec, DistributedDock, StateSpec
from mindspeed_rl_plugin.dock.distributed import succession
from mindspeed_rl_plugin.dock.distributed.fleet import ANSWER, controller_rank
from mindspeed_rl_plugin.dock.distributed.frames import Message
from mindspeed_rl_plugin.dock.distributed.hosting import Host
from mindspeed_rl_plugin.dock.distributed.service import Address, Directory
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

COLUMNS = [
    ColumnSpec("tokens", torch.int32, "token", ragged=True),
    ColumnSpec("score", torch.float32, "sample", ragged=False),
]
STATES = [StateSpec(name, ("tokens",), ()) for name in ("one", "two", "three")]
IDS = [SampleId(0, g, 0) for g in range(4)]


def docks_of(made) -> list[DistributedDock]:
    docks = [DistributedDock(COLUMNS, STATES, m.connections, deadline=10) for m in made]
    for dock in docks:
        dock.open(0, 4, 1)
    return docks


def put(dock: DistributedDock, ids=IDS) -> None:
    dock.put(Rows(tuple(ids), {"tokens": Ragged.from_rows([torch.tensor([i.group]) for i in ids], dtype=torch.int32)}))


def holders(made, state: str) -> list[int]:
    return [r for r, m in enumerate(made) if state in m.host.controllers]


@pytest.mark.parametrize("nodes", [["here"] * 3, ["left", "left", "right"]], ids=["one machine", "two machines"])
def test_the_next_process_takes_over_what_is_known(members, nodes: list[str]) -> None:
    made = members(COLUMNS, STATES, nodes, heartbeat=1.5)
    docks = docks_of(made)
    put(docks[0])
    lease = docks[2].lease("two", ids=IDS[:1], deadline=5)
    docks[2].commit(lease)
    held = docks[0].lease("two", ids=IDS[1:2], deadline=5)
    assert docks[0].remaining("two") == 3 and holders(made, "two") == [1]
    made[1].service.close()
    assert docks[2].remaining("two") == docks[0].remaining("two") == 3, "what was acknowledged stays so"
    with pytest.raises(ValueError, match="already acknowledged"):
        docks[0].lease("two", ids=IDS[:1], deadline=0)
    docks[0].commit(held)  # its lease is gone, its work is not
    assert docks[0].remaining("two") == 2  # and its controller has heard of it
    rest = docks[2].lease("two", min_rows=2, deadline=5)
    assert set(rest.rows.ids) == set(IDS[2:]) and [int(t) for t in rest.rows["tokens"].values] == [
        i.group for i in rest.rows.ids
    ]
    docks[2].commit(rest)
    assert docks[2].remaining("two") == 0 and holders(made, "two") == [1, 2]
    assert made[2].host.successions == 1 and made[0].host.directory.terms.keys() == {"two"}
    docks[0].clear(0)
    assert all(m.host.warehouse is None or m.host.warehouse.used == 0 for m in made)


def test_many_ask_and_one_takes_over(members) -> None:
    made = members(COLUMNS, STATES, ["here"] * 3, heartbeat=1.5)
    docks = docks_of(made)
    put(docks[0])
    made[0].host.controllers["one"].expire(0)  # it is there
    made[2].service.close()
    with ThreadPoolExecutor(8) as pool:
        left = [pool.submit(docks[i % 2].remaining, "three") for i in range(8)]
        leases = [pool.submit(docks[i % 2].lease, "three", max_rows=1, deadline=8) for i in range(4)]
        assert [f.result(20) for f in left] == [4] * 8
        assert sorted(f.result(20).rows.ids[0] for f in leases) == IDS, "each row once"
    assert [m.host.successions for m in made] == [1, 0, 0], "the first after the one that is gone"


def test_a_controller_that_lives_is_not_taken_over(members) -> None:
    """Somebody could not reach it; its successor can."""
    made = members(COLUMNS, STATES, ["here"] * 3)
    docks = docks_of(made)
    put(docks[0])
    note = made[2].connections.directory
    made[0].connections._succeed("two")
    assert docks[0].remaining("two") == 4 and holders(made, "two") == [1] and not note.terms
    # One that was deposed although it lived (a broken network) says where its successor is.
    made[1].service.submit(_async(made[1].host._learn, "two", made[2].host.address, 5))
    made[2].service.submit(_async(made[2].host._learn, "two", made[2].host.address, 5))
    made[2].service.submit(made[2].host._take_over("two"))
    assert docks[0].remaining("two") == 4 and holders(made, "two") == [2]


async def _async(function, *args):
    return function(*args)


def test_of_two_successors_one_stands(members) -> None:
    """Both find the old one gone at once; warehouses obey the higher term alone."""
    made = members(COLUMNS, STATES, ["left", "left", "right"], heartbeat=1.5)
    docks = docks_of(made)
    put(docks[0])
    made[1].service.close()
    ask = Message("succeed", {"state": "two", "term": 0})
    done = [threading.Thread(target=lambda m=m: m.service.submit(m.host._on_succeed("me", ask))) for m in made[::2]]
    for thread in done:
        thread.start()
    for thread in done:
        thread.join(20)
    end = time.monotonic() + 10
    while len(holders(made[::2], "two")) != 1 and time.monotonic() < end:
        time.sleep(0.05)
    (winner,) = [m for m in made[::2] if "two" in m.host.controllers]
    assert all(m.host.directory.controllers["two"] == winner.host.address for m in made[::2])
    assert [d.remaining("two") for d in (docks[0], docks[2])] == [winner.host.controllers["two"].remaining()] * 2


def test_clearing_begins_again_where_a_controller_has_moved(members) -> None:
    """The first phase closed the groups at a controller that is gone; its successor may have given them out."""
    made = members(COLUMNS, STATES, ["here"] * 3, heartbeat=1.5)
    docks = docks_of(made)
    put(docks[0])
    ask, leases, written = docks[0]._net.state, [], threading.Event()

    def write() -> None:
        written.set()
        docks[2].commit(leases[0])

    def then_it_dies(state: str, message: Message, seconds: float = 0.0) -> Message:
        answer = ask(state, message, seconds)
        if (message.kind, state) == ("close", "three") and not leases:
            made[1].service.close()  # the controller of "two", which has closed them before
            leases.append(docks[2].lease("two", ids=IDS, deadline=5))
            threading.Timer(0.5, write).start()
        return answer

    docks[0]._net.state = then_it_dies
    house, freed = made[0].host.warehouse, []
    clear = house.clear
    house.clear = lambda *args: (freed.append(written.is_set()), clear(*args))[1]
    docks[0].clear(0)
    assert len(leases[0]) == 4 and freed == [True] and house.used == 0


@pytest.mark.parametrize("states", range(1, 11))
@pytest.mark.parametrize("world", range(1, 13))
def test_controllers_have_ranks_of_their_own_where_there_are_enough(world: int, states: int) -> None:
    ranks = [controller_rank(i, states, world) for i in range(states)]
    if world >= states:
        gaps = {b - a for a, b in zip(ranks, [*ranks[1:], world], strict=True)}
        assert len(set(ranks)) == states and max(gaps) - min(gaps) <= 1, "spread evenly"
        return
    held = [ranks.count(rank) for rank in range(world)]
    assert max(held) - min(held) <= 1 and held[0] == min(held), "the first holds a warehouse already"


def test_polls_that_time_out_leave_nothing_behind() -> None:
    host = Host("me", "here", b"", Directory())

    async def polls() -> None:
        for _ in range(5):
            await host._wait("train", 0.001)
        assert not any(host._changed.values())
        waiting = asyncio.ensure_future(host._wait("train", 20))
        await asyncio.sleep(0)
        host._wake("train")
        await asyncio.wait_for(waiting, 10)
        gone = asyncio.ensure_future(host._wait("train", 20))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait({gone})
        assert not any(host._changed.values())

    asyncio.run(polls())


@pytest.mark.parametrize(("heartbeat", "asked"), [(3.0, 3.0), (180.0, 90.0)])
def test_who_waits_for_a_successor_waits_longer_than_the_question_takes(monkeypatch, heartbeat, asked) -> None:
    """A controller that hangs answers nobody: that is found out before its asker turns to the next process."""
    host, waited = Host("me", "here", b"", Directory(), heartbeat=heartbeat), []

    async def nobody_answers(question, seconds: float) -> None:
        question.close()
        waited.append(seconds)
        raise asyncio.TimeoutError

    monkeypatch.setattr(succession.asyncio, "wait_for", nobody_answers)
    assert not asyncio.run(host._lives(Address("there", "b", "10.0.0.1", 7)))
    assert sum(waited) == pytest.approx(asked) and sum(waited) + succession.TRIES * succession.PAUSE < ANSWER


def test_a_warehouse_that_starts_again_knows_who_has_moved(tmp_path) -> None:
    here, there = Address("here", "a"), Address("there", "b", "10.0.0.1", 7)
    directory = Directory(controllers={"one": here, "two": here})
    assert directory.move("two", there, 4) and not directory.move("two", here, 3) and not directory.move("two", here, 4)
    succession.save(directory, tmp_path)
    later = Directory(controllers={"one": here, "two": here})
    succession.load(later, tmp_path)
    assert (later.controllers, later.terms) == ({"one": here, "two": there}, {"two": 4})
    succession.load(later, tmp_path / "nothing kept")
