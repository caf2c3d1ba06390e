"""`python -m mindspeed_rl_plugin patch`: check, apply or revert the import line in an upstream checkout.

`patches/` has a diff without context lines for each row of `TREES`, for `git apply --unidiff-zero`; a test checks each.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

from mindspeed_rl_plugin.launch.patching import NEWEST, OLDEST
from mindspeed_rl_plugin.monitor.run_files import atomic_write

IMPORT_LINE = "import mindspeed_rl_plugin.adaptor  # attaches RL; inert without --rl-algorithm\n"
SCRIPT = "pretrain_gpt.py"


class Tree(NamedTuple):
    """Upstream releases whose entry script has `ANCHOR` at the same line."""

    kind: str  # "Megatron-LM" or "MindSpeed-LLM"
    release: str  # branches or tags
    line: int  # number of the line `ANCHOR` in `SCRIPT`, from 1
    diff: str  # file in `patches/`


ANCHOR = "import torch"  # `IMPORT_LINE` follows this line; MindSpeed's adaptor, which reads flags, is later
TREES: tuple[Tree, ...] = (
    Tree("Megatron-LM", "core_v0.12.1", 4, "megatron-lm-core_v0.12.1.patch"),
    Tree("Megatron-LM", "core_v0.16.1", 22, "megatron-lm-core_v0.16.1.patch"),
    Tree("Megatron-LM", "core_v0.18.0, core_v0.19.0", 24, "megatron-lm-core_v0.19.0.patch"),
    Tree("MindSpeed-LLM", "2.2.0, 2.3.0, 26.0.0, 26.1.0, master", 9, "mindspeed-llm-master.patch"),
    Tree("MindSpeed-LLM", "2.1.0", 8, "mindspeed-llm-2.1.0.patch"),
)


def main(argv: list[str]) -> int:
    """Returns 0 if the tree is now as requested (--check: if it has the line), 1 if --check finds no line, 2 if the
    tree does not match."""
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_rl_plugin patch",
        description="Check, add or remove one line in pretrain_gpt.py of Megatron-LM or MindSpeed-LLM, without git.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", metavar="DIR", help="exit status: 0 if DIR has the line, 1 if not; 2: unknown DIR")
    what.add_argument("--apply", metavar="DIR", help="add the line")
    what.add_argument("--revert", metavar="DIR", help="remove the line")
    options = parser.parse_args(argv)
    directory = options.check or options.apply or options.revert
    try:
        if not options.check:
            apply_to(directory, revert=bool(options.revert))
        applied, text, _ = inspect(directory)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(text)
    return 1 if options.check and not applied else 0


def apply_to(directory: str, revert: bool = False) -> None:
    """Add the line if it is missing; revert: remove it if it is there. Raises ValueError if the tree does not match."""
    applied, _, at = inspect(directory)
    if applied != revert:
        return
    script = Path(directory, SCRIPT)
    lines = script.read_bytes().splitlines(keepends=True)
    if revert:
        del lines[at - 1]
    else:
        ending = b"\r\n" if lines[at - 1].endswith(b"\r\n") else b"\n"
        lines.insert(at, IMPORT_LINE.rstrip("\n").encode() + ending)
    mode = script.stat().st_mode
    atomic_write(script, lambda path: path.write_bytes(b"".join(lines)) and path.chmod(mode))


def inspect(directory: str) -> tuple[bool, str, int]:
    """Recognise the tree in `directory` and look for `IMPORT_LINE`, without git. Returns whether the script has it, a
    sentence that says so, and the number, from 1, of this line, or of `ANCHOR` if the script does not have it. Raises
    ValueError for an unknown tree, and for a script that has neither this line nor `ANCHOR` exactly once."""
    kind, version = _release(Path(directory))
    script = Path(directory, SCRIPT)
    if not script.is_file():
        raise ValueError(f"{directory} looks like {kind} {version}, but has no {SCRIPT}")
    lines = dict(enumerate(script.read_text(encoding="utf-8").splitlines(), 1))
    for number, line in lines.items():
        if re.match(r"import mindspeed_rl_plugin\.adaptor\b", line):
            return True, f"{kind} {version}: applied, line {number} of {script}", number
    rows = [tree for tree in TREES if tree.kind == kind]
    at = [number for number, line in lines.items() if line == ANCHOR]
    if len(at) != 1:
        places = ", ".join(f"line {tree.line} in {tree.release}" for tree in rows)
        raise ValueError(
            f"{kind} {version}: expected the line {ANCHOR!r} once in {script} ({places}); it is there {len(at)} times"
        )
    known = any(tree.line == at[0] for tree in rows)
    note = "" if known else f" (but no diff in patches/ is for {ANCHOR!r} at line {at[0]})"
    return False, f"{kind} {version}: not applied; {script} matches{note}", at[0]


def _release(folder: Path) -> tuple[str, str]:
    """Upstream project in a folder, and its version. Raises ValueError for another project or Megatron version."""
    if (folder / "mindspeed_llm").is_dir():
        setup = folder / "setup.py"
        text = setup.read_text(encoding="utf-8") if setup.is_file() else ""
        return "MindSpeed-LLM", next(iter(re.findall(r"__version__ = ['\"]([^'\"]+)", text)), "(no version)")
    if (core := core_version(folder)) is None:
        raise ValueError(
            f"{folder} is no checkout that the plugin knows: expected megatron/core/package_info.py (Megatron-LM) or "
            "mindspeed_llm/ (MindSpeed-LLM)"
        )
    version, low, high = (".".join(map(str, numbers)) for numbers in (core, OLDEST, NEWEST))
    if core < OLDEST or core[:2] > NEWEST:
        raise ValueError(f"{folder} is Megatron-LM core {version}; expected core {low} to {high}.x")
    return "Megatron-LM", version


def core_version(folder: Path) -> tuple[int, ...] | None:
    """Version of Megatron Core in a folder; None if the folder has none."""
    info = folder / "megatron" / "core" / "package_info.py"
    if not info.is_file():
        return None
    text = info.read_text(encoding="utf-8")
    return tuple(map(int, re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE)))
