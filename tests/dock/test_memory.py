"""What a job leaves in shared memory when it is killed with everything that would clean up, and who removes it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindspeed_rl_plugin.dock.distributed import memory
from mindspeed_rl_plugin.dock.distributed.memory import OWNER, PREFIX, PrivateDirectory

# The module alone: it needs nothing of the package, which takes seconds to import.
OWNER_PROCESS = """
import runpy, sys, time
made = runpy.run_path(sys.argv[1])["PrivateDirectory"](sys.argv[2])
open(f"{made.path}/segment-0", "wb").write(bytes(4096))
print(made.path, made._guard.pid, flush=True)
time.sleep(60)
"""


class Job:
    """A process with a directory under `root`, and the guard that would remove it."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-c", OWNER_PROCESS, memory.__file__, str(root)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        path, guard = self.process.stdout.readline().split()
        self.path, self.guard = Path(path), int(guard)

    def kill(self, *, guard: bool) -> None:
        """As a batch system does it: the guard cannot run first."""
        if guard:
            os.kill(self.guard, signal.SIGKILL)
        self.process.kill()
        self.process.wait(10)
        self.process.stdout.close()


def test_what_is_left_when_guard_and_owner_are_killed_goes_with_the_next_job(tmp_path: Path) -> None:
    dead, living = Job(tmp_path), Job(tmp_path)
    try:
        dead.kill(guard=True)
        assert (dead.path / "segment-0").exists(), "nobody was left to remove it"
        foreign = tmp_path / "somebody-elses"
        unlocked = tmp_path / f"{PREFIX}of-an-older-version"
        for path in (foreign, unlocked):
            path.mkdir()
        (foreign / OWNER).touch()
        (tmp_path / f"{PREFIX}link").symlink_to(foreign)
        mine = PrivateDirectory(tmp_path)
        assert not dead.path.exists()
        assert (living.path / "segment-0").exists() and (foreign / OWNER).exists() and unlocked.exists()
        assert memory.sweep(tmp_path) == [], "this process holds its own"
        mine.close()
        mine.close()
        assert not os.path.exists(mine.path)
    finally:
        living.kill(guard=False)
    end = time.monotonic() + 10
    while living.path.exists():
        assert time.monotonic() < end, "the guard removes it"
        time.sleep(0.01)


def test_a_directory_swept_before_it_is_locked_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its making and its locking another job sees one without an owner."""
    lock, swept = fcntl.flock, []

    def late(handle: int, how: int) -> None:
        if how == fcntl.LOCK_EX and not swept:
            swept.extend([None, *memory.sweep(tmp_path)])
        lock(handle, how)

    monkeypatch.setattr(memory.fcntl, "flock", late)
    mine = PrivateDirectory(tmp_path)
    assert len(swept) == 2 and swept[1] != mine.path and Path(mine.path, OWNER).exists()
    assert memory.sweep(tmp_path) == []
    mine.close()


def test_a_warehouse_that_starts_again_finds_its_cells_while_the_rank_lives(tmp_path: Path) -> None:
    """The lock is the rank's: Ray's processes come and go under it."""
    job = Job(tmp_path)
    try:
        assert memory.sweep(tmp_path) == [] and (job.path / "segment-0").stat().st_size == 4096
    finally:
        job.kill(guard=True)
    assert memory.sweep(tmp_path) == [str(job.path)]


def test_an_empty_directory_whose_maker_died_at_once_is_removed(tmp_path) -> None:
    old, new, full = (tmp_path / f"{memory.PREFIX}{name}" for name in ("old", "new", "full"))
    for path in (old, new, full):
        path.mkdir()
    (full / "something").write_text("of another program")
    for path in (old, full):
        os.utime(path, (0, 0))
    assert memory.sweep(tmp_path) == [str(old)] and new.exists() and full.exists()
