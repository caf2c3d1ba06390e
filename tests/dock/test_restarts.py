"""Warehouses that start again under their writers, and services that end in the middle of a handshake."""

import contextlib
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mindspeed_rl_plugin.dock import ColumnSpec, DistributedDock, StateSpec
from mindspeed_rl_plugin.dock.distributed.arena import Arena, Segments
from mindspeed_rl_plugin.dock.distributed.channel import Channel
from mindspeed_rl_plugin.dock.distributed.connections import Connections, Settings, contiguous_homes
from mindspeed_rl_plugin.dock.distributed.frames import NONCE, Message
from mindspeed_rl_plugin.dock.distributed.records import Shape
from mindspeed_rl_plugin.dock.distributed.service import Address, Directory, Service
from mindspeed_rl_plugin.dock.distributed.warehouse import Block, Warehouse
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

COLUMNS = [ColumnSpec("tokens", torch.int32, "token", ragged=True)]
BY_NAME = {c.name: c for c in COLUMNS}
STATES = [StateSpec("work", ("tokens",), ())]
SHAPE = Shape(4, 1)
LENGTH = 50_000  # tokens: such a put is written into reserved memory


def house_in(directory: Path) -> Warehouse:
    return Warehouse(0, BY_NAME, Arena(directory, 1 << 20))


def commit(house: Warehouse, row: int, values: np.ndarray) -> None:
    (extent,) = house.reservations.make("writer", [values.nbytes])
    house.arena.view(extent.segment, extent.offset, values.nbytes)[:] = values.view(np.uint8)
    block = Block("tokens", np.array([row], np.int32), np.array([len(values)], np.int32), extent)
    house.commit("writer", 0, SHAPE, [block])


def cell(house: Warehouse, row: int) -> np.ndarray:
    found = house.locate(0, "tokens", np.array([row]))
    return house.arena.view(int(found.segment[0]), int(found.offset[0]), 4 * int(found.length[0])).view(np.int32)


def test_a_writer_from_before_a_restart_reaches_nobodys_cells(tmp_path: Path) -> None:
    """It fills the extent that it was given, however late: that memory belongs to nobody any more."""
    first = house_in(tmp_path)
    commit(first, 0, np.full(100, 1, np.int32))
    (extent,) = first.reservations.make("slow", [400])
    slow = Segments(tmp_path).view(*extent)
    second = house_in(tmp_path)
    commit(second, 1, np.full(100, 2, np.int32))
    slow[:] = 0xFF
    third = house_in(tmp_path)
    commit(third, 2, np.full(100, 3, np.int32))
    slow[:] = 0xEE
    assert [cell(third, row).tolist() for row in range(3)] == [[n] * 100 for n in (1, 2, 3)]
    assert (second.incarnation, third.incarnation) == (2, 3)
    # What it says afterwards is refused: its reservation was of another incarnation.
    with pytest.raises(ValueError, match="was not reserved by this writer"):
        third.commit("slow", 0, SHAPE, [Block("tokens", np.array([3], np.int32), np.array([100], np.int32), extent)])
    third.clear(0, SHAPE, np.arange(4))
    left = sorted(p.name for p in tmp_path.glob("segment-*"))
    assert third.used == 0 and left == ["segment-2097152"], "the memory of the former ones goes with their last cells"


def test_a_put_goes_on_when_the_reserved_memory_is_gone(members, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started again between a writer's reservation and its copy."""
    member = members(COLUMNS, STATES, ["one node"])[0]
    dock = DistributedDock(COLUMNS, STATES, member.connections, deadline=5)
    dock.open(0, 1, 1)
    reserve, asked = member.host._on_reserve, []

    def restarted_meanwhile(peer: str, message: Message) -> Message:
        answer = reserve(peer, message)
        asked.append(answer)
        if len(asked) == 1:
            old = member.host.warehouse
            member.host.warehouse = Warehouse(0, BY_NAME, Arena(old.arena.directory, 1 << 20))
        return answer

    monkeypatch.setattr(member.host, "_on_reserve", restarted_meanwhile)
    values = torch.arange(LENGTH, dtype=torch.int32)
    dock.put(Rows((SampleId(0, 0, 0),), {"tokens": Ragged.from_rows([values])}))
    assert [a.note["incarnation"] for a in asked] == [1, 2]
    assert torch.equal(dock.read([SampleId(0, 0, 0)], ["tokens"])["tokens"].values, values)


@pytest.mark.parametrize("medium", ["here", "elsewhere"])
def test_cells_without_entries_need_no_memory_after_a_restart(members, medium: str) -> None:
    """Their segment held nothing else: it is gone."""
    member = members(COLUMNS, STATES, ["one node"])[0]
    net = member.connections
    if medium == "elsewhere":
        net.settings.warehouse, net.segments = None, None
    dock = DistributedDock(COLUMNS, STATES, net, deadline=5)
    dock.open(0, 3, 1)
    ids = [SampleId(0, g, 0) for g in range(3)]
    empty = Ragged.from_rows([torch.empty(0, dtype=torch.int32)] * 2)
    dock.put(Rows(tuple(ids[:2]), {"tokens": empty}))
    old = member.host.warehouse
    member.host.warehouse = Warehouse(0, BY_NAME, Arena(old.arena.directory, 1 << 20))
    assert not list(old.arena.directory.glob("segment-0*"))
    dock.put(Rows((ids[2],), {"tokens": Ragged.from_rows([torch.tensor([7], dtype=torch.int32)])}))
    assert dock.read(ids, ["tokens"])["tokens"].values.tolist() == [7]
    assert len(dock.snapshot()["epochs"][0]["columns"]["tokens"]["slots"]) == 3
    for wanted in (ids[:1], ids[:2], ids):  # one row, several, and with others
        lease = dock.lease("work", ids=wanted, deadline=5)
        assert [r.tolist() for r in lease.rows["tokens"].rows()] == [[], [], [7]][: len(wanted)]
        dock.release(lease)


class Answering:
    """Says OK to everything."""

    async def handle(self, peer: str, message: Message) -> Message:
        return Message("ok", {"peer": peer})

    def gone(self, peer: str) -> None:
        """Nothing to give back."""


@pytest.mark.parametrize("after", ["at once", "the nonce"])
def test_a_service_that_ends_in_a_handshake_is_asked_again(tmp_path: Path, after: str) -> None:
    path, secret = str(tmp_path / "socket"), b"secret"
    dying = socket.socket(socket.AF_UNIX)
    dying.bind(path)
    dying.listen(8)
    ended = threading.Event()

    def end_early() -> None:
        connection, _ = dying.accept()
        with contextlib.closing(connection):
            if after == "the nonce":
                connection.sendall(bytes(range(NONCE)))
                connection.recv(2 * NONCE)
        dying.close()
        Path(path).unlink()
        ended.set()

    threading.Thread(target=end_early, daemon=True).start()
    address = Address("here", path)
    settings = Settings("me", "here", secret, None, None, contiguous_homes(1), patience=10)
    net = Connections(Directory(controllers={"work": address}), settings)
    service = Service(Answering(), secret, node="here", unix=path)

    def start_again() -> None:
        assert ended.wait(10)
        service.start()

    threading.Thread(target=start_again, daemon=True).start()
    begin = time.monotonic()
    assert net.state("work", Message("anything")).note == {"peer": "me"}
    assert ended.is_set() and time.monotonic() - begin < 8
    # Who does not know the secret is told so, and does not try again.
    with pytest.raises(PermissionError, match="another job's"):
        Channel(address, b"guess", "here", "thief", 5)
    net.close()
    service.close()
