"""Run a launch script up to the point where it would start training, and keep the command it would start.

The script runs as it is, in bash, in the current directory, with `standins.py` for commands:

- `torchrun ...`, `python -m torch.distributed.launch ...` and `... .run ...` are recorded and start nothing;
- commands with effects outside the script (rm, mkdir, mv, cp, kill, pkill, ssh, docker, sudo, ray, pip, ...) are
  only listed; those on files do run where all their paths are in a folder that the rehearsal made;
- `tee` writes no file; a `source` of a file that does not exist, such as CANN's set_env.sh, is noted and skipped; a
  `cd` to a folder that does not exist is noted and goes to an empty one.

Everything else runs: other uses of python, sed, find, git, programs by their full path. Where the kernel has
Landlock (`confine.py`) none of it can change a file, open a TCP connection (Linux 6.7) or signal a process outside
the rehearsal (6.12); output redirected into a file is refused, and a launch that has one is recorded all the same.
Without Landlock `>` replaces no file that is there, and what such commands write elsewhere is written; that is said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from torch.distributed.run import get_args_parser

from mindspeed_rl_plugin.tools.rehearse import confine
from mindspeed_rl_plugin.tools.rehearse.launchers import ELSEWHERE, check_launchers
from mindspeed_rl_plugin.tools.rehearse.standins import StandIns

IN_BACKGROUND = 5.0  # seconds for a launch that the script made with & before its end


@dataclass(frozen=True)
class Launch:
    """What a script would have started on this node.

    script: entry script as written, arguments: its own; nproc: ranks a node, nnodes: nodes; cwd, env: where
    and with which environment; exported: variables that the script set or changed; missing: files that it
    sources and folders that it enters, and that are not here; started: how many launches it made (this is the first);
    skipped: commands that it called and that were not run; confined: whether it could write only in scratch.
    """

    script: str
    arguments: tuple[str, ...]
    nproc: int
    nnodes: int
    cwd: Path
    env: dict[str, str]
    exported: dict[str, str]
    missing: tuple[str, ...]
    started: int
    skipped: tuple[str, ...] = ()
    confined: bool = True

    @property
    def world(self) -> int:
        return self.nproc * self.nnodes


def capture(script: Path, scratch: Path, timeout: float) -> Launch:
    """Run `script` with the stand-ins.

    Raises ValueError when it is not there, fails, hangs or starts no training, and before it runs where it calls
    torchrun by a path and would start some.
    """
    if not script.is_file():
        raise ValueError(f"{script}: no such file; give a launch script (bash) that calls torchrun")
    check_launchers(script, os.environ)
    confined = confine.version() > 0
    standins = StandIns(scratch / "capture", clobber=confined)
    command = ["bash", str(script)]
    if confined:
        command = [sys.executable, "-IS", confine.__file__, *map(str, standins.writable), "--", *command]
    code, output = _run(command, standins, timeout)
    launches = [json.loads(line) for line in _text(standins.record).splitlines()]
    if not launches:
        if code is None:
            raise ValueError(f"{script} came to no torchrun within {timeout:.0f} s; does it wait for something?")
        elsewhere = [line for line in _lines(standins.skipped) if line.split()[0] in ELSEWHERE]
        if elsewhere:
            raise ValueError(
                f"{script} leaves its launch to {elsewhere[0].split()[0]} ({elsewhere[0][:200]}), which is not run "
                "here; give the script that calls torchrun on one node"
            )
        rules = "; it may write in no folder but the rehearsal's" if "Permission denied" in output else ""
        raise ValueError(
            f"{script} ended with status {code} without starting torchrun or python -m "
            f"torch.distributed.launch{rules}; its last words: {output[-500:]!r}"
        )
    # One with redirected output may have been recorded twice (see the stand-ins' prelude).
    different = [a for a, b in zip(launches, [None, *launches], strict=False) if b is None or a["argv"] != b["argv"]]
    return _read(different, standins, confined, script)


def _run(command: list[str], standins: StandIns, timeout: float) -> tuple[int | None, str]:
    """Exit status, None past the deadline, and what it wrote; nothing of it is alive afterwards."""
    log = standins.own.with_name("output.log")
    with open(log, "wb") as handle:
        process = subprocess.Popen(
            command,
            env=standins.environment,
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout)
        grace = time.monotonic() + IN_BACKGROUND
        while not _text(standins.record).endswith("\n") and code == 0 and time.monotonic() < grace:
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):  # what it left in the background
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return code, _text(log)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _lines(path: Path) -> tuple[str, ...]:
    """Each line once, in order."""
    return tuple(dict.fromkeys(_text(path).splitlines()))


def _torchruns(argv: list[str], path: Path) -> argparse.Namespace:
    """torchrun's own arguments. Raises ValueError, with the script's name, for what torchrun refuses."""

    def fail(message: str) -> NoReturn:
        raise ValueError(
            f"{path}: torchrun would refuse its arguments: {message}; they begin with {shlex.join(argv[:10])!r}; "
            "is a variable of the shell empty?"
        )

    parser = get_args_parser()
    parser.error = fail  # type: ignore[method-assign]
    args = parser.parse_args(argv)
    if not str(args.nproc_per_node):
        fail("--nproc-per-node has no value")
    if not str(args.nnodes).split(":")[-1].isdigit():
        fail(f"--nnodes is {args.nnodes!r}")
    if not args.module and not args.training_script.endswith(".py"):
        fail(f"the entry script would be {args.training_script!r}, which is no *.py")
    return args


def _read(launches: list[dict], standins: StandIns, confined: bool, path: Path) -> Launch:
    launch, before = launches[0], standins.environment
    args = _torchruns(launch["argv"], path)
    script, arguments = args.training_script, list(args.training_script_args)
    if args.module:
        if script != "mindspeed_rl_plugin" or not arguments:
            raise ValueError(f"the script starts the module {script}; only entry scripts (*.py) can be rehearsed")
        script, *arguments = arguments
    # bash keeps these by itself, or they are the stand-ins'.
    own = {"_", "SHLVL", "PWD", "OLDPWD", "PATH", "BASH_ENV"}
    own |= {"TMPDIR"} if launch["env"].get("TMPDIR") == before["TMPDIR"] else set()
    env = {k: v for k, v in launch["env"].items() if k not in own}
    exported = {k: v for k, v in env.items() if before.get(k) != v}
    kept = {k: os.environ[k] for k in own & {"TMPDIR", "BASH_ENV"} & os.environ.keys()}
    return Launch(
        script=script,
        arguments=tuple(arguments),
        nproc=_ranks(str(args.nproc_per_node)),
        nnodes=int(str(args.nnodes).split(":")[-1]),
        cwd=Path(launch["cwd"]),
        env={**env, **kept, "PATH": os.environ.get("PATH", os.defpath)},
        exported=exported,
        missing=_lines(standins.missing),
        started=len(launches),
        skipped=_lines(standins.skipped),
        confined=confined,
    )


def _ranks(nproc: str) -> int:
    """torchrun's --nproc-per-node; words such as "auto" mean a node's eight NPUs."""
    return int(nproc) if nproc.isdigit() else 8


def shown(launch: Launch) -> str:
    """The command in one line, for messages."""
    return shlex.join(["torchrun", f"--nproc-per-node={launch.nproc}", f"--nnodes={launch.nnodes}", launch.script])
