"""How a job ends: with nothing left behind, and soon when one rank fails."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

SHARED_MEMORY = Path("/dev/shm")
# Made by torch for itself: its compiler's cache, and torchrun's folder of logs, which torchrun leaves.
OF_TORCH = ("torchinductor_", "torchelastic_")
# By Python's resource tracker: semaphores, shared memory. nanobind counts triton's own objects at every end.
LEAKED = re.compile(r"leaked (?!(\d+ )?(instance|type|function|keep_alive))")
DEADLINE = 60.0  # seconds from the error on one rank to the end of the job

# Runs pretrain_gpt.py; on rank 1, the second call of a stage's `run` fails, which is in iteration 2.
FAILING = """
import importlib, os, runpy
module, _, name = {stage!r}.partition(":")
stage = getattr(importlib.import_module(f"mindspeed_rl_plugin.stages.{{module}}"), name)
original, calls = stage.run, []

def fails(self, *args, **named):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 2:
        open({mark!r}, "w").close()
        raise RuntimeError("disk of rank 1 is full")
    return original(self, *args, **named)

stage.run = fails
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.fixture
def private(tmp_path, monkeypatch):
    """A folder for temporary files, empty; jobs of this test use it. Short, for sockets lie in it."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def nothing_left(private):
    """Call it with a job that has ended: it left no process, no temporary file and no shared memory."""
    before = set(SHARED_MEMORY.iterdir())

    def check(job) -> None:
        deadline = time.monotonic() + 20
        while (alive := of_session(job)) and time.monotonic() < deadline:
            time.sleep(0.2)  # graders end themselves when their rank is gone
        assert alive == []
        assert [p.name for p in private.iterdir() if not p.name.startswith(OF_TORCH)] == []
        # Other jobs on this machine hold theirs: mapped, or named to the guard that removes it.
        left = set(SHARED_MEMORY.iterdir()) - before
        held = "".join(held_by(p) for p in psutil.pids())
        assert [p.name for p in left if str(p) not in held and p.exists()] == []

    return check


def of_session(job) -> list[str]:
    """Command lines of the processes that work in the job's private folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == os.environ["TMPDIR"] and process.pid != os.getpid():
                found.append(" ".join(process.cmdline())[:200])
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def held_by(pid: int) -> str:
    """What a process has mapped and what its command line names."""
    try:
        return Path(f"/proc/{pid}/maps").read_text() + Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_a_job_leaves_nothing_behind(job, nothing_left):
    done = job("--train-iters", "1", "--rl-generate-tp", "2")
    log = done.run().log
    assert not LEAKED.search(log) and "Traceback" not in log, "the engine was ended, not dropped"
    nothing_left(done)


@pytest.mark.parametrize(
    "stage",
    [
        "reward:Reward",
        pytest.param("generate:Generate", marks=pytest.mark.slow),
        pytest.param("logprobs:TokenPass", marks=pytest.mark.slow),
        pytest.param("update:Update", marks=pytest.mark.slow),
    ],
)
def test_an_error_on_one_rank_ends_the_job_with_its_message(job, nothing_left, tmp_path, stage):
    script, mark = tmp_path / "failing.py", tmp_path / "failed"
    failing = job("--train-iters", "3", "--rl-generate-tp", "2", "--rl-wait-timeout", "600", script=script)
    pretrain = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"
    script.write_text(FAILING.format(stage=stage, mark=str(mark), script=str(pretrain)))
    failing.start()
    result = failing.wait(200)
    took = time.time() - mark.stat().st_mtime
    assert result.code != 0 and took < DEADLINE, f"{took:.0f} s"
    assert "RuntimeError: disk of rank 1 is full" in result.log
    assert "[rank1]" in result.log, "torch names the rank in its traceback"
    nothing_left(failing)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_job_that_is_killed_leaves_nothing_behind(job, nothing_left, how):
    killed = job("--train-iters", "50", "--rl-generate-tp", "2")
    killed.start()
    events, deadline = killed.run_dir / "events-rank1.jsonl", time.monotonic() + 200
    while not (events.exists() and '"iteration": 2' in events.read_text()):
        running = time.monotonic() < deadline and killed.processes[0].poll() is None
        assert running, killed.log_file(0).read_text()[-6000:]
        time.sleep(0.05)
    if how == signal.SIGTERM:  # of the launcher, which passes it on
        os.kill(killed.processes[0].pid, how)
    else:
        os.kill(killed.rank_pid(0), how)
    assert killed.wait(60).code != 0
    nothing_left(killed)
