"""Runs a launch script, and records the command by which it would start training.

The script runs in bash, in the current directory, with the stand-ins of `standins.sh`. A launch is recorded and starts
nothing. Commands with effects outside the rehearsal's folder are listed and not run. A missing path of a `source` or
`cd` is recorded; `source` is then skipped, and `cd` goes to an empty folder. All other commands run. With Landlock
(`confine.py`) they change no file outside of the rehearsal; without it the only limit is that `>` overwrites no file.
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
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import NoReturn

from torch.distributed.run import get_args_parser

from mindspeed_rl_plugin.tools.rehearse import confine

_STARTED_BY = "MINDSPEED_RL_STARTED_BY"  # environment variable that marks the processes of one command
IN_BACKGROUND = 5.0  # seconds after the script's end in which a launch in the background (&) is awaited
# Commands that start training on other machines, in a container, or without torchrun.
OTHER_LAUNCHERS = "ssh pdsh clush srun sbatch mpirun docker podman nerdctl kubectl sudo su deepspeed accelerate msrun"
STOOD_IN_FOR = """
    rm rmdir mkdir touch cp mv ln install dd truncate shred unlink chmod chown chgrp rsync
    kill pkill killall fuser ray tensorboard wandb mlflow
    scp sftp pscp wget curl hf huggingface-cli modelscope aws obsutil gsutil hdfs hadoop
    systemctl service crontab reboot shutdown mount umount modprobe sysctl
    npu-smi hccn_tool msnpureport pip pip3 conda apt apt-get yum dnf
"""
# Variables of bash and of the stand-ins, not of the script.
_BASH_VARIABLES = (_STARTED_BY, "_", "SHLVL", "PWD", "OLDPWD", "PATH", "BASH_ENV", "TMPDIR")


@dataclass(frozen=True)
class CapturedLaunch:
    """The launch that a script would have started on this node."""

    script: str  # entry script as written
    arguments: tuple[str, ...]  # of the entry script
    nproc: int  # ranks per node
    nnodes: int  # nodes
    cwd: Path
    env: dict[str, str]
    exported: dict[str, str]  # variables that the script set or changed
    missing: tuple[str, ...]  # missing files that it sources, and missing folders that it enters
    started: int  # number of different launches by the script, of which this is the first
    skipped: tuple[str, ...] = ()  # commands that were not run
    confined: bool = True  # whether it could write only in the rehearsal's folders
    attached: bool = False  # whether the launch itself uses this plugin

    @property
    def world(self) -> int:
        return self.nproc * self.nnodes


@dataclass
class Done:
    """One finished process (or torchrun)."""

    name: str
    code: int | None  # exit status; None: it was ended at its deadline
    seconds: float
    lines: list[str]  # its log

    @property
    def ok(self) -> bool:
        return self.code == 0


def capture(script: Path, scratch: Path, timeout: float) -> CapturedLaunch:
    """Run `script` with the stand-ins. Raises ValueError if it is missing, fails, hangs or starts no training."""
    if not script.is_file():
        raise ValueError(f"{script}: no such file; give a launch script (bash) that calls torchrun")
    record, own = (scratch.resolve() / "capture" / name for name in ("record", "own"))
    command, confined = ["bash", str(script)], confine.version() > 0
    environment = _stand_ins(record, own, confined)
    if confined:
        command = [sys.executable, "-IS", confine.__file__, str(record), str(own), "--", *command]
    done = run(command, record / "output", timeout, env=environment, until=(record / "launches").exists)
    launches = [json.loads(line) for line in _lines(record / "launches")]
    skipped = _lines(record / "skipped")
    if not launches:
        raise ValueError(_no_launch(script, done, skipped))
    args = _torchrun_arguments(launches[0]["argv"], script)
    words = [args.training_script, *args.training_script_args][1 if args.module else 0 :]
    env = {k: v for k, v in launches[0]["env"].items() if k not in _BASH_VARIABLES}
    return CapturedLaunch(
        script=words[0],
        arguments=tuple(words[1:]),
        # Words such as "auto" count as eight ranks per node.
        nproc=int(args.nproc_per_node) if str(args.nproc_per_node).isdigit() else 8,
        nnodes=int(str(args.nnodes).split(":")[-1]),
        cwd=Path(launches[0]["cwd"]),
        env=env | {k: v for k, v in os.environ.items() if k in _BASH_VARIABLES},
        exported={k: v for k, v in env.items() if environment.get(k) != v},
        missing=_lines(record / "missing"),
        started=len(launches),
        skipped=skipped,
        confined=confined,
        attached=bool(args.module),
    )


def torchrun(ranks: int, *arguments: str, where: Sequence[str] = ("--standalone",)) -> list[str]:
    """The arguments of Python that start ranks on this machine. where: its place among several machines."""
    return ["-m", "torch.distributed.run", *where, f"--nproc-per-node={ranks}", *arguments]


def run(
    command: list[str],
    log: Path,
    timeout: float,
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    until: Callable[[], bool] = lambda: True,
) -> Done:
    """Run a command with its output in `log`. Its processes are killed when it ends (see `until`) or after `timeout`
    seconds, also those in sessions of their own, as torchrun starts them. until: whether work that it left in the
    background is done; after a successful end this is awaited for at most IN_BACKGROUND seconds, before the processes
    are killed."""
    streams, began = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}, time.monotonic()
    mark = f"{_STARTED_BY}={uuid.uuid4().hex}"
    env = {**env, _STARTED_BY: mark.partition("=")[2]}
    with open(log, "wb") as out:
        process = subprocess.Popen(command, env=env, cwd=cwd, stdout=out, start_new_session=True, **streams)
        try:
            code: int | None = process.wait(timeout)
            grace = time.monotonic() + IN_BACKGROUND
            while code == 0 and not until() and time.monotonic() < grace:
                time.sleep(0.1)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_marked(mark.encode())
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Done(log.stem, code, time.monotonic() - began, log.read_text(errors="replace").splitlines())


def end_by_signals() -> None:
    """From now on SIGTERM and SIGHUP (a lost terminal) raise SystemExit, so that `run` ends what it has started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda received, _: sys.exit(128 + received))


