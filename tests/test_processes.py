"""Processes that still run; those whose launcher is gone, or that are interrupted while they wait in a library."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from mindspeed_rl_plugin.processes import began, scratch

STUCK = """
import hashlib
from mindspeed_rl_plugin import processes
processes.attend()
print(processes.os.getpid(), flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # in C, where no exception is raised
"""
GENERATOR = """
import argparse
import sys
from mindspeed_rl_plugin.config import add_flags
from mindspeed_rl_plugin.launch import generator_ranks
wait = generator_ranks.wait_for_address
generator_ranks.wait_for_address = lambda deadline: print("waits", flush=True) or wait(deadline)
sys.argv = ["script.py", "--rl-algorithm", "grpo", "--rl-schedule", "async", "--rl-generators", "1"]
generator_ranks.early._args = add_flags(argparse.ArgumentParser()).parse_args(sys.argv[1:])  # by `check_flags`
generator_ranks.leave_if_generator()
"""


def test_a_number_and_its_beginning_name_one_process() -> None:
    child = subprocess.Popen(["sleep", "100"])
    assert began(child.pid) is not None and began(child.pid) >= began(os.getpid())
    child.kill()
    while began(child.pid) is not None:  # a zombie has ended
        time.sleep(0.01)
    child.wait()
    assert began(child.pid) is None


def test_folders_of_processes_that_were_killed_are_removed_and_those_of_others_stay(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch("engine") as mine:
        ours, _, rest = Path(mine).name.partition(f"-{os.getpid()}-")
        since, _, _ = rest.partition("-")
        dead = subprocess.Popen(["true"])
        dead.wait()
        for left in (f"{ours}-{dead.pid}-77-x_y", f"{ours}-{os.getpid()}-{int(since) + 1}-x-y"):
            (tmp_path / left / "more").mkdir(parents=True)
        (tmp_path / f"another-{dead.pid}-77-x").mkdir()
        with scratch("engine") as second:
            there = {mine, second, str(tmp_path / f"another-{dead.pid}-77-x")}
            assert set(map(str, tmp_path.iterdir())) == there
    assert [path.name for path in tmp_path.iterdir()] == [f"another-{dead.pid}-77-x"]


@pytest.mark.parametrize(
    ("torchrun", "between"), [(True, []), (True, ["bash", "-c", '"$@"; exit $?', "wrapper"]), (False, [])], ids=str
)
def test_ranks_end_with_their_torchrun_and_with_no_other_launcher(torchrun, between, tmp_path) -> None:
    rank = [*between, sys.executable, "-c", STUCK]
    own = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")} if torchrun else {}
    script = f"import os, subprocess\nsubprocess.Popen({rank}, env={{**os.environ, **{own}}}).wait()"
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pid = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()
    end = time.monotonic() + (60 if torchrun else 2.5)
    while began(pid) is not None and time.monotonic() < end:
        time.sleep(0.05)
    gone = began(pid) is None
    os.kill(pid, signal.SIGKILL) if not gone else None
    assert gone == torchrun
    said = launcher.stderr.read().decode()
    line = f"\n[rl] torchrun (process {launcher.pid}) is gone: process {pid}, which it started, ends too\n"
    assert said.endswith(line) if torchrun else "[rl]" not in said


def test_a_generator_that_waits_for_the_trainers_is_interrupted() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    env = {**os.environ, **ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    generator = subprocess.Popen([sys.executable, "-c", GENERATOR], env=env, stdout=subprocess.PIPE, text=True)
    assert generator.stdout.readline() == "waits\n"
    time.sleep(0.5)  # until it is inside
    generator.send_signal(signal.SIGINT)
    assert generator.wait(30) == 128 + signal.SIGINT, "trainers may take 600 s"
