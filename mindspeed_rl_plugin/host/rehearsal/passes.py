"""The processes of a rehearsal: what the parser knows, the arguments as written, and training on a few ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_rl_plugin.host.rehearsal.accept import ACCEPTED
from mindspeed_rl_plugin.host.rehearsal.capture import Launch
from mindspeed_rl_plugin.host.rehearsal.entry import Entry

_ACCEPT = "mindspeed_rl_plugin.host.rehearsal.accept"
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
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


class Passes:
    """Starts the processes, each with a deadline and a log file of its own in `scratch`."""

    def __init__(self, launch: Launch, entry: Entry, scratch: Path, timeout: float) -> None:
        self._launch, self._entry, self._scratch, self._timeout = launch, entry, scratch, timeout

    def known_flags(self) -> set[str]:
        """Flags of Megatron's parser. Raises ValueError when Megatron cannot be imported."""
        done = self._run("flags", [sys.executable, "-m", _ACCEPT, "--list-flags"], {})
        if not done.ok:
            raise ValueError(f"Megatron's parser could not be asked:\n{tail(done)}")
        return set(json.loads(done.lines[-1]))

    def accept(self, argv: Sequence[str]) -> Done:
        """The arguments through parsers and validation, as rank 0 of the script's own world."""
        world = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self._launch.world),
            "LOCAL_WORLD_SIZE": str(self._launch.nproc),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "1",
        }
        done = self._run("arguments", [sys.executable, "-m", _ACCEPT, str(self._entry.script), *argv], world)
        if done.ok and ACCEPTED not in done.lines:
            done.code = 1
        return done

    def train(self, name: str, ranks: int, argv: Sequence[str]) -> Done:
        """The entry script on `ranks` processes, through the runner."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return self._run(name, [*torchrun, "-m", "mindspeed_rl_plugin", str(self._entry.script), *argv], {})

    def _run(self, name: str, command: list[str], extra: dict[str, str]) -> Done:
        log = self._scratch / f"{name}.log"
        began = time.monotonic()
        with open(log, "w") as handle:
            process = subprocess.Popen(
                command,
                stdout=handle,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self._launch.cwd,
                env=self._environment(extra),
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(self._timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        lines = log.read_text(errors="replace").splitlines()
        return Done(name, code, log, time.monotonic() - began, lines)

    def _environment(self, extra: dict[str, str]) -> dict[str, str]:
        env = {k: v for k, v in self._launch.env.items() if k not in _LAUNCHER}
        path = [*map(str, self._entry.path), _PACKAGE_ROOT]
        return {
            **env,
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1"),
            "HF_HUB_OFFLINE": "1",
            **extra,
        }


def tail(done: Done, count: int = 25) -> str:
    """The lines that say why it failed: the last traceback's end, else the log's."""
    if done.code is None:
        return f"{done.name}: ended at its deadline after {done.seconds:.0f} s; last line: {(done.lines or [''])[-1]}"
    lines = [line.partition("]: ")[2] if line.startswith("[rank") else line for line in done.lines]
    lines = [line for line in lines if not line.strip().startswith("[--")]  # argparse's usage
    errors = [i for i, line in enumerate(lines) if _is_error(line)]
    end = errors[0] + 12 if errors else len(lines)
    return "\n".join(lines[max(0, end - count) : end])


def _is_error(line: str) -> bool:
    word = line.split(":")[0]
    return word.endswith(("Error", "Exception")) and " " not in word or ": error: " in line
