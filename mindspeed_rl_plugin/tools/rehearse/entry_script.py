"""Which entry script is rehearsed, and on what: the script's own on MindSpeed, or a plain one on Megatron."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Mapping, Sequence
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

    @property
    def platform(self) -> str:
        """What it runs on, for messages."""
        on = "MindSpeed-LLM" if self.mindspeed_llm else "MindSpeed" if self.mindspeed else "plain Megatron"
        return f"{on}, Megatron Core {self.core}"


def find_entry(launch: Launch, launch_script: Path, scratch: Path) -> Entry:
    """Find the entry script and its libraries. Raises ValueError when there is nothing to run.

    MEGATRON_LM_PATH (one or several checkouts, colon separated), MINDSPEED_PATH, MINDSPEED_LLM_PATH and the
    script's own PYTHONPATH are looked into before what is installed. Where the script's own entry cannot run,
    a plain one of Megatron does, under MindSpeed if that is here. scratch: folder for what has to be made.
    """
    megatrons = _folders("MEGATRON_LM_PATH", os.environ)
    extra = [*_folders("PYTHONPATH", launch.env), *_folders("MINDSPEED_PATH", os.environ)]
    script = _script(launch, launch_script)
    wanted = _imports(script) & _MINDSPEED if script else set()
    if script and not wanted:
        path = [script.parent, *extra, *megatrons[:1]]
        return Entry(script, tuple(path), False, False, _installed_core(path), ())
    if script and all(_importable(name, [script.parent, *extra]) for name in wanted | {"mindspeed"}):
        path = [script.parent, *extra]
        if _core(script.parent) is None:  # MindSpeed-LLM has Megatron's folder copied beside its scripts
            path += [m for m in megatrons if _core(m) == MINDSPEED_CORE][:1]
        core, notes = _installed_core(path), []
        if script.parent != launch.cwd.resolve():
            notes.append(f"{launch.script} is not where the launch script looks for it: taken from {script.parent}")
        if core != MINDSPEED_CORE:
            notes.append(
                f"MindSpeed 2.x patches Megatron Core {MINDSPEED_CORE}, and {core} is what is here; set "
                "MEGATRON_LM_PATH to a checkout of it"
            )
        return Entry(script, tuple(path), True, "mindspeed_llm" in wanted, core, tuple(notes))
    why = "MindSpeed is not installed (set MINDSPEED_PATH to a checkout)" if script else f"{launch.script} is not here"
    return _plain_entry(why, megatrons, extra, scratch)


def _plain_entry(why: str, megatrons: list[Path], extra: list[Path], scratch: Path) -> Entry:
    """A plain entry script in place of the launch script's own: under MindSpeed, else on Megatron alone."""
    checkouts = [m for m in megatrons if (m / "pretrain_gpt.py").is_file()]
    patched = next((m for m in checkouts if _core(m) == MINDSPEED_CORE), None)
    if patched and _importable("mindspeed", extra):
        script = scratch / "pretrain_gpt.py"
        script.write_text(_UNDER_MINDSPEED.format(folder=str(patched), script=str(patched / "pretrain_gpt.py")))
        note = f"{why}: rehearsed with MindSpeed and {patched / 'pretrain_gpt.py'} instead"
        return Entry(script, (patched, *extra), True, False, MINDSPEED_CORE, (note,))
    script = checkouts[0] / "pretrain_gpt.py" if checkouts else _ROOT / "examples" / "pretrain_gpt.py"
    if not script.is_file():
        raise ValueError(f"{why}, and there is no plain entry script; set MEGATRON_LM_PATH to a Megatron-LM checkout")
    path = (*checkouts[:1], *extra)
    note = f"{why}: rehearsed on plain Megatron instead, with {script}"
    return Entry(script, path, False, False, _installed_core(path), (note,))


def _script(launch: Launch, launch_script: Path) -> Path | None:
    """The entry script: relative to where the launch was made, else MindSpeed-LLM's.

    That one is looked for in MINDSPEED_LLM_PATH, and above the launch script, which is one of its examples.
    """
    here = launch.cwd / launch.script
    if here.is_file():
        return here.resolve()
    folders = [*_folders("MINDSPEED_LLM_PATH", os.environ), *launch_script.resolve().parents]
    scripts = [folder / launch.script for folder in folders if (folder / launch.script).is_file()]
    return next((script.resolve() for script in scripts if _imports(script) & _MINDSPEED), None)


def _importable(package: str, folders: Sequence[Path]) -> bool:
    return PathFinder.find_spec(package, [*map(str, folders), *sys.path]) is not None


def _folders(name: str, env: Mapping[str, str]) -> list[Path]:
    return [Path(p) for p in env.get(name, "").split(os.pathsep) if p]


def _imports(script: Path) -> set[str]:
    """Top-level packages that a script imports, also inside functions."""
    nodes = list(ast.walk(ast.parse(script.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.split(".")[0] for name in names}


def _core(folder: Path) -> str | None:
    """Major and minor version of the Megatron Core in a folder, or None."""
    info = folder / "megatron" / "core" / "package_info.py"
    return ".".join(re.findall(r"^(?:MAJOR|MINOR) = (\d+)", info.read_text(), re.M)) if info.is_file() else None


def _installed_core(folders: Sequence[Path]) -> str:
    """Version of the core that an import would find. Raises ValueError when there is none."""
    for folder in (*folders, *map(Path, sys.path)):
        if version := _core(folder):
            return version
    raise ValueError("Megatron is not installed: set MEGATRON_LM_PATH to a Megatron-LM checkout")
