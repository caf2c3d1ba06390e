"""Commands that tests run to their end, scripts that they import, and what they wait for."""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

from mindspeed_rl_plugin.processes import began


def ended(*words: object, code: int = 0, timeout: float = 300, more: dict[str, str] | None = None, **options):
    """The command's `CompletedProcess`, with text; the test fails with what it said where its status is another.
    more: variables; options: of `subprocess.run`."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(more or {})}
    command = [str(word) for word in words]
    done = subprocess.run(command, env=env, timeout=timeout, capture_output=True, text=True, **options)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def imported(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{script.stem}", script)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for what must come; the test fails where it does not within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def gone(processes: Iterable[int], seconds: float = 60.0) -> bool:
    """Whether all of them have ended, or do within so many seconds."""
    end = time.monotonic() + seconds
    while left := [process for process in processes if began(process) is not None]:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return not left
