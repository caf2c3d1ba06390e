"""The processes of a rehearsal: the arguments as written, and training on a few ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl_plugin.tools.rehearse import accept
from mindspeed_rl_plugin.tools.rehearse.capture import Launch, run
from mindspeed_rl_plugin.tools.rehearse.entry_script import ROOT, Entry

_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


@dataclass
class Done:
    """One finished process (or torchrun). code: exit status, None when it was ended at its deadline; lines: its log."""

    name: str
    code: int | None
    seconds: float
    lines: list[str]

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def verdict(self) -> str:
        return f"{'ok' if self.ok else 'FAILED'} ({self.seconds:.0f} s)"


@dataclass(frozen=True)
class Passes:
    """Starts the processes, each with a deadline [seconds] and a log file of its own in `scratch`."""

    launch: Launch
    entry: Entry
    scratch: Path
    timeout: float

    def accept(self, argv: Sequence[str], world_size: int) -> tuple[Done, str]:
        """The arguments through parsers and validation, as rank 0 of a world. Also returns the flags that the parser
        does not have; under MindSpeed-LLM, whose flags they are, it refuses them."""
        world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": self.launch.nproc}
        # The size of a cache that only a host without accelerator has must not speak against the script's lengths.
        cache = ["--rl-kv-cache-gb", "1e6"] if "--rl-algorithm" in argv else []
        lenient = [] if self.entry.mindspeed_llm else ["--any-flag"]
        command = ["-m", accept.__name__, *lenient, str(self.entry.script), *argv, *cache]
        done = self._run("arguments", command, **world, MASTER_ADDR="localhost", MASTER_PORT=1)
        if done.ok and accept.ACCEPTED not in done.lines:
            done.code = 1
        unknown = (line.removeprefix(accept.UNKNOWN) for line in done.lines if line.startswith(accept.UNKNOWN))
        return done, next(unknown, "")

    def train(self, name: str, ranks: int, argv: Sequence[str]) -> Done:
        """The entry script on `ranks` processes, through the runner."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return self._run(name, [*torchrun, "-m", "mindspeed_rl_plugin", str(self.entry.script), *argv])

    def _run(self, name: str, arguments: list[str], **more: object) -> Done:
        log, began = self.scratch / f"{name}.log", time.monotonic()
        env = {"OMP_NUM_THREADS": "1"} | {k: v for k, v in self.launch.env.items() if k not in _LAUNCHER}
        path = os.pathsep.join(map(str, (*self.entry.path, ROOT)))
        env |= {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        env |= {k: str(v) for k, v in more.items()}
        code = run([sys.executable, *arguments], log, self.timeout, env=env, cwd=self.launch.cwd)
        return Done(name, code, time.monotonic() - began, log.read_text(errors="replace").splitlines())
