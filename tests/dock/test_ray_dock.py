"""The dock over Ray: real Ray, real ranks. The ranks run this file too: `python test_ray_dock.py SCENARIO OUT`.

One cluster for the module, which jobs join by RAY_ADDRESS; other jobs start a cluster of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from mindspeed_rl_plugin.dock import ColumnSpec, Limits, LocalDock, StateSpec, make_docks
from mindspeed_rl_plugin.dock.distributed import ray_nodes
from mindspeed_rl_plugin.dock.distributed.frames import Message
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

ROOT = Path(__file__).parents[2]
COLUMNS = [
    ColumnSpec("prompt", torch.int32, "group", ragged=True),
    ColumnSpec("tokens", torch.int32, "token", ragged=True),
    ColumnSpec("score", torch.float32, "sample", ragged=False, trailing=(2,)),
    ColumnSpec("logp", torch.float32, "token", ragged=True),
]
STATES = [
    StateSpec("generate", ("prompt",), ("tokens",)),
    StateSpec("grade", ("tokens", "prompt"), ("score",)),
    StateSpec("look", ("tokens",), ()),
    StateSpec("train", ("tokens", "score"), ("logp",), whole_groups=True),
]
GROUPS, MEMBERS = 8, 2
BIG = 20_000  # tokens: rows of so many are written into reserved memory


def ids_of(epoch: int, groups=range(GROUPS)) -> tuple[SampleId, ...]:
    return tuple(SampleId(epoch, g, m) for g in groups for m in range(MEMBERS))


def column(name: str, sample: SampleId) -> torch.Tensor:
    """The one true value of a cell."""
    seed = hash((name, sample.epoch, sample.group, 0 if name == "prompt" else sample.member)) % 2**31
    noise = torch.Generator().manual_seed(seed)
    length = BIG + sample.group * 7 + sample.member
    if name == "prompt":
        return torch.randint(99, (sample.group + 1,), generator=noise, dtype=torch.int32)
    if name == "tokens":
        return torch.randint(99, (length,), generator=noise, dtype=torch.int32)
    return torch.rand(2 if name == "score" else length, generator=noise)


def rows_of(ids: tuple[SampleId, ...], *names: str) -> Rows:
    columns = {}
    for name in names:
        parts = [column(name, i) for i in ids]
        columns[name] = torch.stack(parts) if name == "score" else Ragged.from_rows(parts)
    return Rows(ids, columns)


def check_rows(rows: Rows) -> None:
    for name, found in rows.columns.items():
        expected = rows_of(rows.ids, name)[name]
        values = (found.values, expected.values) if isinstance(found, Ragged) else (found, expected)
        assert torch.equal(*values), name


def same(one: object, two: object) -> bool:
    """Equality of nested plain things with tensors."""
    if isinstance(one, Mapping):
        return one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


class Ranks:
    """What the scenarios run on: one of two ranks."""

    def __init__(self, nodes: int) -> None:
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        named = {"node": f"node {self.rank}"} if nodes == 2 else {}
        division, limits = (self.rank, 2), Limits(segment_bytes=8 << 20)
        begin = time.monotonic()
        (self.dock,) = make_docks(
            COLUMNS, STATES, [division], medium="ray", group=dist.group.WORLD, deadline=120, limits=limits, **named
        )
        print(f"rank {self.rank} has its dock after {time.monotonic() - begin:.1f} s", flush=True)
        self.net = self.dock._net

    def gather(self, value: object) -> list:
        found = [None, None]
        dist.all_gather_object(found, value)
        return found

    def actors(self) -> list[psutil.Process]:
        """Processes of the warehouses of this job, found by the lock that they hold in its directory."""
        found, lock = [], f"{self.net.settings.directory}/lock"
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if "WarehouseActor" in "".join(process.cmdline()) and lock in [f.path for f in process.open_files()]:
                    found.append(process)
        return found

    def kill(self) -> None:
        """Kill -9 the warehouse of this machine."""
        (actor,) = self.actors()
        actor.kill()
        actor.wait(10)

    def check_empty(self) -> None:
        """No warehouse holds a byte; all ranks look before any goes on."""
        assert not any(self.stats(w)["used"] for w in self.net.directory.warehouses)
        dist.barrier()

    def stats(self, warehouse: int) -> Mapping:
        return self.net.warehouse(warehouse, Message("stats")).note

    def work(self, state: str) -> list[SampleId]:
        """This rank's share of a state, leased until nothing is left; checked bit for bit."""
        done = []
        while True:
            lease = self.dock.lease(state, max_rows=4, deadline=60)
            if not len(lease):
                return done
            check_rows(lease.rows)
            back = {"generate": "tokens", "grade": "score", "train": "logp"}.get(state)
            self.dock.commit(lease, None if back is None else rows_of(lease.rows.ids, back))
            done += lease.rows.ids

    def once(self, state: str, epoch: int) -> None:
        """Every row of an epoch goes to exactly one rank, once."""
        every = sum(self.gather(self.work(state)), [])
        assert sorted(every) == list(ids_of(epoch)), state


