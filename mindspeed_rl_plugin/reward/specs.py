"""Which graders: `math`, `exact`, `regex` or `path/to/file.py:function`, each with an optional `=WEIGHT`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BUILTIN = ("math", "exact", "regex")
ON_ERROR = ("stop", "zero", "drop")


@dataclass(frozen=True)
class Spec:
    """One grader. name: short, unique, used in metrics and errors; file and function: None for the built-in ones."""

    name: str
    weight: float = 1.0
    file: str | None = None
    function: str | None = None


def parse_specs(texts: Sequence[str], regex: str | None) -> list[Spec]:
    """Specs from their flags. Raises ValueError for an unknown grader, a bad weight, a missing file, no pattern."""
    if not texts:
        raise ValueError(f"no reward: give one or several of {_known()}")
    specs = [_parse(text) for text in texts]
    names = [s.name for s in specs]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ValueError(f"rewards {twice} are given twice; each needs a name of its own")
    if "regex" in names:
        _check_pattern(regex)
    return specs


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
        return Spec(name, weight)
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise ValueError(f"reward {name!r} is unknown; known: {_known()}")
    if not Path(file).is_file():
        raise ValueError(f"reward {name!r}: there is no file {file!r}")
    if not function.isidentifier():
        raise ValueError(f"reward {name!r}: {function!r} is no name of a function")
    return Spec(function, weight, str(Path(file).resolve()), function)


def _check_pattern(regex: str | None) -> None:
    if not regex:
        raise ValueError("reward 'regex' needs a pattern: --rl-reward-regex")
    try:
        re.compile(regex)
    except re.error as error:
        raise ValueError(f"--rl-reward-regex {regex!r} is no regular expression: {error}") from error


def _known() -> str:
    return ", ".join(BUILTIN) + " or path/to/file.py:function, each with an optional =WEIGHT"
