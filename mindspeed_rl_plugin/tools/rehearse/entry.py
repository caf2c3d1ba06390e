"""Which entry script is rehearsed, and on what: the script's own on MindSpeed, or a plain one on Megatron."""

from __future__ import annotations

import ast
import os
import re
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from mindspeed_rl_plugin.tools.rehearse.capture import Launch

MINDSPEED_CORE = "0.12"  # the core that MindSpeed 2.x patches
_MINDSPEED = {"mindspeed", "mindspeed_llm"}
_ROOT = Path(__file__).resolve().parents[3]
_UNDER_MINDSPEED = """import runpy
import sys

sys.path.insert(0, {folder!r})
import mindspeed.megatron_adaptor

runpy.run_path({script!r}, run_name="__main__")
"""


@dataclass(frozen=True)
class Entry:
    """What runs.

    script: entry script; path: folders put on PYTHONPATH; mindspeed, mindspeed_llm: whether the script imports
    them and they are here; core: Megatron Core's version; notes: what had to be chosen, and why.
    """

    script: Path
    path: tuple[Path, ...]
    mindspeed: bool
    mindspeed_llm: bool
    core: str
    notes: tuple[str, ...]


def find_entry(launch: Launch, launch_script: Path, scratch: Path) -> Entry:
    """Find the entry script and its libraries. Raises ValueError when there is nothing to run.

    MEGATRON_LM_PATH (one or several checkouts, colon separated), MINDSPEED_PATH, MINDSPEED_LLM_PATH and the
    script's own PYTHONPATH are looked into before what is installed. Where the script's own entry cannot run,
    a plain one of Megatron does, under MindSpeed if that is here. scratch: folder for what has to be made.
    """
    megatrons = [Path(p) for p in _split("MEGATRON_LM_PATH", os.environ)]
    extra = [Path(p) for p in (*_split("PYTHONPATH", launch.env), *_split("MINDSPEED_PATH", os.environ))]
    script = _script(launch, launch_script)
    if script is None:
        return _other(f"{launch.script} is not here", megatrons, extra, scratch)
    wanted = _imports(script) & _MINDSPEED
    if not wanted:
        path = [script.parent, *extra, *megatrons[:1]]
        return Entry(script, tuple(path), False, False, _installed_core(path), ())
    beside = [script.parent, *extra]
    if not all(_found(name, beside) for name in wanted | {"mindspeed"}):
        why = "MindSpeed is not installed (set MINDSPEED_PATH to a checkout)"
        return _other(why, megatrons, extra, scratch)
    # MindSpeed-LLM has Megatron's folder copied beside its scripts.
    if _core(script.parent) is None:
        beside += [m for m in megatrons if _core(m) == MINDSPEED_CORE][:1]
    core = _installed_core(beside)
    notes = []
    if script.parent != launch.cwd.resolve():
        notes.append(f"{launch.script} is not where the launch script looks for it: taken from {script.parent}")
    if core != MINDSPEED_CORE:
        strange = f"MindSpeed 2.x patches Megatron Core {MINDSPEED_CORE}, and {core} is what is found here"
        notes.append(f"{strange}; set MEGATRON_LM_PATH to a checkout of it")
    return Entry(script, tuple(beside), True, "mindspeed_llm" in wanted, core, tuple(notes))


def _other(why: str, megatrons: list[Path], extra: list[Path], scratch: Path) -> Entry:
    """A plain entry script in place of the launch script's own: under MindSpeed, else on Megatron alone."""
    checkouts = [m for m in megatrons if (m / "pretrain_gpt.py").is_file()]
    patched = next((m for m in checkouts if _core(m) == MINDSPEED_CORE), None)
    if patched and _found("mindspeed", extra):
        script = scratch / "pretrain_gpt.py"
        script.write_text(_UNDER_MINDSPEED.format(folder=str(patched), script=str(patched / "pretrain_gpt.py")))
        note = f"{why}: rehearsed with MindSpeed and {patched / 'pretrain_gpt.py'} instead"
        return Entry(script, (patched, *extra), True, False, MINDSPEED_CORE, (note,))
    script = checkouts[0] / "pretrain_gpt.py" if checkouts else _ROOT / "examples" / "pretrain_gpt.py"
    if not script.is_file():
        raise ValueError(f"{why}, and there is no plain entry script; set MEGATRON_LM_PATH to a Megatron-LM checkout")
    path = [*checkouts[:1], *extra]
    note = f"{why}: rehearsed on plain Megatron instead, with {script}"
    return Entry(script, tuple(path), False, False, _installed_core(path), (note,))


def _script(launch: Launch, launch_script: Path) -> Path | None:
    """The entry script: relative to where the launch was made, else MindSpeed-LLM's.

    That one is looked for in MINDSPEED_LLM_PATH, and above the launch script, which is one of its examples.
    """
    here = launch.cwd / launch.script
    if here.is_file():
        return here.resolve()
    folders = [Path(p) for p in _split("MINDSPEED_LLM_PATH", os.environ)]
    for folder in (*folders, *launch_script.resolve().parents):
        script = folder / launch.script
        if script.is_file() and _imports(script) & _MINDSPEED:
            return script.resolve()
    return None


def _split(name: str, env: dict[str, str] | os._Environ) -> list[str]:
    return [p for p in env.get(name, "").split(os.pathsep) if p]


def _imports(script: Path) -> set[str]:
    """Top-level packages that a script imports, also inside functions."""
    roots = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.split(".")[0])
    return roots


def _found(package: str, folders: list[Path]) -> bool:
    return PathFinder.find_spec(package, [*map(str, folders), *sys.path]) is not None


def _core(folder: Path) -> str | None:
    """Major and minor version of the Megatron Core in a folder, or None."""
    info = folder / "megatron" / "core" / "package_info.py"
    if not info.is_file():
        return None
    text = info.read_text()
    found = [re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR")]
    return ".".join(m.group(1) for m in found if m)


def _installed_core(folders: list[Path]) -> str:
    """Version of the core that an import would find. Raises ValueError when there is none."""
    for folder in (*folders, *map(Path, sys.path)):
        version = _core(folder)
        if version is not None:
            return version
    raise ValueError("Megatron is not installed: set MEGATRON_LM_PATH to a Megatron-LM checkout")
