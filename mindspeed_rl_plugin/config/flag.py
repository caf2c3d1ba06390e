"""A flag is a field of a config group: its default, help, unit, limits, choices, and which runs read it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

FLAG_PREFIX = "rl_"


@dataclass(frozen=True)
class FlagReader:
    """What reads a flag, if not every run does."""

    what: str  # its name in messages: "only ... reads it"
    reads: Callable[[Any, Any], bool]  # (resolved `Algorithm`, `RLConfig`) -> whether a run has this reader


DPO_ONLY = FlagReader("--rl-algorithm dpo", lambda a, _: a.from_pairs)


def flag(
    default: Any,
    help: str,
    *,
    unit: str = "",
    choices: tuple[str, ...] | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    reader: FlagReader | None = None,
    pairs: bool = False,
    form: Callable[[str], Any] | None = None,
) -> Any:
    """A config field that is also a flag. If the default is a tuple, the flag takes several values; a bool is a switch.

    least, most: inclusive limits; above, below: exclusive limits; reader: what reads the flag, None: every run that
    samples responses; pairs: whether runs that learn from given pairs read it; form: checks the text, and raises
    argparse.ArgumentTypeError if it is invalid. The flag's value is the text itself.
    """
    metadata = {"help": help, "unit": unit, "choices": choices, "reader": reader, "pairs": pairs, "form": form}
    limits = {"least": least, "above": above, "most": most, "below": below}
    return field(default=default, metadata={**metadata, "limits": {k: v for k, v in limits.items() if v is not None}})


_COMPARISONS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "least": ("at least", lambda value, limit: value >= limit),
    "above": ("above", lambda value, limit: value > limit),
    "most": ("at most", lambda value, limit: value <= limit),
    "below": ("below", lambda value, limit: value < limit),
}


def limits_text(f: dataclasses.Field) -> str:
    """The limits of a field as text, such as `at least 0 and at most 1`; empty if it has none."""
    return " and ".join(f"{_COMPARISONS[kind][0]} {limit:g}" for kind, limit in f.metadata["limits"].items())


def value_problems(f: dataclasses.Field, value: Any) -> Iterator[str]:
    """One message for each number outside the field's limits, and for each unknown word of a flag of several words."""
    limits, choices = f.metadata["limits"], f.metadata["choices"]
    if isinstance(value, tuple) and choices:
        for word in split_words(value):
            if word not in choices:
                yield f"{flag_name(f.name)} {word} is unknown; known: {', '.join(choices)}"
    if not limits or value is None:
        return
    for number in value if isinstance(value, tuple) else (value,):
        # NaN fails every comparison.
        if not (math.isfinite(number) and all(_COMPARISONS[kind][1](number, limit) for kind, limit in limits.items())):
            yield f"{flag_name(f.name)} is {number}; give a number {limits_text(f)}"


def split_words(values: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a flag of several values, separated by commas or spaces."""
    return tuple(word for value in values for word in value.split(","))


def spelt(name: str) -> str:
    """`seq_length` -> `--seq-length`."""
    return "--" + name.replace("_", "-")


def flag_name(field_name: str) -> str:
    """`samples_per_prompt` -> `--rl-samples-per-prompt`."""
    return spelt(FLAG_PREFIX + field_name)


def as_given(field_name: str, value: object) -> str:
    """A flag with its value, as on a command line."""
    name = flag_name(field_name)
    if isinstance(value, bool):
        return name if value else f"--no-{name[2:]}"
    return f"{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def valued(group: Any, name: str) -> str:
    """A flag of a config group with its value; marked if this is the default, since the user may not have given it."""
    value, default = getattr(group, name), type(group).__dataclass_fields__[name].default
    return as_given(name, value) + (" (the default)" if value == default else "")
