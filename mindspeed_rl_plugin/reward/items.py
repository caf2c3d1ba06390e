"""What is graded and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_rl_plugin.rows import SampleId


SOLVED_AT = 1.0 - 1e-6  # a grader that adds up shares, or a float32 column, may miss 1 by rounding
OWN = ("turn", "reward", "seconds")  # what chat messages hold for others than templates


class RewardError(ValueError):
    """A grader raised, ran out of time, died, or returned something that is no finite number; or all of them together
    took too long."""


@dataclass(frozen=True)
class GradeItem:
    """One response to grade. answer: ground truth, "" when the data has none; record: the row's other fields;
    messages: chat messages that the data holds in the place of a prompt in one string, whose text `prompt` is then.

    Of several turns `response` is the last one; conversation: all chat messages; environment: the sum of the rewards
    that the environment gave; else both are None."""

    prompt: str
    response: str
    answer: str
    record: Mapping[str, object]
    id: SampleId
    messages: Sequence[Mapping[str, object]] | None = None
    conversation: Sequence[Mapping[str, object]] | None = None
    environment: float | None = None


def opening(messages: Sequence[Mapping[str, Any]] | None, prompt: str) -> list[dict[str, Any]]:
    """The messages before the model's first turn: the data's, without fields that are called as `OWN`, which would be
    taken for ours."""
    asked = messages or [{"role": "user", "content": prompt}]
    return [{name: value for name, value in message.items() if name not in OWN} for message in asked]


@dataclass(frozen=True)
class Grade:
    """total: weighted sum of `parts`, one entry a grader, in the order of the specs.

    error: what failed, None when nothing did; a failed part is 0.0. dropped: a grader failed under `on_error` "drop",
    so the total means nothing and the sample's whole group is kept out of training.
    """

    total: float
    parts: tuple[float, ...]
    error: str | None = None
    dropped: bool = False


def solved(parts: Sequence[float], weights: Sequence[float]) -> bool:
    """Whether a response is solved: every grader of positive weight gave at least 1.

    parts, weights: one entry a grader. Graders of weight <= 0 (a length penalty, a measurement) have no say, and the
    total has none: a bonus cannot make up for a wrong answer, a penalty cannot spoil a right one. Raises ValueError
    where no weight is positive: nothing would then be asked for (`parse_specs` refuses such rewards at start).
    """
    wanted = [part for part, weight in zip(parts, weights, strict=True) if weight > 0]
    if not wanted:
        raise ValueError(f"none of the graders' weights {list(weights)} is positive, so nothing says what solved means")
    return all(part >= SOLVED_AT for part in wanted)
