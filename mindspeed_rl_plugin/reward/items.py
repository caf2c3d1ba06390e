"""`GradeItem`, the input of graders, and `Grade`, their result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_rl_plugin.rows import SampleId


SOLVED_AT = 1.0 - 1e-6  # below 1, because sums of fractions and float32 columns are rounded
OWN = ("turn", "reward", "seconds", "path")  # fields that we add to chat messages; no template reads them


class RewardError(ValueError):
    """A grader cannot be loaded, raised an error, ran out of time, died, or returned no finite number."""


class GradingTooLate(RewardError, TimeoutError):
    """All graders of a batch together took too long."""


@dataclass(frozen=True)
class GradeItem:
    """One response to grade."""

    prompt: str  # if the data has chat messages, their text
    response: str  # if it has several turns, the last one
    answer: str  # ground truth, "" when the data has none
    record: Mapping[str, object]  # the row's other fields
    id: SampleId
    messages: Sequence[Mapping[str, object]] | None = None  # chat messages of the data; None: the data has a string
    conversation: Sequence[Mapping[str, object]] | None = None  # all chat messages; None: single turn
    environment: float | None = None  # sum of the rewards that the environment gave; None: single turn


def opening(messages: Sequence[Mapping[str, Any]] | None, prompt: str) -> list[dict[str, Any]]:
    """The messages before the model's first turn: those of the data, without the fields `OWN`, which only we add."""
    asked = messages or [{"role": "user", "content": prompt}]
    return [{name: value for name, value in message.items() if name not in OWN} for message in asked]


@dataclass(frozen=True)
class Grade:
    """What the graders gave for one response."""

    total: float  # weighted sum of `parts`
    parts: tuple[float, ...]  # one entry for each grader, in the order of the specs; 0.0 if it failed
    error: str | None = None  # the errors of graders that failed
    dropped: bool = False  # a grader with `on_error` "drop" failed: the sample's group is not trained


def solved(parts: Sequence[float], weights: Sequence[float]) -> bool:
    """Whether a response is solved: every grader of positive weight gave at least 1.

    parts, weights: one entry for each grader. Graders of weight <= 0 (a length penalty, a measurement) do not count.
    The total does not count either, so a bonus cannot make a wrong answer right, nor a penalty a right answer wrong.
    Raises ValueError if no weight is positive (`parse_specs` refuses such rewards at start).
    """
    wanted = [part for part, weight in zip(parts, weights, strict=True) if weight > 0]
    if not wanted:
        raise ValueError(f"none of the graders' weights {list(weights)} is positive, so nothing says what solved means")
    return all(part >= SOLVED_AT for part in wanted)
