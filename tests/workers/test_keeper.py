"""The keeper ends what a worker's code has started, in whatever way the worker or its parent ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mindspeed_rl_plugin.workers.process import Program, Worker, wait_for

HERE = Path(__file__).parent
PARENT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from test_keeper import made
print(*made("deaf")[1], flush=True)
time.sleep(600)
"""


def serve(connection, lifeline):
    """A worker that starts a process in a session of its own, and one below that, which outlives the one above it;
    answers with their ids; then its message says how it ends."""
    from mindspeed_rl_plugin.workers.child import Parent
    from mindspeed_rl_plugin.workers.keeper import keep

    keep(connection, lifeline, 0.5)
    parent = Parent(connection, None)
    parent.receive()
    parent.send((None, None))
    how = parent.receive()
    sleep = subprocess.Popen(["sleep", "600"], start_new_session=True)
    shell = subprocess.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True)
    parent.send([os.getpid(), sleep.pid, int(shell.stdout)])
    if how == "exit":
        os._exit(3)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    parent.receive()


def made(how="wait"):
    """A worker, and the ids of all below it."""
    worker = Worker(Program("test_keeper:serve", None, list[int], "a worker", ValueError, None, 5.0), "", "nothing")
    while not worker.ready():
        wait_for([worker], time.monotonic() + 60)
    worker.call(how, 60.0)
    while (found := worker.answer()) is None:
        wait_for([worker], time.monotonic() + 60)
    return worker, found


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


def gone(ids, seconds=10.0):
    """Whether all of them are, or soon."""
    end = time.monotonic() + seconds
    while left := [i for i in ids if psutil.pid_exists(i) and psutil.Process(i).status() != psutil.STATUS_ZOMBIE]:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return not left


@pytest.mark.parametrize("how, code", [("exit", "exited with code 3"), ("signal", "died of signal 11 (SIGSEGV)")])
def test_when_the_worker_ends(how, code):
    worker, ids = made(how)
    worker.until = time.monotonic() + 30
    while (answer := worker.answer()) is None:
        wait_for([worker], time.monotonic() + 30)
    assert answer == f"ended its process, which {code}"
    assert gone(ids, 0.0)


@pytest.mark.parametrize("how", ["wait", "deaf"])
def test_when_it_is_closed(how):
    worker, ids = made(how)
    worker.close()
    assert gone(ids, 0.0)


def test_when_its_keeper_is_told_to_kill():
    worker, ids = made()
    os.kill(worker.pid, signal.SIGTERM)
    assert gone(ids)
    worker.close()


def test_when_its_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(HERE)], stdout=subprocess.PIPE, text=True)
    ids = [*map(int, parent.stdout.readline().split())]
    assert len(ids) == 3 and not gone(ids, 0.0)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(ids)
