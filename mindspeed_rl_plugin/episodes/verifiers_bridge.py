"""The processes for environments of verifiers, which are agents in an interpreter of their own."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Mapping, Set

from mindspeed_rl_plugin.config.episode_flags import VERIFIERS
from mindspeed_rl_plugin.episodes.agents import AGENTS_PROGRAM
from mindspeed_rl_plugin.gateway.verifiers_load import ROW
from mindspeed_rl_plugin.workers.process import Program

MAX_ROLLOUTS = 64  # most rollouts of a process at a time in training; an evaluation in between may add as many


def verifiers_program(python: str | None) -> Program:
    """What the processes run. python: --rl-environment-python. Raises ValueError for an invalid interpreter."""
    main = "mindspeed_rl_plugin.gateway.verifiers_load:serve"
    return dataclasses.replace(AGENTS_PROGRAM, main=main, who="a verifiers process", python=interpreter(python))


def check_rows(rows: Mapping[str, Set[str]]) -> None:
    """`Environments.check_fields`: rows are those that `python -m mindspeed_rl_plugin tasks` writes."""
    for where, fields in rows.items():
        if ROW not in fields:
            raise ValueError(
                f"--rl-environment {VERIFIERS}: {where} has no field {ROW!r}; make the data with "
                f"`python -m mindspeed_rl_plugin tasks {VERIFIERS}ID --out FILE.jsonl`"
            )


def interpreter(python: str | None) -> str | None:
    """Path of --rl-environment-python, None for the interpreter of the job. Raises ValueError for an invalid one."""
    if python is None:
        return None
    advice = "give an interpreter of Python 3.11 or later that has verifiers, such as venv/bin/python"
    found = shutil.which(python)
    if found is None:
        raise ValueError(f"--rl-environment-python {python}: there is no such program here; {advice}")
    code = "import sys; print(*sys.version_info[:2], sep='.')"
    try:
        said = subprocess.run([found, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip()
        version = tuple(map(int, said.split(".")))
    except (OSError, ValueError, subprocess.TimeoutExpired):
        raise ValueError(f"--rl-environment-python {python} is no Python interpreter; {advice}") from None
    if version < (3, 11):
        raise ValueError(f"--rl-environment-python {python} is Python {said}; {advice}")
    return os.path.abspath(found)