def _kill_marked(mark: bytes) -> None:
    """Kill the processes that have a variable in their environment. Waits at most five seconds for their ends. Python's
    resource trackers end by themselves, when they have removed the shared memory of the others."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                found += [path.parent] if mark in path.read_bytes().split(b"\0") else []
        for process in found:
            with contextlib.suppress(OSError):
                if b"resource_tracker" not in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        if not found:
            return
        time.sleep(0.05)


def _stand_ins(record: Path, own: Path, confined: bool) -> dict[str, str]:
    """Write the stand-ins next to `record`. Returns the environment for a script with them."""
    shims, prelude = record.with_name("bin"), record.with_name("standins.sh")
    path = os.environ.get("PATH", os.defpath)
    for each in (record, own, shims):
        each.mkdir(parents=True)
    names = f"{STOOD_IN_FOR} {OTHER_LAUNCHERS}".split()
    named = {"names": f" {' '.join(names)} ", "python": sys.executable, "record": record, "own": own, "path": path}
    lines = [f"rehearse_{name}={shlex.quote(str(value))}" for name, value in named.items()]
    lines += [] if confined else ["set -o noclobber"]
    prelude.write_text("\n".join([*lines, resources.files(__package__).joinpath("standins.sh").read_text()]))
    for name in (*names, "torchrun", "python", "python3", "tee"):
        (shims / name).write_text('#!/bin/bash\nrehearse_by_name "${0##*/}" "$@"\n')
        (shims / name).chmod(0o755)
    return {**os.environ, "PATH": f"{shims}{os.pathsep}{path}", "BASH_ENV": str(prelude), "TMPDIR": str(own)}


def _lines(path: Path) -> tuple[str, ...]:
    """Each line once, in order."""
    return tuple(dict.fromkeys(path.read_text(errors="replace").splitlines())) if path.exists() else ()


def _no_launch(script: Path, done: Done, skipped: Sequence[str]) -> str:
    if done.code is None:
        return f"{script} did not reach torchrun within {done.seconds:.0f} s; does it wait for an event?"
    if away := [line for line in skipped if line.split()[0] in OTHER_LAUNCHERS.split()]:
        return (
            f"{script} starts training by {away[0].split()[0]} ({away[0][:200]}), which is not run here; give the "
            "script that calls torchrun on one node"
        )
    output = "\n".join(done.lines)
    rules = "; it may write only in the rehearsal's folders" if "Permission denied" in output else ""
    return (
        f"{script} ended with status {done.code} without starting torchrun or python -m "
        f"torch.distributed.launch{rules}; the end of its output: {output[-500:]!r}"
    )


def _one_address(argv: list[str]) -> list[str]:
    """Without all but the first word of the master's address, which MindSpeed-LLM's scripts may leave to be filled in:
    --master_addr your master node IP --master_port 6005."""
    at = next((i for i, word in enumerate(argv) if word in ("--master_addr", "--master-addr")), len(argv)) + 2
    end = next((i for i, word in enumerate(argv) if i >= at and word.startswith("--")), at)
    return argv if any(word.endswith(".py") for word in argv[at - 1 : end]) else [*argv[:at], *argv[end:]]


def _torchrun_arguments(argv: list[str], path: Path) -> argparse.Namespace:
    """torchrun's own arguments. Raises ValueError, with the script's name, for arguments that torchrun refuses, for an
    entry script that is no *.py, and for a module other than `mindspeed_rl_plugin`."""

    def fail(message: str) -> NoReturn:
        raise ValueError(
            f"{path}: its arguments for torchrun are wrong: {message}; they begin with {shlex.join(argv[:10])!r}; "
            "is a variable of the shell empty?"
        )

    parser = get_args_parser()
    parser.error = fail  # type: ignore[method-assign]
    args = parser.parse_args(_one_address(argv))
    if not str(args.nproc_per_node):
        fail("--nproc-per-node has no value")
    if not str(args.nnodes).split(":")[-1].isdigit():
        fail(f"--nnodes is {args.nnodes!r}")
    if not args.module and not args.training_script.endswith(".py"):
        fail(f"the entry script would be {args.training_script!r}, which is no *.py")
    if args.module and (args.training_script != "mindspeed_rl_plugin" or not args.training_script_args):
        raise ValueError(f"{path} starts the module {args.training_script}; only entry scripts (*.py) can be used here")
    return args
