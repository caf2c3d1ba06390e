"""tests/run.sh: which tests it asks for, and that --full is not green without upstream's checkouts."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKOUTS = ("MEGATRON_LM_PATH", "MINDSPEED_PATH", "MINDSPEED_LLM_PATH")


@pytest.fixture
def run(tmp_path):
    """`run("--full", have=[...], tests=0)`: status and output; a fake Python writes the marks and ends with `tests`."""
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "run.sh", tmp_path / "tests" / "run.sh")
    (tmp_path / "setup.sh").touch()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name, text in (("python", '[ "$1" != -m ] || { echo "marks: $4"; exit $TESTS; }'), ("ruff", "")):
        (tmp_path / ".venv" / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / ".venv" / "bin" / name).chmod(0o755)

    def call(*words: str, have=(), tests: int = 0) -> tuple[int, str]:
        env = {"PATH": os.environ["PATH"], "TESTS": str(tests), **dict.fromkeys(have, "/somewhere")}
        command = ["bash", str(tmp_path / "tests" / "run.sh"), *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
        return done.returncode, done.stdout + done.stderr

    return call


def test_the_ordinary_tier_asks_for_no_checkout(run):
    assert run() == (0, "marks: not slow and not gpu and not upstream\n")
    assert run(have=CHECKOUTS) == (0, "marks: not slow and not gpu\n")
    assert run(tests=5)[0] == 5


def test_full_is_green_with_all_checkouts(run):
    assert run("--full", have=CHECKOUTS) == (0, "marks: not gpu\n")


@pytest.mark.parametrize("absent", CHECKOUTS)
def test_full_without_a_checkout_says_so_last_and_fails(run, absent):
    code, out = run("--full", have=[name for name in CHECKOUTS if name != absent])
    assert code == 1 and out.index("marks: ") < out.rindex(f"  - {absent} is not set: ")
    assert out.endswith("or give --without-upstream\n")
    assert run("--full", tests=2)[0] == 2
    assert run("--full", "--without-upstream") == (0, "marks: not gpu and not upstream\n")
    assert run("--full", "--without-upstream", have=CHECKOUTS) == (0, "marks: not gpu and not upstream\n")
