"""A dock of real processes: where everything lies, what survives a kill, what is left behind, who is refused."""

import glob
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_rl_plugin.dock.distributed import frames
from mindspeed_rl_plugin.dock.distributed.channel import Channel
from mindspeed_rl_plugin.dock.distributed.frames import Message
from mindspeed_rl_plugin.dock.distributed.memory import PREFIX
from mindspeed_rl_plugin.dock.distributed.service import Address

WORKER = Path(__file__).with_name("dock_worker.py")
ROOT = Path(__file__).parents[2]
LENGTH = 20_000


class Nursery:
    """Forks ranks from one process that has imported what they need."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def fork(self, names: list[str]) -> int:
        """Number of the new process."""
        self.process.stdin.write(json.dumps(names) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


class Rank:
    """A process of the job; `call` sends a command and waits for its answer, `send` and `end` do half of it each."""

    def __init__(self, nursery: Nursery, folder: Path, rank: int, **first) -> None:
        names = [str(folder / f"{way}.{rank}") for way in ("in", "out")]
        for name in names:
            os.mkfifo(name)
        self.number = nursery.fork(names)
        self.incoming, self.outgoing = open(names[0], "w"), open(names[1])  # noqa: SIM115
        self.send({"rank": rank, **first})

    def send(self, call: dict) -> None:
        self.incoming.write(json.dumps(call) + "\n")
        self.incoming.flush()

    def end(self):
        timer = threading.Timer(40, self.kill)
        timer.start()
        line = self.outgoing.readline()
        timer.cancel()
        assert line, "the rank ended before it answered"
        answer = json.loads(line)
        if "error" in answer:
            raise {"TimeoutError": TimeoutError}.get(answer["error"], ValueError)(answer["text"])
        return answer["answer"]

    def call(self, name: str, **more):
        self.send({"call": name, **more})
        return self.end()

    def kill(self) -> None:
        if self.lives():
            os.kill(self.number, signal.SIGKILL)
        wait_until(lambda: not self.lives(), "a killed rank ends")

    def lives(self) -> bool:
        try:
            os.kill(self.number, 0)
        except ProcessLookupError:
            return False
        return True

    def leave(self) -> None:
        """End of its input, as at the end of a script."""
        if not self.incoming.closed:
            self.incoming.close()
        try:
            wait_until(lambda: not self.lives(), "a rank ends", 30)
        finally:
            self.outgoing.close()
            self.kill()


class Job:
    """Ranks on the given nodes."""

    def __init__(self, nursery: Nursery, store: Path, nodes: list[str], **more) -> None:
        store.mkdir()
        common = {"world": len(nodes), "nodes": nodes, "store": str(store), **more}
        self.ranks = [Rank(nursery, store, r, **common) for r in range(len(nodes))]
        for rank in self.ranks:
            rank.end()
        self.info = [rank.call("ready") for rank in self.ranks]
        self.directories = sorted({i["directory"] for i in self.info})

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def all(self, name: str, **more) -> list:
        for rank in self.ranks:
            rank.send({"call": name, **more})
        return [rank.end() for rank in self.ranks]

    def end(self) -> None:
        for rank in self.ranks:
            if not rank.incoming.closed:
                rank.incoming.close()
        for rank in self.ranks:
            rank.leave()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path) -> Iterator:
    jobs: list[Job] = []

    def make(nodes: list[str], **more) -> Job:
        jobs.append(Job(nursery, tmp_path / f"store{len(jobs)}", nodes, **more))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()
    for job in jobs:
        wait_until(lambda job=job: not any(map(os.path.exists, job.directories)), "their directories are gone")


def wait_until(ready, what: str, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.02)


def ids(groups: int, members: int, epoch: int = 0) -> list[list[int]]:
    return [[epoch, g, m] for g in range(groups) for m in range(members)]


def firsts(groups: int) -> list[list[int]]:
    return [[0, g, 0] for g in range(groups)]


@pytest.mark.parametrize("nodes", [["one"] * 4, ["left", "left", "right", "right"]], ids=["one node", "two nodes"])
def test_a_rollout_of_four_ranks(start, nodes: list[str]) -> None:
    """Every stage done once by four consumers; controllers on four ranks, warehouses on the lowest of a node."""
    job = start(nodes, consumers=4)
    held = [i["controllers"] for i in job.info]
    assert sorted(sum(held, [])) == ["generate", "logp", "reward", "update"] and all(len(h) == 1 for h in held)
    assert [i["holds"] for i in job.info] == [r == nodes.index(n) for r, n in enumerate(nodes)]
    if len(set(nodes)) > 1:
        assert all(a["host"] == "127.0.0.1" and a["port"] for a in job.info[0]["warehouses"])
    else:
        assert all(not a["port"] for a in job.info[0]["warehouses"]), "one machine needs no open port"
    job.all("open", epoch=0, groups=8, members=2)
    job[0].call("put", column="prompt", ids=firsts(8))
    for state in ("generate", "logp", "reward", "update"):
        got = job.all("lease", state=state)
        assert sorted(i for g in got for i in g["ids"]) == ids(8, 2)
        assert len({g["token"] for g in got}) == 4
        job.all("commit", state=state)
        wait_until(lambda s=state: job[3].call("remaining", state=s) == 0, f"state {state} is done")
    traffic = job.all("traffic")
    messages = [t["host"]["messages"] for t in traffic]
    assert all(0 < m < 0.6 * sum(messages) for m in messages), f"no process sees all the traffic: {messages}"
    payload = 4 * LENGTH * 16 * 4  # tokens by three states and logp by one
    read = sum(sum(t["read"].values()) for t in traffic)
    assert payload <= read <= 1.02 * payload
    remote = sum(t["read"]["remote"] for t in traffic)
    if len(set(nodes)) > 1:
        # Groups lie where their consumer works: only what several groups share would cross.
        assert remote <= 0.02 * payload
    else:
        assert remote == 0
    # A reader on the wrong node gets the same bytes.
    assert job[0].call("read", ids=ids(8, 2), columns=["tokens"])["tokens"] == [LENGTH] * 16
    job[0].call("clear", epoch=0)
    assert [u for u in job.all("used") if u] == [[0, 0]] * len(set(nodes))


def test_peers_share_one_lease(start) -> None:
    """Two consumers of two ranks each: one lease a pair, acknowledged when both are through."""
    job = start(["one"] * 4, consumers=2, peers=2)
    job.all("open", epoch=0, groups=4, members=1)
    job[0].call("put", column="prompt", ids=firsts(4))
    got = job.all("lease", state="generate")
    assert [g["ids"] for g in got] == [ids(4, 1)[:2]] * 2 + [ids(4, 1)[2:]] * 2
    assert got[0]["token"] == got[1]["token"] != got[2]["token"] == got[3]["token"]
    job[0].call("commit", state="generate", write=False)
    assert job[0].call("remaining", state="generate") == 4
    for rank in (1, 2, 3):
        job[rank].call("commit", state="generate", write=rank != 3)
    assert job[1].call("remaining", state="generate") == 0
    # A peer that dies takes nobody's acknowledgement along: the rows come again.
    for rank in (0, 1):
        job[rank].call("lease", state="reward")
    job[0].call("commit", state="reward", write=False)
    job[1].kill()
    assert job[0].call("remaining", state="reward") == 4


def test_a_producer_killed_between_reserve_and_commit_leaves_nothing(start) -> None:
    job = start(["one"] * 2)
    job.all("open", epoch=0, groups=2, members=2)
    job[1].call("reserve_and_hang", ids=ids(2, 2))
    used, reserved = job[0].call("used")
    assert used >= 4 * LENGTH * 4 and reserved == 1
    job[1].kill()
    wait_until(lambda: job[0].call("used") == [0, 0], "its reservation is back")
    with pytest.raises(ValueError, match="not committed"):
        job[0].call("read", ids=[[0, 0, 0]], columns=["tokens"])
    with pytest.raises(TimeoutError, match=r"'tokens' \(written by state 'generate'\) is missing for \(0, 0, 0\)"):
        job[0].call("lease", state="reward", deadline=0.1)
    job[0].call("put", column="tokens", ids=ids(2, 2))
    job[0].call("put", column="prompt", ids=firsts(2))
    assert job[0].call("lease", state="reward")["ids"] == ids(2, 2)


def test_a_killed_consumers_lease_is_delivered_again_within_a_second(start) -> None:
    job = start(["one"] * 3)
    job.all("open", epoch=0, groups=4, members=1)
    job[0].call("put", column="prompt", ids=firsts(4))
    assert job[2].call("lease", state="generate", max_rows=3)["ids"] == firsts(3)
    assert job[1].call("lease", state="generate", tag="rest")["ids"] == [[0, 3, 0]]
    with pytest.raises(TimeoutError, match=r"lease \d+ holds \(0, 0, 0\)"):
        job[1].call("lease", state="generate", deadline=0.2)
    job[1].send({"call": "lease", "state": "generate", "deadline": 20})
    time.sleep(0.2)
    begin = time.monotonic()
    job[2].kill()
    again = job[1].end()
    assert again["ids"] == firsts(3) and time.monotonic() - begin < 1.0
    job[1].call("commit", state="generate")
    assert job[1].call("remaining", state="generate") == 1


def test_nothing_is_left_after_exit_exception_and_kill(start) -> None:
    """Whatever ends the process that holds the warehouse. The fixture looks at the directories too."""
    endings = {
        "close": lambda job: job.all("close"),
        "exit": lambda job: job.end(),
        "exception": lambda job: job[0].send({"call": "fail"}),
        "kill": lambda job: job[0].kill(),
    }
    for name, end in endings.items():
        job = start(["one", "one"])
        job.all("open", epoch=0, groups=1, members=1)
        job[1].call("put", column="tokens", ids=[[0, 0, 0]])
        (directory,) = job.directories
        assert os.path.basename(directory).startswith(PREFIX) and os.stat(directory).st_mode & 0o077 == 0
        assert glob.glob(f"{directory}/segment-*") and all(
            os.stat(f).st_mode & 0o077 == 0 for f in glob.glob(f"{directory}/*")
        )
        end(job)
        wait_until(lambda d=directory: not os.path.exists(d), f"after {name} nothing is left")
        job.end()


def test_strangers_and_garbage_are_refused_and_the_service_lives_on(start) -> None:
    job = start(["left", "right"])
    right = Address(**job.info[0]["warehouses"][1])
    target = (right.host, right.port)
    with pytest.raises(PermissionError, match="another job's"):
        Channel(right, secrets.token_bytes(32), "elsewhere", "thief", 5)
    with socket.create_connection(target, 5) as connection:
        connection.recv(frames.NONCE)
        connection.sendall(os.urandom(4096))
        assert wait_for_end(connection)
    secret = bytes.fromhex(job.info[0]["secret"])
    oversized = frames.PREFIX.pack(frames.MAGIC, frames.VERSION, frames.MAX_HEAD + 1, 0)
    bomb = frames.PREFIX.pack(frames.MAGIC, frames.VERSION, 10, frames.MAX_PAYLOAD + 1)
    for bad in (os.urandom(64), oversized, bomb, frames.PREFIX.pack(frames.MAGIC, frames.VERSION, 3, 0) + b"{]}"):
        channel = Channel(right, secret, "elsewhere", "broken", 5)
        channel._socket.sendall(bad)
        assert wait_for_end(channel._socket)
        channel.close()
    channel = Channel(right, secret, "elsewhere", "rude", 5)
    for message in (Message("nonsense"), Message("put", {"epoch": 0}), Message("lease", {"state": "zzz"})):
        with pytest.raises(ValueError, match="no such message|malformed|does not control"):
            channel.ask(message)
    stats = channel.ask(Message("stats")).note
    channel.close()
    assert (stats["used"], stats["refused"]) == (0, {"stranger": 2, "malformed": 7})
    assert job[1].call("traffic")["refused"] == {"stranger": 2, "malformed": 7}
    job.all("open", epoch=0, groups=2, members=1)
    job[0].call("put", column="prompt", ids=firsts(2))
    assert len(job[1].call("lease", state="generate", min_rows=2)["ids"]) == 2


def wait_for_end(connection: socket.socket) -> bool:
    """Whether the other side ends the connection within 5 s."""
    connection.settimeout(5)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_at_the_cap_producers_wait_and_write_backs_do_not(start) -> None:
    """Room for two groups: the third waits until one is cleared; whoever has rows can always write back."""
    row = 4 * LENGTH + 4 * LENGTH + 4 + 6 * 64
    job = start(["one", "one"], capacity=2 * row + 1024)
    job.all("open", epoch=0, groups=3, members=1)
    job[0].call("put", column="prompt", ids=firsts(2))
    job[1].send({"call": "put", "column": "prompt", "ids": [[0, 2, 0]]})
    for state in ("generate", "logp", "reward"):
        assert job[0].call("lease", state=state, max_rows=2)["ids"] == firsts(2)
        job[0].call("commit", state=state)
    assert job[0].call("used")[0] <= 2 * row + 1024
    assert job[0].call("lease", state="update", max_rows=2)["ids"] == firsts(2)
    job[0].call("commit", state="update")
    job[0].call("clear", epoch=0, groups=[0])
    job[1].end()
    assert job[1].call("lease", state="generate")["ids"] == [[0, 2, 0]]
    with pytest.raises(ValueError, match="lower --rl-rollout-prompts or raise --rl-dock-gb"):
        job[0].call("open", epoch=1, groups=9, members=1)
        job[0].call("put", column="prompt", ids=[[1, g, 0] for g in range(9)])


def test_the_controllers_of_a_killed_rank_are_built_again(start) -> None:
    """Nothing acknowledged comes again, nothing else is lost; who waited goes on waiting at the next rank."""
    job = start(["one"] * 4)
    assert [i["controllers"] for i in job.info] == [["generate"], ["logp"], ["reward"], ["update"]]
    job.all("open", epoch=0, groups=8, members=1)
    job[0].call("put", column="prompt", ids=firsts(8))
    job[0].call("put", column="tokens", ids=firsts(4))
    assert job[3].call("lease", state="reward", max_rows=2)["ids"] == firsts(2)
    job[3].call("commit", state="reward")
    assert job[1].call("lease", state="reward", tag="held", max_rows=1)["ids"] == [[0, 2, 0]]
    assert job[3].call("lease", state="reward", tag="late", max_rows=1)["ids"] == [[0, 3, 0]]
    job[0].send({"call": "lease", "state": "reward", "deadline": 9, "min_rows": 5})
    time.sleep(0.3)
    begin = time.monotonic()
    job[2].kill()
    job[1].call("commit", state="reward", tag="held")  # its lease died with the controller; its work counts
    job[3].call("put", column="tokens", ids=firsts(8)[4:])
    got = job[0].end()
    # Row 3 is in the hands of a lease that nobody knows of any more: it is given out again, and first commit wins.
    assert got["ids"] == firsts(8)[3:] and time.monotonic() - begin < 9
    job[0].call("commit", state="reward")
    job[3].call("commit", state="reward", tag="late")
    assert [job[r].call("remaining", state="reward") for r in (0, 1, 3)] == [0, 0, 0]
    assert job[1].call("lease", state="reward")["ids"] == []
    held = [job[r].call("controllers") for r in (0, 1, 3)]
    assert held[2] == {"states": ["reward", "update"], "taken": 1} and held[0]["taken"] == held[1]["taken"] == 0
    # The rest of the rollout, and its end.
    assert job[1].call("lease", state="logp")["ids"] == firsts(8)
    job[1].call("commit", state="logp")
    assert job[0].call("lease", state="update")["ids"] == firsts(8)
    job[0].call("commit", state="update")
    for rank in (0, 1, 3):
        job[rank].call("clear", epoch=0)
    assert job[0].call("used") == [0, 0]
    # And again: the successor dies as well.
    job[3].kill()
    job[1].call("open", epoch=1, groups=2, members=1)
    job[1].call("put", column="tokens", ids=[[1, 0, 0], [1, 1, 0]])
    job[1].call("put", column="prompt", ids=[[1, 0, 0], [1, 1, 0]])
    assert job[1].call("lease", state="reward", min_rows=2)["ids"] == [[1, 0, 0], [1, 1, 0]]
    assert job[0].call("controllers") == {"states": ["generate", "reward"], "taken": 1}


def test_a_rank_with_controller_and_warehouse_dies(start) -> None:
    """Its machine's groups are generated again; its state goes on at another rank, which learns who is dead."""
    job = start(["left", "left", "right", "right"])
    job.all("open", epoch=0, groups=4, members=1)
    job[0].call("put", column="prompt", ids=firsts(4))
    assert job[1].call("lease", state="generate", min_rows=4)["ids"] == firsts(4)
    job[1].call("commit", state="generate")
    assert job[0].call("lease", state="reward", min_rows=4)["ids"] == firsts(4)
    job[0].call("commit", state="reward")
    job[2].kill()  # the controller of "reward", and the warehouse of groups 2 and 3
    for state in ("generate", "reward"):  # the successor comes to know it too
        wait_until(lambda s=state: job[0].call("lost", state=s) == [[0, 2], [0, 3]], "a machine's groups are lost", 20)
    job[0].call("put", column="prompt", ids=firsts(4)[2:])
    for state in ("generate", "reward"):
        got = job[1].call("lease", state=state, min_rows=2)
        assert got["ids"] == firsts(4)[2:], f"{state} does what was lost, and nothing else"
        job[1].call("commit", state=state)
        assert job[0].call("remaining", state=state) == 0
    assert "reward" in job[3].call("controllers")["states"]
