"""Fixtures of whole jobs, their data, and what they must not leave behind."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import golden
import psutil
import pytest
from family_models import HOST, random_model
from jobs import LATENT_MODEL, MODEL, MOE_MODEL, PP2, ROOT, TRAIN, Job, Joined

from mindspeed_rl_plugin.prompts.tokenizer import vocabulary
from mindspeed_rl_plugin.tools.convert import to_megatron

# Made by libraries for themselves: torch's compiler's cache, torchrun's folder of logs, which torchrun leaves, and what
# wandb makes when it is imported, as Megatron's timers do, and removes at an orderly end.
OF_LIBRARIES = re.compile(r"torchinductor_|torchelastic_|tmp\w+wandb-")


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Path:
    """Tokenizer, corpus and prompts of the quickstart, small."""
    out = tmp_path_factory.mktemp("arithmetic")
    prepare = [warm_python, str(ROOT / "examples" / "arithmetic" / "prepare.py"), "--out", str(out)]
    subprocess.run([*prepare, "--documents", "2000", "--prompts", "64", "--heldout", "16"], check=True, timeout=120)
    return out


def given(flags: str):
    """A fixture that is these flags."""
    return pytest.fixture(scope="session")(lambda: flags)


# For `Job.model` and `Job.train`, or to make others of.
dense_model, moe_model, latent_model, training_flags = map(given, (MODEL, MOE_MODEL, LATENT_MODEL, TRAIN))
plain_model = given(golden.MODEL)  # without biases of query, key and value


@pytest.fixture(scope="session")
def long_model(dense_model: str) -> str:
    """For episodes, whose rows are long."""
    return dense_model.replace("length 32", "length 64").replace("embeddings 32", "embeddings 64")


@pytest.fixture
def imported(arithmetic: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> Callable:
    """`imported(FAMILY, "--train", "tp2")` makes a random model as its makers publish it, in tmp_path/hf, and imports
    it. Returns Megatron's flags of the model, flags that start from it, and what gives its log-probs."""
    logps = {}

    def make(family: str, *options: str, name: str = "imported") -> tuple[str, tuple[str, ...], Callable]:
        hf, out, tokenizer = tmp_path / "hf", tmp_path / name, arithmetic / "tokenizer"
        if family not in logps:
            logps[family] = random_model(family, hf, 1 + max(vocabulary(tokenizer).values()))
        assert to_megatron.main(["--load", str(hf), "--out", str(out), *options]) == 0, capsys.readouterr()
        model = " ".join(shlex.split(f"{HOST} {capsys.readouterr().out.splitlines()[-1]}"))
        flags = ("--load", str(out), "--rl-hf-model", str(hf), "--rl-tokenizer", str(tokenizer))
        return model, flags, logps[family]

    return make


@pytest.fixture(scope="session")
def pp2(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Job:
    """A finished job of four iterations: two pipeline stages, an engine on each."""
    made = Job(arithmetic, tmp_path_factory.mktemp("pp2"), ("--train-iters", "4", *PP2), python=warm_python)
    made.run()
    return made


def factory(request: pytest.FixtureRequest, data: Path, folder: Path) -> Iterator:
    """A maker of jobs that save below a folder; what still runs at the end is killed. cold: each process of the job
    starts from nothing, as a user's does."""
    jobs: list[Job] = []

    def make(*extra: str, name: str = "run", cold: bool = False, **named) -> Job:
        python = sys.executable if cold or "path" in named else request.getfixturevalue("warm_python")
        jobs.append(Job(data, folder / name, extra, python=python, **named))
        return jobs[-1]

    yield make
    for each in jobs:
        each.stop()


@pytest.fixture
def job(request: pytest.FixtureRequest, arithmetic: Path, tmp_path: Path) -> Iterator:
    """Factory of jobs of one test."""
    yield from factory(request, arithmetic, tmp_path)


@pytest.fixture(scope="module")
def shared_job(request: pytest.FixtureRequest, arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """Factory of jobs that several tests of a file read."""
    yield from factory(request, arithmetic, tmp_path_factory.mktemp("shared"))


@pytest.fixture
def joined(warm_python):
    made: list[Joined] = []

    def make(job) -> Joined:
        made.append(Joined(job, warm_python))
        return made[-1]

    yield make
    for engine in (engine for one in made for engine in one.engines):
        if engine.poll() is None:
            os.killpg(engine.pid, signal.SIGKILL)
            engine.wait()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A temporary folder for sockets, whose paths have 107 characters at most: fewer than some below tmp_path."""
    with tempfile.TemporaryDirectory(prefix="rl-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def nothing_left(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Call it when the jobs of this test have ended: they left no process, no temporary file and no shared memory.
    Processes and memory of other jobs on this machine do not count."""
    monkeypatch.setenv("TMPDIR", str(short_path))
    mapped: set[Path] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.3):
            mapped.update(*map(shared_memory, working_in(short_path)))

    def check() -> None:
        end = time.monotonic() + 60
        while (alive := working_in(short_path)) and time.monotonic() < end:
            time.sleep(0.2)  # graders end themselves when their rank is gone
        assert alive == []
        assert [p.name for p in short_path.iterdir() if not OF_LIBRARIES.match(p.name)] == []
        assert [path for path in mapped if path.exists()] == []

    watching = threading.Thread(target=watch)
    watching.start()
    yield check
    ended.set()
    watching.join()


def working_in(private: Path) -> list[psutil.Process]:
    """The processes whose temporary files go to a folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("TMPDIR") == str(private) and process.pid != os.getpid():
                found.append(process)
    return found


def shared_memory(process: psutil.Process) -> set[Path]:
    """What a process has mapped of /dev/shm."""
    try:
        return {*map(Path, re.findall(r"/dev/shm/\S+", Path(f"/proc/{process.pid}/maps").read_text()))}
    except OSError:
        return set()
