"""Commands that tests run to their end, and scripts that they import."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType


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
