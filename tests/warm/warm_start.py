"""Start the server of warm processes."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent


@contextlib.contextmanager
def started(folder: Path, modules: Sequence[str] = (), interpreter: str = sys.executable) -> Iterator[str]:
    """Inside, an executable in `folder` runs `-m MODULE`, `-c CODE` and scripts as the interpreter does, with `modules`
    imported already, or those of server.py. For the ranks of torchrun too: set PYTHON_EXEC to it. Raises RuntimeError
    where the server does not start."""
    python = folder / "python"
    python.write_text(
        f"#!{interpreter} -IS\nimport sys\nsys.path.append({str(HERE)!r})\n"
        f"from client import main\nmain({str(folder / 's')!r})\n"
    )
    python.chmod(0o755)
    command = [interpreter, "-W", "ignore", str(HERE / "server.py"), str(folder / "s"), *modules]
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
            try:
                yield str(python)
            finally:
                server.stdin.close()
