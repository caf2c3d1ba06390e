"""What the tests of several folders use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

WARM = Path(__file__).with_name("warm")
sys.path.append(str(WARM))
from warm_start import started  # noqa: E402

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores it, with all it starts


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An executable that runs `-m MODULE`, `-c CODE` and scripts as python does, with torch, Megatron and vLLM imported
    already (warm/server.py). For the ranks of torchrun too: set PYTHON_EXEC to it."""
    with started(tmp_path_factory.mktemp("w")) as python:
        yield python


@pytest.fixture(scope="session")
def torchrun(request: pytest.FixtureRequest) -> Callable[..., subprocess.CompletedProcess]:
    """`torchrun(SCRIPT, ARGUMENT ..., ranks=2)` runs a script on some ranks and returns what it wrote; the test fails
    with that where a rank fails. cold: launcher and ranks start from nothing; more: variables."""

    def run(
        *words: object, ranks: int = 2, timeout: float = 300, cold: bool = False, cwd: Path | None = None, **more: str
    ) -> subprocess.CompletedProcess:
        python = sys.executable if cold else request.getfixturevalue("warm_python")
        command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHON_EXEC": python, **more}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (more.get("PYTHONPATH"), str(WARM.parents[1]))))
        done = subprocess.run(
            [*command, *map(str, words)], env=env, cwd=cwd, timeout=timeout, capture_output=True, text=True
        )
        said = [line for line in done.stderr.splitlines() if "leaked" not in line]  # of triton, at every end
        assert done.returncode == 0, done.stdout[-3000:] + "\n".join(said)[-8000:]
        return done

    return run
