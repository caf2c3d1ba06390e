"""Runs `openenv_server.py` in an interpreter that has OpenEnv."""

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "warm"))
from ports import free_port  # noqa: E402

SERVER = Path(__file__).with_name("openenv_server.py")
START_SECONDS = 120


@contextmanager
def serving(python: str, name: str, sessions: int = 2) -> Iterator[str]:
    """The URL of a server of one of its environments, while it runs. sessions: at a time."""
    port = free_port()
    process, url = subprocess.Popen([python, SERVER, name, str(port), str(sessions)]), f"http://127.0.0.1:{port}"
    try:
        _wait_for(process, url)
        yield url
    finally:
        process.terminate()
        process.wait()


def _wait_for(process: subprocess.Popen, url: str) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            assert process.poll() is None and time.monotonic() < end, f"no answer of {url}"
            time.sleep(0.2)
