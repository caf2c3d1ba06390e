"""Once a machine: one process reads, the others map; what is in use stays as it is; whoever is left goes on."""

import multiprocessing
import os
import secrets
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dock_ranks
import pytest

from mindspeed_rl_plugin import processes
from mindspeed_rl_plugin.dock import Gone
from mindspeed_rl_plugin.dock.rpc import Process
from mindspeed_rl_plugin.weights.machine_staging import Shared

NBYTES = 5000


class Machine:
    """Processes of one machine, which are threads here; counts what is read. slow: seconds of a read."""

    def __init__(self, secret: bytes = b"of this job", slow: float = 0.0) -> None:
        self.me = Process("outside", -1, processes.machine(), secret)
        self.made, self.read, self.slow, self.begun = [], [], slow, threading.Event()
        self.error: Exception | None = None

    def process(self, key: str = "key") -> Shared:
        self.made.append(Shared(self.me, key, NBYTES, self.fill))
        return self.made[-1]

    def fill(self, version, seconds, memory) -> bytes:
        if self.error is not None:
            raise self.error
        self.begun.set()
        time.sleep(self.slow)
        memory[:] = version
        self.read.append(version)
        return b"about %d" % version


@pytest.fixture
def machine():
    made = Machine(secret=secrets.token_bytes(16))  # of which the names of its sockets are made
    yield made
    for shared in made.made:
        shared.close()


def test_one_reads_and_all_have_it(machine) -> None:
    machine.slow = 0.2
    each = [machine.process() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda shared: shared.get(3, 20), each))
    assert machine.read == [3] and sorted(read for *_, read in got) == [0, 0, 0, NBYTES]
    assert all((memory == 3).all() and len(memory) == NBYTES and about == b"about 3" for memory, about, _ in got)
    assert machine.process("another key").get(3, 20)[2] == NBYTES, "who wants other bytes reads for itself"


@pytest.mark.parametrize("reader_is_first", [True, False])
def test_what_a_process_uses_is_not_written(machine, reader_is_first: bool) -> None:
    first, second = machine.process(), machine.process()
    if not reader_is_first:
        second.get(0, 20)
    old = first.get(0, 20)[0]
    for version in (1, 2):
        assert (second.get(version, 20)[0] == version).all() and (old == 0).all()
    assert (first.get(2, 20)[0] == 2).all() and machine.read == [0, 1, 2]
    for version in range(3, 9):  # together, so that two buffers are enough
        assert (first.get(version, 20)[0] == version).all() and (second.get(version, 20)[0] == version).all()
    reader = next(shared for shared in machine.made if shared._reader)
    assert len(reader._reader._buffers) <= 2


def test_readers_come_and_go(machine) -> None:
    """One process stays while the others, each of which reads once, come and go; of what they leave nothing is kept."""
    stays, mapped = machine.process(), []
    for version in range(5):
        reader = machine.process()
        kept = reader.get(version, 20)[0]
        assert (stays.get(version, 20)[0] == version).all()
        reader.close()
        assert (kept == version).all(), "what is mapped stays"
        del kept
        mapped.append(Path("/proc/self/maps").read_text().count("memfd:rl-dock"))
    assert machine.read == [0, 1, 2, 3, 4] and mapped[-1] == mapped[0]
    assert stays.get(5, 20)[2] == NBYTES, "the last one reads"


def test_the_reader_leaves_while_it_reads_for_another(machine) -> None:
    machine.slow = 0.5
    first, second = machine.process(), machine.process()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(first.get, 0, 20)
        assert machine.begun.wait(20)
        waits = pool.submit(second.get, 0, 20)
        time.sleep(0.1)
        first.close()
        assert waits.result(timeout=10)[2] == NBYTES and machine.read == [0, 0]


@pytest.fixture
def hanging(machine, tmp_path: Path):
    """A process that reads and does not end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dock_ranks"])
    ours, theirs = context.Pipe()
    process = context.Process(target=dock_ranks.reader_main, args=(theirs, str(tmp_path / "log"), machine.me.secret))
    process.start()
    assert ours.poll(60) and ours.recv() == "reads"
    yield process
    process.kill()
    process.join(10)


def test_a_reader_that_is_killed_holds_nobody_up(machine, hanging) -> None:
    shared = machine.process()
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(shared.get, 1, 30)
        threading.Event().wait(0.3)
        assert not got.done()
        hanging.kill()
        memory, _, read = got.result(timeout=10)
    assert (memory == 1).all() and read == NBYTES


@pytest.mark.parametrize("before", [False, True])
def test_a_reader_that_is_stopped_is_passed_over(machine, hanging, monkeypatch, capfd, before: bool) -> None:
    """The whole process, and not its main thread: one that asks it already, and one that comes later. One of the
    others reads for all of them; what the first one does when it wakes changes nothing of theirs."""
    for module in ("dock.rpc", "weights.machine_staging"):
        monkeypatch.setattr(f"mindspeed_rl_plugin.{module}.ALIVE_SECONDS", 0.5)
    others, begin = [machine.process() for _ in range(3)], time.monotonic()
    if before:
        os.kill(hanging.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(other.get, 1, 30) for other in others]
        threading.Event().wait(1.2)
        assert before or not any(wait.done() for wait in waits), "one that reads for long is not passed over"
        os.kill(hanging.pid, signal.SIGSTOP)
        got = [wait.result(timeout=15) for wait in waits]
    assert time.monotonic() - begin < 25, "and not the 30 s that they may take"
    assert sorted(read for *_, read in got) == [0, 0, NBYTES] and machine.read == [1]
    assert capfd.readouterr().out.count("gives no sign of life for 0.5 s: another process reads them now") == 3
    os.kill(hanging.pid, signal.SIGCONT)
    assert all((memory == 1).all() for memory, *_ in got)
    assert all((other.get(2, 20)[0] == 2).all() for other in others) and machine.read == [1, 2]


def test_a_stopped_reader_does_not_outlast_the_deadline(machine, hanging, monkeypatch) -> None:
    for module in ("dock.rpc", "weights.machine_staging"):
        monkeypatch.setattr(f"mindspeed_rl_plugin.{module}.ALIVE_SECONDS", 60.0)
    os.kill(hanging.pid, signal.SIGSTOP)
    machine.error, begin = TimeoutError("late"), time.monotonic()
    with pytest.raises(TimeoutError):
        machine.process().get(1, 1.0)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    ("error", "others"),
    [
        (Gone(1, 5), Gone),
        (TimeoutError("late"), TimeoutError),
        (ConnectionError("rank 1 is gone"), ConnectionError),
        (MemoryError("start fewer"), ConnectionError),
    ],
)
def test_an_error_of_the_read_reaches_all(machine, error, others) -> None:
    first, second = machine.process(), machine.process()
    first.get(0, 20)
    second.get(0, 20)
    machine.error = error
    for shared, kind in ((first, type(error)), (second, others)):
        with pytest.raises(kind, match=str(error)):
            shared.get(1, 20)
    machine.error = None
    assert (second.get(2, 20)[0] == 2).all() and (first.get(2, 20)[0] == 2).all()
