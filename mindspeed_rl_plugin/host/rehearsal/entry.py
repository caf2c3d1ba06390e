"""Which entry script is rehearsed, and on what: the script's own on MindSpeed, or a plain one on Megatron."""

from __future__ import annotations

import ast
import os
import re
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from mindspeed_rl_plugin.host.rehearsal.capture import Launch

MINDSPEED_CORE = "0.12"  # the core that MindSpeed 2.x patches
_ROOT = Path(__file__).resolve().parents[3]


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


def find_entry(launch: Launch, launch_script: Path) -> Entry:
    """Find the entry script and its libraries. Raises ValueError when there is nothing to run.

    MEGATRON_LM_PATH (one or several checkouts, colon separated), MINDSPEED_PATH and the script's own
    PYTHONPATH are looked into before what is installed.
    """
    script = _script(launch, launch_script)
    megatrons = [Path(p) for p in _split("MEGATRON_LM_PATH", os.environ)]
    extra = [Path(p) for p in (*_split("PYTHONPATH", launch.env), *_split("MINDSPEED_PATH", os.environ))]
    wanted = _imports(script) & {"mindspeed", "mindspeed_llm"} if script else {"mindspeed_llm"}
    if script and wanted:
        beside = [script.parent, *extra]
        if _found("mindspeed", beside) and all(_found(name, beside) for name in wanted):
            # MindSpeed-LLM has Megatron's folder copied beside its scripts.
            if _core(script.parent) is None:
                beside += [m for m in megatrons if _core(m) == MINDSPEED_CORE][:1]
            core = _installed_core(beside)
            strange = f"MindSpeed 2.x patches Megatron Core {MINDSPEED_CORE}, and {core} is what is found here"
            notes = () if core == MINDSPEED_CORE else (f"{strange}; set MEGATRON_LM_PATH to a checkout of it",)
            return Entry(script, tuple(beside), True, "mindspeed_llm" in wanted, core, notes)
    elif script:
        path = [script.parent, *extra, *megatrons[:1]]
        return Entry(script, tuple(path), False, False, _installed_core(path), ())
    why = "MindSpeed is not installed (set MINDSPEED_PATH to a checkout)" if wanted else "no entry script"
    return _plain(launch, megatrons, extra, why if script else f"{launch.script} is not here")


def _plain(launch: Launch, megatrons: list[Path], extra: list[Path], why: str) -> Entry:
    checkout = next((m for m in megatrons if (m / "pretrain_gpt.py").is_file()), None)
    script = checkout / "pretrain_gpt.py" if checkout else _ROOT / "examples" / "pretrain_gpt.py"
    if not script.is_file():
        raise ValueError(f"{why}, and there is no plain entry script; set MEGATRON_LM_PATH to a Megatron-LM checkout")
    path = [checkout, *extra] if checkout else extra
    note = f"{why}: rehearsed on plain Megatron instead, with {script}"
    return Entry(script, tuple(path), False, False, _installed_core(path), (note,))


def _script(launch: Launch, launch_script: Path) -> Path | None:
    """The entry script: relative to where the launch was made, else beside or above the launch script."""
    for folder in (launch.cwd, *launch_script.resolve().parents):
        if (folder / launch.script).is_file():
            return (folder / launch.script).resolve()
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
