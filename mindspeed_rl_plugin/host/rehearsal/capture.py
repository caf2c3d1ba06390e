"""Run a launch script up to the point where it would start training, and keep the command it would start.

The script runs as it is, in bash, in the current directory. First on its PATH stand `torchrun`, `python`
and `python3`, which record `torchrun ...`, `python -m torch.distributed.launch ...` and `... .run ...`
and start nothing (other uses of python pass through), and `tee`, which writes no file. A `source` of a file
that does not exist, such as CANN's set_env.sh, is noted and skipped.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.run import get_args_parser

RECORD = "MINDSPEED_RL_REHEARSE_RECORD"
MISSING = "MINDSPEED_RL_REHEARSE_MISSING"
_LAUNCHERS = ("torch.distributed.launch", "torch.distributed.run")

_SHIM = """#!{python}
import json, os, sys
name, argv = os.path.basename(sys.argv[0]), sys.argv[1:]
if name != "torchrun" and not (argv[:1] == ["-m"] and argv[1:2] and argv[1] in {launchers!r}):
    os.execv({python!r}, [{python!r}, *argv])
argv = argv if name == "torchrun" else argv[2:]
with open(os.environ[{record!r}], "a") as handle:
    handle.write(json.dumps({{"argv": argv, "cwd": os.getcwd(), "env": dict(os.environ)}}) + "\\n")
"""
_TEE = "#!/bin/sh\nexec cat\n"
# bash reads this file before the script; a function comes before the builtin of its name.
_PRELUDE = f"""
source() {{
    if [ -e "$1" ] || command -v -- "$1" > /dev/null; then builtin source "$@"; else echo "$1" >> "${MISSING}"; fi
}}
"""


@dataclass(frozen=True)
class Launch:
    """What a script would have started on this node.

    script: entry script as written, arguments: its own; nproc: ranks a node, nnodes: nodes; cwd, env: where
    and with which environment; exported: variables that the script set or changed; missing: files that it
    sources and that are not here; started: how many launches it made (this is the first).
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

    @property
    def world(self) -> int:
        return self.nproc * self.nnodes


def capture(script: Path, scratch: Path, timeout: float) -> Launch:
    """Run `script` with the stand-ins. Raises ValueError when it fails, hangs, or starts no training."""
    record, missing, env = _prepare(scratch)
    try:
        done = subprocess.run(
            ["bash", str(script)], env=env, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{script} did not come to its torchrun within {timeout:.0f} s; does it wait for something?"
        ) from None
    if not record.exists():
        raise ValueError(
            f"{script} ended with status {done.returncode} without starting torchrun or python -m "
            f"torch.distributed.launch; its last words: {(done.stderr or done.stdout)[-500:]!r}"
        )
    launches = [json.loads(line) for line in record.read_text().splitlines()]
    absent = missing.read_text().splitlines() if missing.exists() else []
    return _read(launches[0], env, tuple(absent), len(launches))


def _prepare(scratch: Path) -> tuple[Path, Path, dict[str, str]]:
    """Write the stand-ins; returns the record's path, the path of the list of missing files, and the environment."""
    shims = scratch / "bin"
    shims.mkdir(parents=True)
    shim = _SHIM.format(python=sys.executable, launchers=_LAUNCHERS, record=RECORD)
    for name in ("torchrun", "python", "python3"):
        (shims / name).write_text(shim)
    (shims / "tee").write_text(_TEE)
    for path in shims.iterdir():
        path.chmod(0o755)
    prelude = scratch / "prelude.sh"
    prelude.write_text(_PRELUDE)
    record, missing = scratch / "launches.jsonl", scratch / "missing.txt"
    env = {
        **os.environ,
        "PATH": f"{shims}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "BASH_ENV": str(prelude),
        RECORD: str(record),
        MISSING: str(missing),
    }
    return record, missing, env


def _read(launch: dict, before: dict[str, str], missing: tuple[str, ...], started: int) -> Launch:
    args = get_args_parser().parse_args(launch["argv"])
    script, arguments = args.training_script, list(args.training_script_args)
    if args.module:
        if script != "mindspeed_rl_plugin" or not arguments:
            raise ValueError(f"the script starts the module {script}; only entry scripts (*.py) can be rehearsed")
        script, *arguments = arguments
    # bash keeps these by itself, or we have put them there.
    own = {"_", "SHLVL", "PWD", "OLDPWD", "PATH", "BASH_ENV", RECORD, MISSING}
    env = {k: v for k, v in launch["env"].items() if k not in own}
    exported = {k: v for k, v in env.items() if before.get(k) != v}
    return Launch(
        script=script,
        arguments=tuple(arguments),
        nproc=_ranks(str(args.nproc_per_node)),
        nnodes=int(str(args.nnodes).split(":")[-1]),
        cwd=Path(launch["cwd"]),
        env={**env, "PATH": os.environ.get("PATH", os.defpath)},
        exported=exported,
        missing=missing,
        started=started,
    )


def _ranks(nproc: str) -> int:
    """torchrun's --nproc-per-node; words such as "auto" mean a node's eight NPUs."""
    return int(nproc) if nproc.isdigit() else 8


def shown(launch: Launch) -> str:
    """The command in one line, for messages."""
    return shlex.join(["torchrun", f"--nproc-per-node={launch.nproc}", f"--nnodes={launch.nnodes}", launch.script])
