"""Where the parts of a dock reach each other, and what is said of those that were turned away."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl_plugin.dock import ColumnSpec, DistributedDock, LocalDock, StateSpec, factory, make_docks
from mindspeed_rl_plugin.dock.distributed import frames
from mindspeed_rl_plugin.dock.distributed.channel import Channel
from mindspeed_rl_plugin.dock.distributed.frames import Message

COLUMNS = [ColumnSpec("tokens", torch.int32, "token", ragged=True)]
STATES = [StateSpec("one", ("tokens",), ())]


class Group:
    """Two ranks that are threads, in place of a process group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, machines: list[str]) -> None:
        self.rank, self.values = threading.local(), [None] * len(machines)
        self.barrier = threading.Barrier(len(machines), timeout=20)
        self.machines = machines
        world = SimpleNamespace(
            get_rank=lambda group: self.rank.number,
            get_world_size=lambda group: len(machines),
            all_gather_object=self.gather,
        )
        monkeypatch.setattr(factory, "dist", world)
        monkeypatch.setattr(factory, "machine", lambda: machines[self.rank.number])

    def gather(self, found: list, value: object, group: object) -> None:
        self.values[self.rank.number] = value
        self.barrier.wait()
        found[:] = self.values
        self.barrier.wait()

    def make(self, **more) -> list:
        """What each rank's `make_docks` returns or raises."""

        def rank(number: int):
            self.rank.number = number
            node = {"node": f"node {number}"} if more else {}
            try:
                return make_docks(COLUMNS, STATES, [(number, 2)], medium="shm", group=self, deadline=10, **node)[0]
            except ValueError as error:
                return error

        with ThreadPoolExecutor(len(self.machines)) as pool:
            found = list(pool.map(rank, range(len(self.machines))))
        for dock in found:
            if not isinstance(dock, ValueError):
                dock.close()
        return found


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch):
    """Have MASTER_ADDR be a name of this address, as in Debian's /etc/hosts."""

    def master(address: str) -> None:
        monkeypatch.setenv("MASTER_ADDR", "head" if address else "")
        monkeypatch.setenv("MASTER_PORT", "29500")
        info = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (address, 29500))]
        monkeypatch.setattr(factory.socket, "getaddrinfo", lambda host, port, **_: info)

    return master


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.1.1", r"MASTER_ADDR head resolves to 127\.0\.0\.1 on left \(rank 0\).*give the network address"),
        ("", "rank 0 on left has no MASTER_ADDR"),
    ],
)
def test_an_address_that_other_machines_do_not_reach_is_refused(monkeypatch, resolve, address: str, said: str) -> None:
    resolve(address)
    errors = Group(monkeypatch, ["left", "right"]).make()
    assert [type(e) for e in errors] == [ValueError] * 2 and errors[0].args == errors[1].args, "on every rank alike"
    with pytest.raises(ValueError, match=said):
        raise errors[1]


def test_one_machine_and_emulated_ones_may_be_reached_by_loopback(monkeypatch, resolve) -> None:
    resolve("127.0.1.1")
    assert all(isinstance(d, DistributedDock) for d in Group(monkeypatch, ["one", "one"]).make())
    assert all(isinstance(d, DistributedDock) for d in Group(monkeypatch, ["left", "right"]).make(emulated=True))


@pytest.mark.parametrize(("deadline", "given", "beat"), [(1800.0, None, 180.0), (60.0, None, 30.0), (1800.0, 2.5, 2.5)])
def test_a_stall_is_waited_for_in_proportion(monkeypatch, deadline: float, given: float | None, beat: float) -> None:
    made = []
    member = factory.Member
    monkeypatch.setattr(factory, "Member", lambda *args, **how: made.append(member(*args, **how)) or made[-1])
    (dock,) = make_docks(COLUMNS, STATES, [None], medium="shm", deadline=deadline, heartbeat=given)
    dock.close()
    assert made[0].host.heartbeat == beat


def test_addresses_of_a_network_are_taken() -> None:
    factory._check_addresses([["left", "10.0.0.1"], ["right", "fe80::1%eth0"]])
    factory._check_addresses([["only", ""], ["only", "::1"]])


def test_what_was_refused_is_told(members) -> None:
    """By the dock, of which each rank's lines in dock-rankN.jsonl are made, and by the process that refused."""
    (member,) = members(COLUMNS, STATES, ["here"])
    dock, net = DistributedDock(COLUMNS, STATES, member.connections), member.connections
    address = net.directory.warehouses[0]
    assert dock.served["refused"] == LocalDock(COLUMNS, STATES).served["refused"] == {"stranger": 0, "malformed": 0}
    with pytest.raises(PermissionError):
        Channel(address, b"another", "here", "thief", 5)
    with pytest.raises(ValueError, match="no such message"):
        net.warehouse(0, Message("nonsense"))
    for after in ([], 3):  # not a table
        with pytest.raises(ValueError, match="malformed 'remaining'"):
            net.state(STATES[0].name, Message("remaining", {"state": STATES[0].name, "after": after}))
    deep = b'{"kind": ' + b"[" * 200_000
    channel = Channel(address, net.settings.secret, "here", "deep", 5)
    channel._socket.sendall(frames.PREFIX.pack(frames.MAGIC, frames.VERSION, len(deep), 0) + deep)
    channel._socket.settimeout(10)
    assert channel._socket.recv(1) == b"", "the connection ends"
    channel.close()
    assert dock.served["refused"] == net.warehouse(0, Message("stats")).note["refused"]
    assert dock.served["refused"] == {"stranger": 1, "malformed": 4} and dock.served.keys() >= {"states", "messages"}
