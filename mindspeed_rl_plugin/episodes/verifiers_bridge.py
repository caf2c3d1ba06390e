"""Environments of verifiers: its own loop runs each rollout, in the processes of `verifiers_worker`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Set
from typing import Any

from mindspeed_rl_plugin.config.episode_flags import VERIFIERS
from mindspeed_rl_plugin.episodes.environments import EpisodeError, Turn
from mindspeed_rl_plugin.episodes.rollout_bridge import END_SECONDS, RolloutEnvironments, RolloutReport
from mindspeed_rl_plugin.episodes.verifiers_load import ROW
from mindspeed_rl_plugin.rows import SampleId
from mindspeed_rl_plugin.workers.process import Program

MAX_ROLLOUTS = 64  # most rollouts of a process at a time in training; an evaluation in between may add as many


class VerifiersEnvironments(RolloutEnvironments):
    """environment: the text after `verifiers:`. python: interpreter that has verifiers, None for this one. tokenizer:
    path of the prompts' tokenizer. together: see `RolloutEnvironments`; None for lockstep.

    Rows have the field `verifiers`, as `python -m mindspeed_rl_plugin tasks` writes them. Raises ValueError for an
    invalid interpreter.
    """

    def __init__(
        self,
        environment: str,
        python: str | None,
        tokenizer: str,
        workers: int,
        timeout: float,
        wait: float,
        together: int | None = MAX_ROLLOUTS,
        trust_remote_code: bool = False,
    ) -> None:
        program = rollouts_program(interpreter(python))
        setup = (environment, tokenizer, trust_remote_code)
        super().__init__(program, setup, VERIFIERS + environment, workers, timeout, wait, together)

    def finish(self, episode: SampleId, cut: Turn | None = None) -> None:
        """See `Environments`. cut: the turn that a limit has cut, for verifiers to score."""
        self._answer(episode, "finish", cut and self._spoken(cut))

    @staticmethod
    def check_fields(rows: Mapping[str, Set[str]]) -> None:
        for where, fields in rows.items():
            if ROW not in fields:
                raise ValueError(
                    f"--rl-environment {VERIFIERS}: {where} has no field {ROW!r}; make the data with "
                    f"`python -m mindspeed_rl_plugin tasks {VERIFIERS}ID --out FILE.jsonl`"
                )

    def _data(self, episode: SampleId, task: Mapping[str, Any]) -> tuple[Any, ...]:
        return (task["record"][ROW],)

    def _spoken(self, turn: Turn) -> tuple[Any, ...]:
        return turn.tokens, turn.logps


def rollouts_program(python: str | None) -> Program:
    """The program of the processes. python: as `interpreter` returns it."""
    main = "mindspeed_rl_plugin.episodes.verifiers_worker:main"
    return Program(main, str | None, RolloutReport, "a verifiers process", EpisodeError, python, END_SECONDS)


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
