"""The upstream trees whose entry script can carry the import line: how each is recognised, and where the line goes.

`patches/` holds the same rows as zero-context diffs (a test keeps them equal), for `git apply --unidiff-zero`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from mindspeed_rl_plugin.launch.patch_table import NEWEST, OLDEST

IMPORT_LINE = "import mindspeed_rl_plugin.adaptor  # attaches RL; inert without --rl-algorithm\n"
SCRIPT = "pretrain_gpt.py"


@dataclass(frozen=True)
class Tree:
    """One upstream release.

    kind: "Megatron-LM" or "MindSpeed-LLM"; release: its branch or tag; anchor: the line of
    `pretrain_gpt.py` that ours follows; line: its number in that release, from 1; diff: name in `patches/`.
    """

    kind: str
    release: str
    anchor: str
    line: int
    diff: str

    def render(self) -> str:
        """The zero-context diff. The anchor stands after the @@, where git ignores it and a reader finds it."""
        return (
            f"diff --git a/{SCRIPT} b/{SCRIPT}\n--- a/{SCRIPT}\n+++ b/{SCRIPT}\n"
            f"@@ -{self.line},0 +{self.line + 1} @@ {self.anchor}\n+{IMPORT_LINE}"
        )


_TORCH = "import torch"
_ADAPTOR = "from mindspeed_llm import megatron_adaptor"

TREES: tuple[Tree, ...] = (
    Tree("Megatron-LM", "core_v0.12.1", _TORCH, 4, "megatron-lm-core_v0.12.1.patch"),
    Tree("Megatron-LM", "core_v0.16.1", _TORCH, 22, "megatron-lm-core_v0.16.1.patch"),
    Tree("Megatron-LM", "core_v0.19.0", _TORCH, 24, "megatron-lm-core_v0.19.0.patch"),
    Tree("MindSpeed-LLM", "2.2.0, 2.3.0, 26.0.0, 26.1.0, master", _ADAPTOR, 10, "mindspeed-llm-master.patch"),
    Tree("MindSpeed-LLM", "2.1.0", _ADAPTOR, 9, "mindspeed-llm-2.1.0.patch"),
)


@dataclass(frozen=True)
class State:
    """What `inspect` found. state: "applied", "not applied" or "does not match"; text: the whole sentence.

    line: number of the line, from 1, that ours follows (not applied) or is (applied); 0 when it does not match.
    """

    state: str
    text: str
    line: int = 0


def inspect(directory: str) -> State:
    """Recognise the tree in `directory` and look for the line. Reads files only; no git needed."""
    kind, version = _recognise(directory)
    if kind is None:
        return State(
            "does not match",
            f"{directory} is no tree that the plugin knows: expected megatron/core/package_info.py (Megatron-LM) or "
            "mindspeed_llm/ (MindSpeed-LLM)",
        )
    script = os.path.join(directory, SCRIPT)
    if not os.path.isfile(script):
        return State("does not match", f"{directory} looks like {kind} {version}, but has no {SCRIPT}")
    if kind == "Megatron-LM" and not _supported(version):
        low, high = ".".join(map(str, OLDEST)), ".".join(map(str, NEWEST))
        return State("does not match", f"{directory} is Megatron-LM core {version}; expected core {low} to {high}.x")
    lines = _read(script)
    ours = [n for n, line in enumerate(lines, 1) if re.match(r"import mindspeed_rl_plugin\.adaptor\b", line)]
    if ours:
        return State("applied", f"{kind} {version}: applied, line {ours[0]} of {script}", ours[0])
    return _find_anchor(kind, version, script, lines)


def apply_to(directory: str) -> State:
    """Add the line, unless it is there. Raises ValueError when the tree does not match; returns the new state."""
    found = inspect(directory)
    if found.state == "does not match":
        raise ValueError(found.text)
    if found.state == "not applied":
        script = os.path.join(directory, SCRIPT)
        lines = _read(script)
        ending = "\r\n" if lines[found.line - 1].endswith("\r\n") else "\n"
        lines.insert(found.line, IMPORT_LINE.rstrip("\n") + ending)
        _write(script, lines)
    return inspect(directory)


def revert_in(directory: str) -> State:
    """Take the line out, if it is there. Raises ValueError when the tree does not match; returns the new state."""
    found = inspect(directory)
    if found.state == "does not match":
        raise ValueError(found.text)
    if found.state == "applied":
        script = os.path.join(directory, SCRIPT)
        lines = _read(script)
        del lines[found.line - 1]
        _write(script, lines)
    return inspect(directory)


def _find_anchor(kind: str, version: str, script: str, lines: list[str]) -> State:
    rows = [tree for tree in TREES if tree.kind == kind]
    anchor = rows[0].anchor
    at = [n for n, line in enumerate(lines, 1) if line.rstrip("\r\n") == anchor]
    if len(at) != 1:
        places = ", ".join(f"line {tree.line} in {tree.release}" for tree in rows)
        found = f"there {len(at)} times" if at else "nowhere"
        expected = f"expected the line {anchor!r} once in {script} ({places})"
        return State("does not match", f"{kind} {version}: {expected}; it is {found}")
    known = [tree for tree in rows if tree.line == at[0]]
    note = "" if known else f" (at line {at[0]}; no diff in patches/ has it there)"
    return State("not applied", f"{kind} {version}: not applied; {script} matches{note}", at[0])


def _recognise(directory: str) -> tuple[str | None, str]:
    if os.path.isdir(os.path.join(directory, "mindspeed_llm")):
        version = _match(os.path.join(directory, "setup.py"), r"__version__ = ['\"]([^'\"]+)")
        return "MindSpeed-LLM", version or "(no version)"
    info = os.path.join(directory, "megatron", "core", "package_info.py")
    if not os.path.isfile(info):
        return None, ""
    parts = [_match(info, rf"^{name} = (\d+)") for name in ("MAJOR", "MINOR", "PATCH")]
    return "Megatron-LM", ".".join(part or "?" for part in parts)


def _supported(version: str) -> bool:
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    return len(numbers) == 3 and numbers >= OLDEST and numbers[:2] <= NEWEST


def _match(path: str, pattern: str) -> str | None:
    if not os.path.isfile(path):
        return None
    found = re.search(pattern, "".join(_read(path)), re.MULTILINE)
    return found.group(1) if found else None


def _read(path: str) -> list[str]:
    with open(path, encoding="utf-8", newline="") as file:
        return file.readlines()


def _write(path: str, lines: list[str]) -> None:
    """Replace the file whole, with its permissions."""
    partial = path + ".partial"
    with open(partial, "w", encoding="utf-8", newline="") as file:
        file.writelines(lines)
    os.chmod(partial, os.stat(path).st_mode)
    os.replace(partial, path)
