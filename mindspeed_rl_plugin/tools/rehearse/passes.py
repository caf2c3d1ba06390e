"""The processes of a rehearsal: what the parser knows, the arguments as written, and training on a few ranks."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_rl_plugin.tools.rehearse.accept import ACCEPTED
from mindspeed_rl_plugin.tools.rehearse.capture import Launch, run
from mindspeed_rl_plugin.tools.rehearse.entry_script import Entry

REFUSED = "RL cannot run with these arguments"  # how launch.flag_checks begins
_ACCEPT = "mindspeed_rl_plugin.tools.rehearse.accept"
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_FRAME = re.compile(r'\s*File "([^<"][^"]*)", line (\d+)')
_OWNERS = {"mindspeed_llm": "MindSpeed-LLM", "mindspeed": "MindSpeed", "megatron": "Megatron"}  # by package
# Which MindSpeed and vLLM read, and which would name an accelerator's things.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


@dataclass
class Done:
    """One finished process (or torchrun). code: exit status, None when it was ended at its deadline; log: file."""

    name: str
    code: int | None
    log: Path
    seconds: float
    lines: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def verdict(self) -> str:
        """ "ok (12 s)", "FAILED", or that it did not finish."""
        if self.ok:
            return f"ok ({self.seconds:.0f} s)"
        return "FAILED" if self.code is not None else f"FAILED: not finished after {self.seconds:.0f} s"


class Passes:
    """Starts the processes, each with a deadline and a log file of its own in `scratch`."""

    def __init__(self, launch: Launch, entry: Entry, scratch: Path, timeout: float) -> None:
        self._launch, self._entry, self._scratch, self._timeout = launch, entry, scratch, timeout

    def known_flags(self) -> set[str]:
        """Flags of Megatron's parser, and MindSpeed's. Raises ValueError when they cannot be imported."""
        done = self._run("flags", ["-m", _ACCEPT, "--list-flags", *(["mindspeed"] if self._entry.mindspeed else [])])
        if not done.ok:
            raise ValueError(f"Megatron's parser could not be asked:\n{tail(done)}")
        return set(json.loads(done.lines[-1]))

    def accept(self, argv: Sequence[str], world_size: int) -> Done:
        """The arguments through parsers and validation, as rank 0 of a world."""
        world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": self._launch.nproc}
        # The size of a cache that only a host without accelerator has must not speak against the script's lengths.
        cache = ["--rl-kv-cache-gb", "1e6"] if "--rl-algorithm" in argv else []
        command = ["-m", _ACCEPT, str(self._entry.script), *argv, *cache]
        done = self._run("arguments", command, {**world, "MASTER_ADDR": "localhost", "MASTER_PORT": 1})
        if done.ok and ACCEPTED not in done.lines:
            done.code = 1
        return done

    def train(self, name: str, ranks: int, argv: Sequence[str]) -> Done:
        """The entry script on `ranks` processes, through the runner."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return self._run(name, [*torchrun, "-m", "mindspeed_rl_plugin", str(self._entry.script), *argv])

    def _run(self, name: str, arguments: list[str], extra: Mapping[str, object] | None = None) -> Done:
        log, began = self._scratch / f"{name}.log", time.monotonic()
        command, env = [sys.executable, *arguments], self._environment(extra or {})
        code = run(command, log, self._timeout, env=env, cwd=self._launch.cwd)
        return Done(name, code, log, time.monotonic() - began, log.read_text(errors="replace").splitlines())

    def _environment(self, extra: Mapping[str, object]) -> dict[str, str]:
        env = {k: v for k, v in self._launch.env.items() if k not in _LAUNCHER}
        path = os.pathsep.join([*map(str, self._entry.path), _PACKAGE_ROOT])
        ours = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        return {"OMP_NUM_THREADS": "1", **env, **ours, **{k: str(v) for k, v in extra.items()}}


def tail(done: Done, count: int = 25) -> str:
    """The lines that say why it failed: a refusal, a module that is missing, a traceback's end, else the log's."""
    if done.code is None:
        return f"{done.name}: ended at its deadline after {done.seconds:.0f} s; last line: {(done.lines or [''])[-1]}"
    lines = [line.partition("]: ")[2] if line.startswith("[rank") else line for line in done.lines]
    lines = [line for line in lines if not line.strip().startswith("[--")]  # argparse's usage
    errors = [i for i, line in enumerate(lines) if _is_error(line)]
    refused = next((i for i in errors if REFUSED in lines[i]), None)
    if refused is not None:  # the plugin's own words say it all
        listed = itertools.takewhile(lambda line: line.startswith("  - "), lines[refused + 1 :])
        return "\n".join([lines[refused], *listed])
    if errors and (missing := _MISSING.match(lines[errors[0]])):
        return _missing_module(missing[1], lines[: errors[0]])
    end = errors[0] + 12 if errors else len(lines)
    return "\n".join(lines[max(0, end - count) : end])


def _missing_module(module: str, traceback: list[str]) -> str:
    """One line: which module, who imports it, what to do."""
    importers = [m for line in traceback if (m := _FRAME.match(line))]
    file, number = importers[-1].groups() if importers else ("its log does not say where", "?")
    owner = next((name for part, name in _OWNERS.items() if part in Path(file).parts), "the script")
    return (
        f"the Python module {module} is not installed, and {owner} needs it ({file}, line {number}): "
        "install it here, or put a folder that holds it on PYTHONPATH"
    )


def _is_error(line: str) -> bool:
    word = line.split(":")[0]
    return word.endswith(("Error", "Exception")) and " " not in word or ": error: " in line
