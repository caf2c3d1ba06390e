"""The private directory of a dock on one machine: segments, journal and sockets live there, and nothing outlives it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

ROOT = Path("/dev/shm")
PREFIX = "mindspeed-rl-dock-"


class PrivateDirectory:
    """A directory of the user alone in shared memory. It goes with `close`, or when this process ends, however it ends:
    a child that only waits for that removes it. root: another place for it, in tests.
    """

    def __init__(self, root: str | os.PathLike[str] = ROOT) -> None:
        if not os.path.isdir(root):
            raise ValueError(f"{root} is not there: the dock keeps its rows in shared memory; use --rl-dock local")
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=root)  # mode 0700
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
        if self._guard.poll() is None:
            self._guard.stdin.close()
            self._guard.wait(10)


def machine() -> str:
    """Name of what shares one /dev/shm: containers of one machine may differ, agents of one machine do not."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    place = os.stat("/dev/shm")
    return f"{socket.gethostname()} {boot[:8]} {place.st_dev}:{place.st_ino}"
