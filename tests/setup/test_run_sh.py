"""tests/run.sh: which tests it asks for, and that --full is not green without upstream's checkouts."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[2]
ORDINARY = "not slow and not gpu and not upstream"
TWO_FILES = "-n 2 --dist loadfile"
CHECKOUTS = ("MEGATRON_LM_PATH", "MINDSPEED_PATH", "MINDSPEED_NEXT_PATH", "MINDSPEED_LLM_PATH")


@pytest.fixture
def run(tmp_path):
    """`run("--full", have=[...], tests=0)`: status and output; a fake Python writes the marks and ends with `tests`.

    browser: whether chromium starts; user: 0 is root, for whom a fake apt-get installs it.
    """
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "run.sh", tmp_path / "tests" / "run.sh")
    (tmp_path / "setup.sh").touch()

    def script(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    asked = 'echo "marks: $4"; echo "$5" > examples; cat <<< "${*:7}" > words'
    script(".venv/bin/python", f'[ "$1" != -m ] || {{ {asked}; exit $TESTS; }}')
    script(".venv/bin/ruff", "")

    def call(*words: str, have=(), tests: int = 0, browser: bool = True, user: int = 7) -> tuple[int, str]:
        script("bin/chromium", f"exit {int(not browser)}")
        script("bin/id", f"echo {user}")
        script("bin/apt-get", '[ "$1" != install ] || echo exit 0 > "$(dirname "$0")/chromium"')
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        env = {"PATH": path, "TESTS": str(tests), **dict.fromkeys(have, "/somewhere")}
        command = ["bash", str(tmp_path / "tests" / "run.sh"), *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
        return done.returncode, done.stdout + done.stderr

    return call


def test_a_browser_is_installed_where_that_can_be_done_else_its_tests_are_left_out(run):
    assert run(browser=False, user=0) == (0, f"marks: {ORDINARY}\n")
    code, out = run(browser=False)
    assert code == 0 and "leaves out the report in a browser" in out
    assert out.endswith(f"marks: {ORDINARY} and not browser\n")
    code, out = run("--browser", browser=False)
    assert code == 1 and "no working chromium" in out and "marks" not in out
    assert run("--browser", browser=False, user=0) == run("--browser") == (0, f"marks: {ORDINARY}\n")


def test_the_ordinary_tier_asks_for_no_checkout(run):
    assert run() == (0, f"marks: {ORDINARY}\n")
    assert run(have=CHECKOUTS) == (0, "marks: not slow and not gpu\n")
    assert run(tests=5)[0] == 5


def test_full_is_green_with_all_checkouts(run):
    assert run("--full", have=CHECKOUTS) == (0, "marks: not gpu\n")


def test_quick_asks_for_the_files_that_are_marked_and_needs_no_browser(run, tmp_path):
    """Others are not even imported."""
    for name, text in ("test_a.py", "pytestmark = pytest.mark.quick"), ("test_b.py", "@pytest.mark.quickly"):
        (tmp_path / "tests" / name).write_text(f"{text}\n")
    assert run("--quick", "-x", browser=False, user=0) == (0, f"marks: quick and {ORDINARY} and not browser\n")
    assert (tmp_path / "words").read_text() == f"{TWO_FILES} tests/test_a.py -x\n"


def test_two_files_run_at_once_but_not_the_long_tests(run, tmp_path):
    for words, passed in (("-k", "zero", "-n", "0"), f"{TWO_FILES} -k zero -n 0"), (("--full", "-x"), "-x"):
        run(*words, have=CHECKOUTS)
        assert (tmp_path / "words").read_text() == f"{passed}\n"


@pytest.mark.parametrize("absent", CHECKOUTS)
def test_full_without_a_checkout_says_so_last_and_fails(run, absent):
    code, out = run("--full", have=[name for name in CHECKOUTS if name != absent])
    assert code == 1 and out.index("marks: ") < out.rindex(f"  - {absent} is not set: ")
    assert out.endswith("or give --without-upstream\n")
    assert run("--full", tests=2)[0] == 2
    assert run("--full", "--without-upstream") == (0, "marks: not gpu and not upstream\n")
    assert run("--full", "--without-upstream", have=CHECKOUTS) == (0, "marks: not gpu and not upstream\n")


def test_only_full_draws_new_examples(run, tmp_path):
    """Of property tests: the ordinary tier never fails by chance."""
    for words, profile in ((), "ordinary"), (("--full",), "full"):
        run(*words, have=CHECKOUTS)
        assert (tmp_path / "examples").read_text() == f"--hypothesis-profile={profile}\n"
    assert settings.get_profile("ordinary").derandomize and not settings.get_profile("full").derandomize
    assert settings().derandomize or settings.get_current_profile_name() == "full"