def local_dock(epoch: int) -> LocalDock:
    """What the dock must equal after all states."""
    dock = LocalDock(COLUMNS, STATES)
    dock.open(epoch, GROUPS, MEMBERS)
    dock.put(rows_of(ids_of(epoch), "prompt"))
    for state, back in (("generate", "tokens"), ("grade", "score"), ("look", None), ("train", "logp")):
        lease = dock.lease(state, deadline=0)
        dock.commit(lease, None if back is None else rows_of(lease.rows.ids, back))
    return dock


def semantics(job: Ranks, epoch: int = 0) -> None:
    """put, lease, commit, read, snapshot, clear, as LocalDock does them."""
    dock, half = job.dock, range(job.rank * GROUPS // 2, (job.rank + 1) * GROUPS // 2)
    dock.open(epoch, GROUPS, MEMBERS)
    dock.put(rows_of(ids_of(epoch, half), "prompt"))
    for state in ("generate", "grade", "look", "train"):
        job.once(state, epoch)
        assert dock.remaining(state) == 0
    check_rows(dock.read(ids_of(epoch), ["logp", "prompt", "score"]))
    if job.rank == 0:
        expected, found = local_dock(epoch).snapshot(), dock.snapshot()
        assert same(expected, found), (expected.keys(), found.keys())
    dist.barrier()
    dock.clear(epoch)
    dock.clear(epoch)
    dist.barrier()
    job.check_empty()


def crashes(job: Ranks, epoch: int = 1) -> None:
    """The warehouses die while rows are held, and again while rows are put."""
    dock, mine = job.dock, ids_of(epoch, range(job.rank * GROUPS // 2, (job.rank + 1) * GROUPS // 2))
    leads = job.rank == job.net.settings.warehouse  # the machine's lowest rank
    dock.open(epoch, GROUPS, MEMBERS)
    dock.put(rows_of(mine, "prompt", "tokens"))
    dist.barrier()
    held = dock.lease("grade", max_rows=4, deadline=30)
    dist.barrier()
    before = {w: job.stats(w)["seq"] for w in job.net.directory.warehouses}
    dist.barrier()
    if leads:
        job.kill()
    dist.barrier()
    begin = time.monotonic()
    if len(job.net.directory.warehouses) == 1:
        # Nobody answers for the warehouse now; its memory is still mapped.
        looked = dock.lease("look", max_rows=4, deadline=30)
        assert not job.actors(), "a read of mapped rows waited for the warehouse"
        check_rows(looked.rows)
        dock.release(looked)
    dock.commit(held, rows_of(held.rows.ids, "score"))
    print(f"rank {job.rank} wrote again {time.monotonic() - begin:.1f} s after the kill", flush=True)
    dist.barrier()
    after = {w: job.stats(w)["seq"] for w in job.net.directory.warehouses}
    assert all(after[w] > before[w] for w in after), (before, after)
    check_rows(dock.read(ids_of(epoch), ["prompt", "tokens"]))
    dist.barrier()
    rest = sum(job.gather([*held.rows.ids, *job.work("grade")]), [])
    assert sorted(rest) == list(ids_of(epoch)), "delivered twice, or lost"

    # Again, in the middle of puts.
    dock.open(epoch + 1, GROUPS, MEMBERS)
    for number, group in enumerate(range(job.rank * GROUPS // 2, (job.rank + 1) * GROUPS // 2)):
        if leads and number == 2:
            os.kill(job.actors()[0].pid, signal.SIGKILL)
        dock.put(rows_of(ids_of(epoch + 1, [group]), "prompt"))
        dock.put(rows_of(ids_of(epoch + 1, [group]), "tokens"))
    dist.barrier()
    every = sum(job.gather(job.work("look")), [])
    assert sorted(every) == [*ids_of(epoch), *ids_of(epoch + 1)]
    dist.barrier()
    dock.clear(epoch)
    dock.clear(epoch + 1)
    dist.barrier()
    job.check_empty()
    semantics(job, epoch + 2)


def remote_bytes(job: Ranks) -> int:
    return sum(n for (*_, kind), n in job.net.traffic.read.items() if kind == "remote")


def run_rank(scenario: str, out: str) -> None:
    nodes = 2 if "two" in scenario else 1
    job = Ranks(nodes)
    directory = job.net.directory
    Path(out, f"directory{job.rank}").write_text(job.net.settings.directory)
    assert len(directory.warehouses) == nodes
    assert not set(directory.warehouses.values()) & set(directory.controllers.values())
    semantics(job)
    assert (remote_bytes(job) > 0) == (nodes == 2)
    if "killed" in scenario:
        Path(out, f"ready{job.rank}").touch()
        time.sleep(600)
    crashes(job)
    dist.barrier()
    job.dock.close()
    job.dock.close()
    Path(out, f"done{job.rank}").touch()


class Job:
    """Two ranks of a scenario, and what they leave behind."""

    def __init__(self, scenario: str, out: Path, environment: Mapping[str, str]) -> None:
        self.out = out
        port = 20000 + (os.getpid() * 37 + int(time.monotonic() * 10)) % 12000  # below those of outgoing connections
        base = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        common = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        common["PYTHONPATH"], common["PYTHONHASHSEED"] = str(ROOT), "0"
        common["TMPDIR"] = self.temporary = tempfile.mkdtemp(dir="/tmp")  # short: Ray's sockets lie deep below it
        self.logs = [out / f"rank{r}.log" for r in range(2)]
        self.ranks = [
            subprocess.Popen(
                [sys.executable, __file__, scenario, str(out)],
                env={**base, **common, **environment, "RANK": str(rank)},
                stdout=self.logs[rank].open("w"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank in range(2)
        ]

    def wait(self, seconds: float, *, name: str = "done") -> None:
        end = time.monotonic() + seconds
        while not all((self.out / f"{name}{r}").exists() for r in range(2)):
            assert time.monotonic() < end, f"not {name} after {seconds} s: {self.log}"
            assert not any(p.poll() for p in self.ranks), self.log
            time.sleep(0.1)
        print(self.log)

    @property
    def log(self) -> str:
        return "\n".join(log.read_text()[-4000:] for log in self.logs)

    def below(self) -> list[psutil.Process]:
        return [c for p in self.ranks for c in psutil.Process(p.pid).children(recursive=True)]

    def left(self) -> list[str]:
        """Directories of the job, and processes that hold one of them open or work on Ray's files there."""
        places = {Path(self.temporary), *(Path(f.read_text()) for f in self.out.glob("directory*"))}
        found = [str(p) for p in places if p.exists() and (p != Path(self.temporary) or list(p.iterdir()))]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                files = [*process.cmdline(), *(f.path for f in process.open_files())]
                if any(str(p) in f for f in files for p in places):
                    found.append(f"{process.pid} {process.cmdline()[:3]}")
        return found

    def kill(self) -> None:
        for process in self.ranks:
            if process.poll() is None:
                process.kill()
            process.wait()

    def check_gone(self) -> None:
        """Soon nothing is left of an ended job."""
        end = time.monotonic() + 20
        while left := self.left():
            assert time.monotonic() < end, left
            time.sleep(0.2)
        Path(self.temporary).rmdir()


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """A cluster of a user, by the variables that name it."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32}
    order = {"address": "", "own": True, "namespace": "tests", "host": "127.0.0.1"}
    keeper = ray_nodes.Keeper(order, {**ray_nodes.OWN_CLUSTER, **token})
    try:
        address = keeper.ask({"join": {}, "seconds": 120}, "Ray")
        assert not address["error"], address
        yield {**token, "RAY_ADDRESS": address["address"]}
    finally:
        keeper.close()


@pytest.mark.parametrize("scenario", ["one", pytest.param("two", marks=pytest.mark.slow)])
def test_two_ranks_join_a_cluster(scenario, cluster, tmp_path):
    """One warehouse, or two of them with TCP in between: as LocalDock, also over kills of the warehouses."""
    job = Job(scenario, tmp_path, cluster)
    try:
        job.wait(150)
        assert [p.wait(20) for p in job.ranks] == [0, 0], job.log
    finally:
        job.kill()
    job.check_gone()


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["one killed", "two killed"])
def test_a_cluster_of_the_job_dies_with_its_ranks(scenario, tmp_path):
    """Plain torchrun: a rank starts Ray, a second machine's lowest rank joins; after kill -9 nothing is left."""
    job = Job(scenario, tmp_path, {})
    try:
        job.wait(240, name="ready")
        below = job.below()
        names = [" ".join(p.cmdline()) for p in below]
        nodes = 2 if "two" in scenario else 1
        for name, number in (("gcs/gcs_server ", 1), ("raylet/raylet ", nodes), ("WarehouseActor", nodes)):
            assert sum(name in n for n in names) == number, (name, names)
        assert len(job.left()) > nodes
    finally:
        job.kill()
    gone, alive = psutil.wait_procs(below, timeout=20)
    assert not alive, f"{alive} outlive their job"
    job.check_gone()


def test_ray_that_cannot_be_joined_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", "ray://somewhere:10001")
    with pytest.raises(ValueError, match="ray://somewhere:10001.*host:port"):
        make_docks(COLUMNS, STATES, [(0, 1)], medium="ray")


def test_a_keeper_is_heard_by_a_rank_with_many_open_files():
    """A descriptor from 1024 on, which `select.select` does not take: a line, silence, the end."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2048:
        pytest.skip("this process may not open so many files")
    low, told = os.pipe()
    keeper = ray_nodes.Keeper.__new__(ray_nodes.Keeper)
    with open(fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1100), "rb") as said:
        keeper._process, keeper._unread = types.SimpleNamespace(stdout=said), b""
        os.write(told, b"one line\n")
        assert keeper._line(time.monotonic() + 5) == b"one line"
        assert keeper._line(time.monotonic() + 0.01) is None
        os.close(told)
        assert keeper._line(time.monotonic() + 5) == b""
    os.close(low)


def test_missing_ray_is_named(monkeypatch):
    monkeypatch.setattr(ray_nodes.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install ray"):
        make_docks(COLUMNS, STATES, [(0, 1)], medium="ray")


if __name__ == "__main__":
    run_rank(*sys.argv[1:])
