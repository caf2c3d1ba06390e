"""The private directory of a dock on one machine: segments, journal and sockets live there, and nothing outlives it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path("/dev/shm")
PREFIX = "mindspeed-rl-dock-"
UNOWNED_SECONDS = 600.0  # a directory without a lock is that old when nobody is making it any more
OWNER = "owner"  # file in the directory that its process holds locked while it lives


class PrivateDirectory:
    """A directory of the user alone in shared memory. It goes with `close`, or when this process ends, however it ends:
    a child that only waits for that removes it. Where both are killed together (a batch system ends a job so), the
    next one of the user on this machine removes what they left. root: another place for it, in tests.
    """

    def __init__(self, root: str | os.PathLike[str] = ROOT) -> None:
        if not os.path.isdir(root):
            raise ValueError(f"{root} is not there: the dock keeps its rows in shared memory; use --rl-dock local")
        sweep(root)
        self.path, self._lock = _make(root)
        # Reads until this process lets go of the pipe; exec keeps the path out of the shell's own parsing.
        script = 'cat >/dev/null; rm -rf -- "$0"'
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", script, self.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """Remove the directory now. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._guard.poll() is None:
            self._guard.stdin.close()
            self._guard.wait(10)


def sweep(root: str | os.PathLike[str] = ROOT) -> list[str]:
    """Remove the user's directories whose process is gone; returns them. Those of other programs and users, and those
    without a file to lock, are left alone."""
    found = []
    for entry in os.scandir(root):
        with contextlib.suppress(OSError):  # of another user, or gone meanwhile
            stat = entry.stat(follow_symlinks=False)
            mine = entry.is_dir(follow_symlinks=False) and stat.st_uid == os.getuid()
            if not mine or not entry.name.startswith(PREFIX):
                continue
            if stat.st_mtime < time.time() - UNOWNED_SECONDS:
                with contextlib.suppress(OSError):  # it is not empty
                    os.rmdir(entry.path)  # its maker died at once
                    found.append(entry.path)
                    continue
            handle = os.open(os.path.join(entry.path, OWNER), os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its process lives
                shutil.rmtree(entry.path, ignore_errors=True)
                found.append(entry.path)
            finally:
                os.close(handle)
    return found


def _make(root: str | os.PathLike[str]) -> tuple[str, int]:
    """A new directory, and the lock that this process holds in it until it closes the descriptor or ends."""
    while True:
        path = tempfile.mkdtemp(prefix=PREFIX, dir=root)  # mode 0700
        handle = os.open(os.path.join(path, OWNER), os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.path.exists(os.path.join(path, OWNER)):
            return path, handle
        os.close(handle)  # another process swept it before it was locked


def machine() -> str:
    """Name of what shares one /dev/shm: containers of one machine may differ, agents of one machine do not."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    place = os.stat("/dev/shm")
    return f"{socket.gethostname()} {boot[:8]} {place.st_dev}:{place.st_ino}"
