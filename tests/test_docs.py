"""The pages name what exists: relative links lead to a file and a heading, --rl-* flags are flags, paths are there."""

import re
import subprocess
from pathlib import Path

import pytest

from mindspeed_rl_plugin.config import flag_names

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/README.md"))]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
FLAG = re.compile(r"--(?:no-)?rl-[a-z][a-z-]*[a-z]")
CODE = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|sh))`")


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Links to a file or a heading that is not there."""
    broken = []
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text())):
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(f"{target}#{anchor}" if anchor else target)
    return broken


def missing_files(page: Path) -> list[str]:
    """Paths of our code in backquotes, from the root, the package or the page's folder, that are not there."""
    places = (ROOT, ROOT / "mindspeed_rl_plugin", page.parent)
    return [path for path in CODE.findall(page.read_text()) if not any((place / path).exists() for place in places)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_files_and_flags_exist(page):
    assert broken_links(page) == []
    assert missing_files(page) == []
    assert set(FLAG.findall(page.read_text())) - set(flag_names()) == set()


def test_every_page_is_linked_from_the_first_one():
    linked = {(ROOT / target).resolve() for target, _ in LINK.findall((ROOT / "README.md").read_text())}
    assert [page.name for page in PAGES if page.parent == ROOT / "docs" and page not in linked] == []


def test_what_is_not_there_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A heading: here\n[a](#a-heading-here) [b](#no-heading) [c](gone.md)\n```\n[d](code.md)\n```\n")
    assert broken_links(page) == ["#no-heading", "gone.md"]
    page.write_text("`tests/run.sh` `stages/table.py` `stages/gone.py`")
    assert missing_files(page) == ["stages/gone.py"]


def test_the_example_of_the_dock_runs() -> None:
    text = (ROOT / "docs" / "dock.md").read_text()
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], {})


def test_the_script_of_start_reads_quoted_flags_of_import(tmp_path: Path) -> None:
    (line,) = re.findall(r"^eval .*model\.args.*$", (ROOT / "docs" / "start.md").read_text(), re.MULTILINE)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "model.args").write_text("--moe-layer-freq '[0,1]' --num-layers 2\n")
    command = ["bash", "-c", f"{line}\nprintf '%s\\n' \"${{MODEL_ARGS[@]}}\""]
    words = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split("\n")
    assert words == ["--moe-layer-freq", "[0,1]", "--num-layers", "2", ""]
