"""One flag as a field of a config group: default, help, unit, limits, choices, and what reads it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

FLAG_PREFIX = "rl_"


@dataclass(frozen=True)
class FlagReader:
    """The reader of a flag that not every run reads."""

    what: str  # its name in messages
    reads: Callable[[Any, Any], bool]  # (resolved `Algorithm`, `RLConfig`) -> whether a run has it


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
    """A config field that is also a flag. A tuple as default makes it take several values, False makes it a switch.

    least, most: limits that a value may reach; above, below: limits that it may not reach; reader: None where all
    runs that sample responses read it; pairs: whether an algorithm that learns from given pairs reads it;
    form: reads the text, and raises argparse.ArgumentTypeError where it cannot; the value stays the text.
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
    """The limits of a field, as `at least 0 and at most 1`; empty where it has none."""
    return " and ".join(f"{_COMPARISONS[kind][0]} {limit:g}" for kind, limit in f.metadata["limits"].items())


def value_problems(f: dataclasses.Field, value: Any) -> Iterator[str]:
    """One message for a number outside the field's limits, and for each unknown word of a field of several values."""
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
    """The words of a flag of several values, whether given with commas or spaces."""
    return tuple(word for value in values for word in value.split(","))


def spelt(name: str) -> str:
    """`seq_length` -> `--seq-length`."""
    return "--" + name.replace("_", "-")


def flag_name(field_name: str) -> str:
    """`samples_per_prompt` -> `--rl-samples-per-prompt`."""
    return spelt(FLAG_PREFIX + field_name)


def as_given(field_name: str, value: object) -> str:
    """A flag as it was given, with its value."""
    name = flag_name(field_name)
    if isinstance(value, bool):
        return name if value else f"--no-{name[2:]}"
    return f"{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def valued(group: Any, name: str) -> str:
    """A flag of a config group with its value, marked where it is the default, which may not have been given."""
    value, default = getattr(group, name), type(group).__dataclass_fields__[name].default
    return as_given(name, value) + (" (the default)" if value == default else "")
