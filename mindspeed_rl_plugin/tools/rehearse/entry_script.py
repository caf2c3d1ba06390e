"""Chooses the entry script of a rehearsal: the one that the launch script names, or Megatron's pretrain_gpt.py."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from mindspeed_rl_plugin.checks.taken_over import LORA_OF_LLM, TAKEN_OVER
from mindspeed_rl_plugin.tools.patch import core_version
from mindspeed_rl_plugin.tools.rehearse.capture import CapturedLaunch
from mindspeed_rl_plugin.tools.rehearse.command_line import Flags

MINDSPEED_CORE = (0, 12)  # the core that MindSpeed 2.x patches
ROOT = Path(__file__).resolve().parents[3]
_PRETRAINING, _FINE_TUNING = "pretrain_gpt.py", "posttrain_gpt.py"
_WITH_NORMS = ("mindspeed_llm.tasks.models.spec.qwen3_spec", "layer_spec")
_UNDER_MINDSPEED = """import runpy
import sys

sys.path.insert(0, {folder!r})
import mindspeed.megatron_adaptor

runpy.run_path({script!r}, run_name="__main__")
"""


@dataclass(frozen=True)
class Entry:
    """The entry script to run."""

    script: Path  # entry script
    path: Sequence[Path]  # folders put on PYTHONPATH
    note: str = ""  # what was chosen, and why
    mindspeed: bool = False  # whether the script imports MindSpeed, and MindSpeed is available
    mindspeed_llm: bool = False  # the same for MindSpeed-LLM

    @property
    def platform(self) -> str:
        """The libraries that are used, with Megatron's version, for messages. Raises ValueError without Megatron."""
        cores = filter(None, map(core_version, (*self.path, *map(Path, sys.path))))
        if not (core := next(cores, None)):
            raise ValueError("Megatron is not installed: set MEGATRON_LM_PATH to a Megatron-LM checkout")
        on = "MindSpeed-LLM" if self.mindspeed_llm else "MindSpeed" if self.mindspeed else "plain Megatron"
        wrong = self.mindspeed and core[:2] != MINDSPEED_CORE
        other = " (MindSpeed 2.x patches 0.12; set MEGATRON_LM_PATH to a checkout of 0.12)" if wrong else ""
        return f"{on}, Megatron Core {core[0]}.{core[1]}{other}"


def find_entry(launch: CapturedLaunch, launch_script: Path, scratch: Path) -> Entry:
    """Find the entry script and its libraries. Raises ValueError if there is nothing to run, or a checkout is missing.

    Checkouts in variables and in the script's PYTHONPATH come before installed packages. If the named entry script
    cannot run, Megatron's pretrain_gpt.py is used, with MindSpeed if available. scratch: folder for generated files.
    """
    megatrons, mindspeed, llm = map(_checkouts, ("MEGATRON_LM_PATH", "MINDSPEED_PATH", "MINDSPEED_LLM_PATH"))
    patched = [folder for folder in megatrons if (core_version(folder) or ())[:2] == MINDSPEED_CORE]
    extra = [*_folders(launch.env.get("PYTHONPATH", "")), *mindspeed]
    # MindSpeed-LLM is in MINDSPEED_LLM_PATH or, if the launch script is an example of it, in a folder above the script.
    own, *others = (folder / launch.script for folder in (launch.cwd, *llm, *launch_script.resolve().parents))
    there = [own] if own.is_file() else [path for path in others if path.is_file() and _imports(path)]
    why = f"{launch.script} is not here"
    theirs = next((f for f in ("--enable-hf2mg-convert", "--stage") if f in launch.arguments), None)
    if not there and theirs:
        raise ValueError(
            f"{why}, and only MindSpeed-LLM has {theirs}: set MEGATRON_LM_PATH, MINDSPEED_PATH and MINDSPEED_LLM_PATH "
            "to checkouts"
        )
    if there:
        script = there[0].resolve()
        note = "" if there[0] is own else f"{why}: taken from {script.parent}"
        path, wanted = [script.parent, *extra], _imports(script)
        if not wanted:
            return Entry(script, [*path, *megatrons[:1]], note)
        if all(_importable(name, path) for name in wanted | {"mindspeed"}):
            return Entry(script, [*path, *patched[:1]], note, True, "mindspeed_llm" in wanted)
        why = "MindSpeed is not installed (set MINDSPEED_PATH to a checkout)"
    if patched and _importable("mindspeed", extra):
        script, plain = scratch / _PRETRAINING, patched[0] / _PRETRAINING
        script.write_text(_UNDER_MINDSPEED.format(folder=str(patched[0]), script=str(plain)))
        return Entry(script, [patched[0], *extra], f"{why}: rehearsed with MindSpeed and {plain} instead", True)
    script = next((m / _PRETRAINING for m in megatrons), ROOT / "examples" / _PRETRAINING)
    if not script.is_file():
        raise ValueError(f"{why}, nor is {script}; set MEGATRON_LM_PATH to a Megatron-LM checkout")
    return Entry(script, [*megatrons[:1], *extra], f"{why}: rehearsed on plain Megatron instead, with {script}")


def pretraining(script: Path, flags: Flags) -> Path:
    """The script that makes the checkpoint which `script` loads: `script` or, if it is for fine-tuning, the pretraining
    script. Removes from `flags` --stage and the flags that RL takes over (`TAKEN_OVER`, `LORA_OF_LLM`), except
    --mock-data and --split."""
    theirs = {flag for row in TAKEN_OVER.values() for flag in row.split()} - {"--mock-data", "--split"}
    taken = (name for name, _, value in (flag.partition("=") for flag in theirs) if value in ("", flags.get(name)))
    flags.apply("of training without RL", " ".join(("--stage", *LORA_OF_LLM, *taken)))
    other = script.with_name(_PRETRAINING)
    if script.name != _FINE_TUNING or not other.is_file():
        return script
    if "--qk-layernorm" in flags and "--spec" not in flags:
        flags.set("--spec", *_WITH_NORMS, why="without one, MindSpeed-LLM's pretraining leaves these norms out")
    return other


def _importable(package: str, folders: Sequence[Path]) -> bool:
    return PathFinder.find_spec(package, [*map(str, folders), *sys.path]) is not None


def _folders(text: str) -> list[Path]:
    return [Path(p) for p in text.split(os.pathsep) if p]


def _checkouts(name: str) -> list[Path]:
    """Folders in an environment variable. Raises ValueError if a folder is missing."""
    folders = _folders(os.environ.get(name, ""))
    if absent := [folder for folder in folders if not folder.is_dir()]:
        raise ValueError(f"{name}={absent[0]} is no directory; set it to a checkout, or unset it")
    return folders


def _imports(script: Path) -> set[str]:
    """MindSpeed's packages that a script imports, also inside functions."""
    return set(re.findall(r"^\s*(?:from|import) (mindspeed(?:_llm)?)\b", script.read_text(), re.M))
