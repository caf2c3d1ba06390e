"""`mindspeed_rl_plugin patch`, and the diffs in patches/: on synthetic trees, and on copies of the real ones."""

import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from checkouts import checkouts

from mindspeed_rl_plugin.tools import patch as command
from mindspeed_rl_plugin.tools.patch import ANCHOR, IMPORT_LINE, SCRIPT, TREES

INFO = "megatron/core/package_info.py"
PATCHES = Path(__file__).parents[2] / "patches"


def script(tree, *, before=0):
    """A script with the tree's anchor on its line."""
    lines = [f"# {n}\n" for n in range(1, tree.line + before)] + [ANCHOR + "\n", "from megatron import x\n"]
    return "".join(lines)


@pytest.fixture
def make(tmp_path):
    def build(tree, text=None):
        root = tmp_path / "upstream"
        core = root / ("megatron/core" if tree.kind == "Megatron-LM" else "mindspeed_llm")
        core.mkdir(parents=True)
        if tree.kind == "Megatron-LM":
            numbers = zip(("MAJOR", "MINOR", "PATCH"), tree.release.rpartition("core_v")[2].split("."), strict=True)
            (core / "package_info.py").write_text("".join(f"{name} = {number}\n" for name, number in numbers))
        (root / SCRIPT).write_text(script(tree) if text is None else text)
        return root

    return build


def git_apply(root, diff, *options):
    git = shutil.which("git") or pytest.skip("there is no git here")
    subprocess.run([git, "apply", "--unidiff-zero", *options, str(PATCHES / diff)], cwd=root, check=True, timeout=30)


@pytest.mark.parametrize("tree", TREES, ids=lambda t: t.diff)
def test_check_apply_revert(tree, make):
    """By the command and by git, with the same result; twice is once."""
    root = make(tree)
    file, run = root / SCRIPT, lambda option: command.main([option, str(root)])
    file.chmod(0o755)
    before = file.read_text()
    assert run("--check") == 1
    for _ in range(2):
        assert run("--apply") == 0 == run("--check")
        lines = file.read_text().splitlines(keepends=True)
        assert lines[tree.line - 1 : tree.line + 1] == [ANCHOR + "\n", IMPORT_LINE]
        assert lines.count(IMPORT_LINE) == 1
    assert stat.S_IMODE(file.stat().st_mode) == 0o755
    for _ in range(2):
        assert run("--revert") == 0 and file.read_text() == before
    # Without context lines; the anchor stands after the @@, where git ignores it and a reader finds it.
    at = f"@@ -{tree.line},0 +{tree.line + 1} @@ {ANCHOR}\n+{IMPORT_LINE}"
    diff = f"diff --git a/{SCRIPT} b/{SCRIPT}\n--- a/{SCRIPT}\n+++ b/{SCRIPT}\n{at}"
    assert (PATCHES / tree.diff).read_text() == diff
    git_apply(root, tree.diff)
    assert run("--check") == 0 and file.read_text().splitlines(keepends=True) == lines
    git_apply(root, tree.diff, "--reverse")
    assert file.read_text() == before


def test_patches_holds_nothing_else():
    assert {p.name for p in PATCHES.iterdir()} == {tree.diff for tree in TREES} | {"README.md"}
    readme = (PATCHES / "README.md").read_text()
    assert all(tree.diff in readme for tree in TREES)


def test_an_edited_script_is_matched_by_its_anchor(make, capsys):
    root = make(TREES[0], script(TREES[0], before=3))
    assert command.main(["--check", str(root)]) == 1
    assert "no diff in patches/ is for 'import torch' at line 7" in capsys.readouterr().out
    assert command.main(["--apply", str(root)]) == 0
    assert (root / SCRIPT).read_text().splitlines()[7] == IMPORT_LINE.strip()


def test_windows_line_ends_are_kept(make):
    root = make(TREES[0])
    text = (root / SCRIPT).read_text().replace("\n", "\r\n").encode()
    (root / SCRIPT).write_bytes(text)
    command.main(["--apply", str(root)])
    assert (root / SCRIPT).read_bytes().count(b"\r\n") == (root / SCRIPT).read_bytes().count(b"\n")
    command.main(["--revert", str(root)])
    assert (root / SCRIPT).read_bytes() == text


@pytest.mark.parametrize("option", ["--check", "--apply", "--revert"])
@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        (SCRIPT, "print()\n", "expected the line 'import torch' once in"),
        (SCRIPT, "import torch\n" * 2, "it is there 2 times"),
        (SCRIPT, None, "but has no pretrain_gpt.py"),
        (INFO, None, "expected megatron/core/package_info.py (Megatron-LM) or"),
        (INFO, "MAJOR = 0\nMINOR = 11\nPATCH = 0\n", "is Megatron-LM core 0.11.0; expected core 0.12.1 to 0.19.x"),
    ],
)
def test_what_does_not_match_says_what_was_expected(make, capsys, file, text, expected, option):
    root = make(TREES[0])
    (root / file).unlink() if text is None else (root / file).write_text(text)
    files = {path: path.read_bytes() for path in root.rglob("*.py")}
    assert command.main([option, str(root)]) == 2
    assert expected in capsys.readouterr().err
    assert files == {path: path.read_bytes() for path in root.rglob("*.py")}


@pytest.mark.upstream
def test_real_checkouts(tmp_path):
    """Each checkout is one release of the table: applied and reverted, by the command and by git, on a copy."""
    assert checkouts(), "MEGATRON_LM_PATH is empty"
    for number, checkout in enumerate([*checkouts(), *checkouts("MINDSPEED_LLM_PATH")]):
        root = tmp_path / str(number)
        root.mkdir()
        for part in (INFO, "mindspeed_llm/__init__.py", "setup.py", SCRIPT):
            if (checkout / part).is_file():
                (root / part).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(checkout / part, root / part)
        original = (root / SCRIPT).read_bytes()
        assert command.main(["--check", str(root)]) == 1, checkout
        line = original.decode().splitlines().index("import torch") + 1
        (tree,) = [t for t in TREES if t.line == line]
        git_apply(root, tree.diff)
        by_git = (root / SCRIPT).read_bytes()
        assert command.main(["--revert", str(root)]) == 0
        assert (root / SCRIPT).read_bytes() == original
        assert command.main(["--apply", str(root)]) == 0
        assert (root / SCRIPT).read_bytes() == by_git
