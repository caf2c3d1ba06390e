"""setup.sh with a Python that only writes down what it is asked, and requirements/check.py."""

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import imported

ROOT = Path(__file__).resolve().parents[2]
FILES = ("setup.sh", "setup.py", *(f"requirements/{name}" for name in ("cpu.lock", "apart.lock", "check.py")))
FAKE = """#!/bin/bash
echo "VERSION $*" >> CALLS
case "$1" in
    -c) if [[ "$2" == *_base_executable* ]]; then echo BASE; else echo VERSION; fi ;;
    --version) echo "Python VERSION.9" ;;
    -m) [ "$2" = venv ] || exit 0
        rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python
        echo "#!$PWD/.venv/bin/python" > .venv/bin/torchrun
        printf '#!/bin/sh\\n' > .venv/bin/uv; chmod +x .venv/bin/uv ;;
esac
"""
# Not in this environment; the last one: in the interpreter of `gateway.verifiers_load`.
ON_A_MACHINE = (
    *("mindspeed", "mindspeed_llm", "torch_npu", "vllm_ascend"),
    "verifiers",
)


@pytest.fixture
def setup(tmp_path):
    """`setup("3.12")` runs it with PYTHON=python3.12, `setup()` without; both are on PATH. Returns (status, output)."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for version in ("3.10", "3.11", "3.12"):
        fake = tmp_path / "bin" / f"python{version}"
        words = {"VERSION": version, "CALLS": str(tmp_path / "calls"), "BASE": str(fake)}
        fake.write_text(re.sub("|".join(words), lambda word, words=words: words[word[0]], FAKE))
        fake.chmod(0o755)

    def run(version: str = "", folder: Path = tmp_path) -> tuple[int, str]:
        env = {"PATH": f"{tmp_path / 'bin'}:{os.defpath}"} | ({"PYTHON": f"python{version}"} if version else {})
        done = subprocess.run(["bash", "setup.sh"], cwd=folder, env=env, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    return run


def test_another_interpreter_makes_the_environment_again(setup, tmp_path):
    assert "making .venv with Python 3.11.9" in setup()[1]
    assert setup() == (0, "setup: .venv is up to date (Python 3.11)\n")
    (tmp_path / ".venv" / "of_3.11").touch()
    assert "making .venv with Python 3.12.9" in setup("3.12")[1]
    assert not (tmp_path / ".venv" / "of_3.11").exists()
    assert setup("3.12") == (0, "setup: .venv is up to date (Python 3.12)\n")
    # Whoever calls it next without PYTHON, as the quickstart does, gets the environment that is there.
    assert setup() == (0, "setup: .venv is up to date (Python 3.12)\n")
    assert "making .venv with Python 3.11.9" in setup("3.11")[1]


def test_an_interpreter_that_is_gone_or_does_not_fit(setup, tmp_path):
    code, said = setup("3.10")
    assert code == 1 and "needs Python 3.11 or 3.12" in said and "found: Python 3.10.9" in said
    setup()
    (tmp_path / ".venv" / "bin" / "python").unlink()
    assert "making .venv" in setup()[1]


def test_a_linked_environment_of_another_interpreter_is_left_alone(setup, tmp_path):
    setup()
    (tmp_path / ".venv").rename(tmp_path / "elsewhere")
    (tmp_path / ".venv").symlink_to(tmp_path / "elsewhere")
    assert "up to date" in setup()[1]
    code, said = setup("3.12")
    assert code == 1 and ".venv links to an environment of 3.11, wanted is 3.12; remove the link" in said
    assert (tmp_path / "elsewhere" / "bin" / "python").exists()


@pytest.mark.parametrize("move", [shutil.move, shutil.copytree])
def test_a_moved_folder_or_a_copied_environment_is_made_again(setup, tmp_path, move):
    """Its scripts would run the interpreter of the old place, and the package is installed in place."""
    setup("3.12")
    other = tmp_path / "other"
    for name in (*FILES, ".venv"):
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (move if name == ".venv" else shutil.copy)(tmp_path / name, other / name)
    (other / ".venv" / "of_old_place").touch()
    assert "making .venv with Python 3.12.9" in setup(folder=other)[1]
    assert (other / ".venv/bin/torchrun").read_text() == f"#!{other}/.venv/bin/python\n"
    assert not (other / ".venv/of_old_place").exists()
    assert setup(folder=other) == (0, "setup: .venv is up to date (Python 3.12)\n")


@pytest.mark.parametrize("head", ["#!/gone/bin/python", "#!/bin/sh\n'''exec' \"/long one/bin/python3.11\" \"$0\""])
def test_scripts_that_run_another_place_are_not_up_to_date(setup, tmp_path, head):
    """Whatever the digest says; a long path stands in the script's second line."""
    setup()
    (tmp_path / ".venv/bin/torchrun").write_text(head + "\n")
    assert "making .venv with Python 3.11.9" in setup()[1]
    assert "up to date" in setup()[1]


def test_what_is_installed_apart_has_the_versions_of_its_lock(setup, tmp_path):
    setup()
    calls = (tmp_path / "calls").read_text()
    lock = [line for line in (ROOT / "requirements/apart.lock").read_text().splitlines() if not line.startswith("#")]
    assert [pin.split("==")[0] for pin in lock] == ["uv", "torch", "megatron-core"]
    for pin in lock:
        assert f" {pin}\n" in calls, calls


def check():
    return imported(ROOT / "requirements" / "check.py")


def test_the_check_imports_what_the_package_imports():
    names = set()
    for path in (ROOT / "mindspeed_rl_plugin").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
    modules = set(check().MODULES)
    roots = {name.split(".")[0] for name in names} - sys.stdlib_module_names - set(ON_A_MACHINE)
    assert roots <= {name.split(".")[0] for name in modules}
    assert {".".join(name.split(".")[:2]) for name in names if name.startswith("megatron.")} <= modules


def test_a_module_that_does_not_import_is_named(capsys):
    assert check().main(("json", "no_such_module")) == 1
    assert "  no_such_module: ModuleNotFoundError" in capsys.readouterr().err
    assert check().main(("json",)) == 0


def test_the_licence_is_the_published_text():
    text = (ROOT / "LICENSE").read_bytes()
    assert hashlib.sha256(text).hexdigest() == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert 'license="Apache-2.0"' in (ROOT / "setup.py").read_text()
