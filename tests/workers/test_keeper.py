"""The keeper ends what a worker's code has started, in whatever way the worker or its parent ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import gone
from kept import made

from mindspeed_rl_plugin.workers.process import wait_for

PARENT = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from kept import made
print(*made("deaf")[1], flush=True)
time.sleep(600)
"""


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
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    ids = [*map(int, parent.stdout.readline().split())]
    assert len(ids) == 3 and not gone(ids, 0.0)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(ids)
