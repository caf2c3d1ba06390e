"""A dock of real processes: all layouts, what a dead or silent rank does to the others, who is refused, and consumers
outside of the job whose rows are given out again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import dock_ranks
import numpy as np
import pytest
from commands import until
from dock_help import ids

from mindspeed_rl_plugin.dock import messages as m
from mindspeed_rl_plugin.dock import rpc

HEARTBEAT = 1.5
NODES = {"one machine": ["one"] * 3, "two machines": ["left", "left", "right"]}


class Process:
    """One process of a test."""

    def __init__(self, context, target, log: Path, *arguments) -> None:
        self.pipe, theirs = context.Pipe()
        self.log = log
        self.process = context.Process(target=target, args=(theirs, str(log), *arguments))
        self.process.start()
        theirs.close()

    def send(self, *command) -> None:
        self.pipe.send(command)

    def answer(self, seconds: float = 40.0):
        assert self.pipe.poll(seconds), f"no answer; {self.said()}"
        try:
            kind, value = self.pipe.recv()
        except EOFError:
            raise AssertionError(f"the process ended: {self.said()}") from None
        if kind == "failed":
            raise RuntimeError(value)
        return value

    def call(self, *command):
        self.send(*command)
        return self.answer()

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.process.pid, number)

    def status(self, seconds: float = 20.0) -> int | None:
        self.process.join(seconds)
        return self.process.exitcode


class Job:
    """The ranks of a job."""

    def __init__(self, context, folder: Path, nodes: list[str], heartbeat: float) -> None:
        self.nodes = nodes
        self.ranks = [
            Process(context, dock_ranks.rank_main, folder / f"rank{rank}", rank, nodes, heartbeat)
            for rank in range(len(nodes))
        ]
        self.settle()

    def __getitem__(self, rank: int) -> Process:
        return self.ranks[rank]

    def all(self, *command) -> list:
        for rank in self.ranks:
            rank.send(*command)
        return self.settle()

    def ends_for(self, victim: int, why: str) -> None:
        """All other ranks end, and name it."""
        for rank in {*range(len(self.ranks))} - {victim}:
            assert self[rank].status() == 1
            said = f"[rl] rank {rank} stops: rank {victim} on {self.nodes[victim]} is gone ({why})"
            assert said in self[rank].said().splitlines()

    def settle(self) -> list:
        """Answers of all, after as many exchanges as they like."""
        while True:
            assert all(r.pipe.poll(40) for r in self.ranks), [r.said() for r in self.ranks]
            got = [r.pipe.recv() for r in self.ranks]
            if any(kind == "failed" for kind, _ in got):
                raise RuntimeError(got)
            if got[0][0] == "done":
                return [value for _, value in got]
            for rank in self.ranks:
                rank.pipe.send([value for _, value in got])


@pytest.fixture(scope="module")
def context():
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(["dock_ranks"])
    return forkserver


@pytest.fixture
def start(context, tmp_path: Path) -> Iterator:
    """`start(nodes)` for a job, `start.outside(...)` for a process that joins it; all are killed at the end."""
    every: list[Process] = []

    def make(nodes: list[str], heartbeat: float = HEARTBEAT) -> Job:
        job = Job(context, tmp_path, nodes, heartbeat)
        every.extend(job.ranks)
        return job

    def outside(address: str, secret: Path, node: str = "") -> Process:
        log = tmp_path / f"outside{len(every)}"
        made = Process(context, dock_ranks.outside_main, log, address, str(secret), node)
        every.append(made)
        made.answer()
        return made

    make.outside = outside
    yield make
    for one in every:
        one.process.kill()
        one.process.join(10)


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_a_rollout_and_its_end_in_order(start, nodes: list[str]) -> None:
    """Every row once a state; who leaves in order, sooner or later, stops nobody, and no name is left."""
    job = start(nodes, 30.0)
    names = [m.Address(*address).unix for address in job.all("address")]
    assert all(f"@{name}" in sockets() for name in names)
    job.all("open", 0, 8, 2)
    job[0].call("put", 8)
    for state in ("generate", "logp", "reward", "update"):
        seen = sorted(sum(job.all("work", state, 4), []))
        assert seen == list(ids(8, 2)), state
    assert job[2].call("read", list(ids(8, 2)))
    wanted = {"local"} if len(set(nodes)) == 1 else {"local", "remote"}
    assert set.union(*job.all("where")) == wanted
    job.all("clear", 0)
    assert job.all("used") == [0] * 3
    assert sorted(sum((s["states"] for s in job.all("served")), [])) == ["generate", "logp", "reward", "update"]
    job[1].call("close")
    time.sleep(0.5)
    assert job[0].process.is_alive() and job[2].process.is_alive()
    job[2].send("end")  # without a word: it leaves as its interpreter ends
    assert job[2].status() == 0
    job[0].call("close")
    for rank in (0, 1):
        job[rank].send("end")
        assert job[rank].status() == 0
    assert all(rank.said() == "" for rank in job.ranks)
    assert not any(f"@{name}" in sockets() for name in names)


def sockets() -> set[str]:
    """Names of the Unix sockets of this machine."""
    with open("/proc/net/unix") as file:
        return {line.split()[-1] for line in file}


@pytest.mark.parametrize(("machines", "victim"), [("one machine", 1), ("two machines", 0), ("two machines", 2)])
def test_a_killed_rank_ends_the_others_and_is_named(start, machines: str, victim: int) -> None:
    """Also those whose main thread hangs, or waits in the dock."""
    job = start(NODES[machines], 30.0)
    names = [m.Address(*address).unix for address in job.all("address")]
    job.all("open", 0, 2, 1)
    hangs, waits = (r for r in range(3) if r != victim)
    job[hangs].send("hang")
    job[waits].send("lease", "generate", None, 100.0)
    time.sleep(0.3)
    job[victim].kill()
    job.ends_for(victim, "connection broke")
    assert not any(f"@{name}" in sockets() for name in names)


def test_an_exception_on_one_rank_ends_the_others(start, tmp_path: Path) -> None:
    """To a consumer outside, too, which waits for a state that this rank controls, that is no end in order."""
    job = start(NODES["two machines"], 30.0)
    outside = start.outside(job.all("invite", str(tmp_path / "secret"))[0], tmp_path / "secret")
    outside.send("lease", "logp", None, 30.0)
    time.sleep(0.3)
    job[2].send("fail")
    with pytest.raises(RuntimeError, match="ConnectionError: rank 2 .* ended by an error"):
        outside.answer()
    job.ends_for(2, "ended by an error")


def test_a_silent_rank_ends_the_others_within_the_heartbeat(start) -> None:
    job = start(NODES["two machines"])
    time.sleep(HEARTBEAT)
    begin = time.monotonic()
    job[0].kill(signal.SIGSTOP)
    job.ends_for(0, "silent for 1.5 s")
    assert time.monotonic() - begin > 0.5 * HEARTBEAT


def test_strangers_and_garbage_are_refused_and_counted(start, tmp_path: Path) -> None:
    (rank,) = start(["one"]).ranks
    rank.call("invite", str(tmp_path / "secret"))
    assert stat.S_IMODE(os.stat(tmp_path / "secret").st_mode) == 0o600
    secret = bytes.fromhex((tmp_path / "secret").read_text())
    address = m.Address(*rank.call("address"))
    with pytest.raises(PermissionError):
        rpc.connect(address, rpc.Process("thief", -1, "one", b"another"))
    for head in (b"\x00" * 40, rpc.FRAME_PREFIX.pack(rpc.MAGIC, rpc.FRAME_VERSION, 5, 0) + b"hello"):
        stream = rpc.connect(address, rpc.Process("garbage", -1, "one", secret))
        stream.socket.sendall(head)
        stream.socket.settimeout(10)
        with pytest.raises((EOFError, ConnectionResetError)):  # a reset, where bytes were left unread
            stream.receive()
    stream = rpc.connect(address, rpc.Process("odd", -1, "one", secret))
    for odd in (m.Ok(), m.Look("nope", [], {}, None, False), m.Fetch(np.zeros((1, 2), np.int64))):
        assert isinstance(rpc.ask(stream, address, odd)[0], m.Failed)
    silent = socket.socket(socket.AF_UNIX)
    silent.connect("\0" + address.unix)
    until(lambda: rank.call("served")["refused"] == {"stranger": 1, "malformed": 5})  # counted when its end is out


@pytest.mark.parametrize(("node", "where"), [("left", {"local", "remote"}), ("elsewhere", {"remote"})])
def test_rows_of_a_consumer_outside_come_again_when_it_is_killed(
    start, tmp_path: Path, node: str, where: set[str]
) -> None:
    """Each row is done once: by it, by the next one, or by a rank."""
    job = start(["left", "right"], 30.0)
    secret = tmp_path / "secret"
    address = job.all("invite", str(secret))[0]
    job.all("open", 0, 6, 1)
    job[0].call("put", 6)
    first = start.outside(address, secret, node)
    assert first.call("served") == {"states": []}
    token, done = first.call("lease", "generate", 2, 10.0)
    first.call("commit", token)
    _, held = first.call("lease", "generate", 2, 10.0)
    _, mine = job[1].call("lease", "generate", 2, 10.0)
    assert sorted([*done, *held, *mine]) == list(ids(6, 1))
    assert job[1].call("lease", "generate", None, 0.0)[1] == [], "nothing is left"
    first_read = first.call("where")
    with pytest.raises(RuntimeError, match="only the rows of its leases"):
        first.call("read", mine)
    first.kill()
    second = start.outside(address, secret, node)
    token, again = second.call("lease", "generate", None, 10.0)
    assert again == held, "exactly those of the dead one"
    second.call("commit", token)
    until(lambda: job[0].call("remaining", "generate") == 2)  # a commit's news travels behind it
    assert second.call("read", again) and job[0].call("read", [*done, *again])
    assert second.call("where") | first_read == where
    assert all(rank.process.is_alive() for rank in job.ranks), "the job goes on"


@pytest.mark.parametrize(
    ("node", "number", "ends"), [("elsewhere", signal.SIGKILL, "lost"), ("left", signal.SIGSTOP, "TimeoutError")]
)
def test_a_reader_of_weights_ends_with_their_rank_within_its_deadline(
    start, tmp_path: Path, node: str, number: int, ends: str
) -> None:
    job = start(["left"], 30.0)
    address = job[0].call("invite", str(tmp_path / "secret"), "127.0.0.1")
    job[0].call("publish", 0)
    reader = start.outside(address, tmp_path / "secret", node)
    reader.send("pull", 0, 0, 2.0)
    time.sleep(0.2)
    begin = time.monotonic()
    job[0].kill(number)
    assert reader.answer() == ends and time.monotonic() - begin < 20  # and not the job's 30 s
