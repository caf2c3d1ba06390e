"""What the tests of several folders use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

WARM = Path(__file__).with_name("warm")


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An executable that runs `-m MODULE`, `-c CODE` and scripts as python does, with torch, Megatron and vLLM imported
    already (warm/server.py). For the ranks of torchrun too: set PYTHON_EXEC to it."""
    folder = tmp_path_factory.mktemp("w")
    python = folder / "python"
    python.write_text(
        f"#!{sys.executable} -IS\nimport sys\nsys.path.append({str(WARM)!r})\n"
        f"from client import main\nmain({str(folder / 's')!r})\n"
    )
    python.chmod(0o755)
    command = [sys.executable, "-W", "ignore", str(WARM / "server.py"), str(folder / "s")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(folder / "log", "w+") as log:
        server = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        with server:
            for line in server.stdout:
                if line == "ready\n":
                    break
            else:
                log.seek(0)
                raise RuntimeError(f"the server of warm processes did not start: {log.read()[-4000:]}")
            yield str(python)
            server.stdin.close()
