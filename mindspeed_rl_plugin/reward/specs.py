"""The graders that flags name: built-in ones, `path/to/file.py:function`, `model:DIR`, each maybe with `=WEIGHT`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl_plugin.reward.reward_model import MODEL_PREFIX, check_files
from mindspeed_rl_plugin.workers.process import SHARE_OF_WAIT

ENVIRONMENT = "environment"  # the grader that takes the environment's reward
BUILTIN = ("math", "exact", "regex", ENVIRONMENT)
KINDS = {"function": r"^(?:async )?def ([a-zA-Z]\w*)", "class": r"^class ([a-zA-Z]\w*)"}  # how a file defines them


@dataclass(frozen=True)
class Spec:
    """One grader."""

    name: str  # short and unique, for metrics and errors
    given: str  # as in the flag, without weight
    weight: float = 1.0
    file: str | None = None  # of a function; directory of a reward model; None: a built-in grader
    function: str | None = None  # its name in the file; None for other graders

    @property
    def is_model(self) -> bool:
        return self.given.startswith(MODEL_PREFIX)

    @property
    def compares(self) -> bool:
        """Whether it is a built-in grader that compares the response with the data's answer."""
        return self.file is None and self.name != ENVIRONMENT


def parse_specs(texts: Sequence[str], regex: str | None) -> list[Spec]:
    """Specs from their flags.

    Raises ValueError for an unknown grader, a bad weight, no positive weight, a missing file, no pattern.
    """
    if not texts:
        raise ValueError(f"no reward: give one or several of {_known()}")
    specs = [_parse(text) for text in texts]
    names = [s.name for s in specs]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ValueError(f"rewards {twice} are given twice; no two rewards may have the same name")
    if not any(s.weight > 0 for s in specs):
        raise ValueError(
            f"the weights of {', '.join(f'{s.name}={s.weight:g}' for s in specs)} are all <= 0, so nothing says when a "
            "response is solved; give one grader a weight > 0 (let a penalty return negative values instead)"
        )
    if "regex" in names:
        if not regex:
            raise ValueError("reward 'regex' needs a pattern: --rl-reward-regex")
        try:
            re.compile(regex)
        except re.error as error:
            raise ValueError(f"--rl-reward-regex {regex!r} is no regular expression: {error}") from error
    return specs


def model_specs(texts: Sequence[str]) -> list[Spec]:
    """The reward models among the graders. Raises ValueError for an invalid one."""
    return [_parse(text) for text in texts if text.startswith(MODEL_PREFIX)]


def time_limits(timeout: float | Sequence[float], graders: int, wait_timeout: float) -> tuple[float, ...]:
    """Limits of one call of each grader [seconds]. timeout: one for all or one for each; wait_timeout: how long other
    ranks wait. Raises ValueError for another number of limits, or for a limit <= 0 or > SHARE_OF_WAIT x
    `wait_timeout`."""
    given = (timeout,) if isinstance(timeout, (int, float)) else tuple(timeout)
    if len(given) not in (1, graders):
        raise ValueError(
            f"{len(given)} time limits ({' '.join(f'{t:g}' for t in given) or 'none'}) for {graders} rewards; give one "
            "for all, or one for each in the order of --rl-reward (--rl-reward-timeout)"
        )
    if not all(t > 0 for t in given):  # written so that NaN fails
        raise ValueError(f"--rl-reward-timeout {' '.join(f'{t:g}' for t in given)}: give numbers above 0")
    if max(given) > SHARE_OF_WAIT * wait_timeout:
        raise ValueError(
            f"one grading call may take {max(given):g} s (--rl-reward-timeout), which is more than the "
            f"{SHARE_OF_WAIT * wait_timeout:g} s for all grading of a rank ({SHARE_OF_WAIT} of --rl-wait-timeout "
            f"{wait_timeout:g}); lower --rl-reward-timeout or raise --rl-wait-timeout"
        )
    return given * graders if len(given) == 1 else given


def _parse(text: str) -> Spec:
    name, weight = text, 1.0
    match = re.fullmatch(r"(.+)=([^=/:]*)", text)
    if match:
        name = match[1]
        try:
            weight = float(match[2])
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight):
            raise ValueError(f"reward {text!r}: the weight {match[2]!r} is not a finite number")
    if name in BUILTIN:
        return Spec(name, name, weight)
    if name.startswith(MODEL_PREFIX):
        path = Path(name.removeprefix(MODEL_PREFIX)).resolve()
        check_files(str(path))
        return Spec(path.name, name, weight, str(path))
    if (found := locate(name, "reward")) is None:
        raise ValueError(f"reward {name!r} is unknown; known: {_known()}")
    return Spec(found[1], name, weight, *found)


def locate(given: str, what: str, kind: str = "function") -> tuple[str, str] | None:
    """(file, name) of a text path/to/file.py:NAME; None for other texts. what: beginning of errors, before the text;
    kind: a key of `KINDS`. Raises ValueError for a missing file or an invalid name; the file is not executed."""
    if given.endswith(".py") and Path(given).is_file():
        names = re.findall(KINDS[kind], Path(given).read_text(encoding="utf-8"), re.MULTILINE)
        raise ValueError(f"{what} {given!r} names no {kind}: give {given}:NAME; it has {', '.join(names) or 'none'}")
    file, _, name = given.rpartition(":")
    if not file.endswith(".py"):
        return None
    if not Path(file).is_file():
        raise ValueError(f"{what} {given!r}: there is no file {file!r}")
    if not name.isidentifier():
        raise ValueError(f"{what} {given!r}: {name!r} is no name of a {kind}")
    return str(Path(file).resolve()), name


def _known() -> str:
    return ", ".join(BUILTIN) + ", path/to/file.py:function or model:DIR, each with an optional =WEIGHT"
