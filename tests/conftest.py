"""What the tests of several folders use."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings
from ports import free_port
from warm_start import started

WARM = Path(__file__).with_name("warm")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores it, with all it starts

for _name, _same in (("ordinary", True), ("full", False)):  # same examples each time, or others; no limits of time
    settings.register_profile(_name, derandomize=_same, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ordinary")  # tests/run.sh --full asks for the other


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An executable that runs `-m MODULE`, `-c CODE` and scripts as python does, with torch, Megatron and vLLM imported
    already (warm/server.py). For the ranks of torchrun too: set PYTHON_EXEC to it."""
    with started(tmp_path_factory.mktemp("w")) as python:
        yield python


@pytest.fixture(scope="session")
def apart(request: pytest.FixtureRequest) -> Callable[..., str]:
    """`apart("verifiers==0.4.0", ...)` is an interpreter of an environment of its own with these packages, made once,
    and kept in pytest's cache."""

    def make(*packages: str) -> str:
        name = hashlib.blake2b("\n".join(packages).encode(), digest_size=8).hexdigest()
        folder = request.config.cache.mkdir("apart") / name
        python, stamp = folder / "bin" / "python", folder / "made"
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process of this run may want it too
            if not stamp.exists():
                subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
                uv = Path(sys.executable).with_name("uv")  # of setup.sh
                subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *packages], check=True)
                stamp.touch()
        return str(python)

    return make


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


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Address of a Ray cluster: this machine, as one with two CPUs."""
    folder = tempfile.mkdtemp(prefix="ray")  # its sockets lie in it: a short name
    port = free_port()
    where = ["--node-ip-address", "127.0.0.1", "--port", str(port), "--temp-dir", folder]
    fixed = ("--ray-client-server-port", "--dashboard-agent-listen-port")  # the same in every cluster otherwise
    where += [word for name in fixed for word in (name, str(free_port()))]
    size = ["--num-cpus", "2", "--object-store-memory", "100000000", "--include-dashboard=false"]
    env = os.environ | {"RAY_raylet_start_wait_time_s": "240", "RAY_USAGE_STATS_ENABLED": "0"}
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *where, *size]
    started = subprocess.run(ray, env=env, timeout=300, capture_output=True, text=True, cwd=folder)
    assert started.returncode == 0, started.stdout + started.stderr
    yield f"127.0.0.1:{port}"
    own = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if folder in " ".join((process.cwd(), *process.cmdline())):  # some have no arguments that say so
                own.append(process)
    for process in own:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(own, timeout=20)
    shutil.rmtree(folder, ignore_errors=True)
