"""What is graded and what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed_rl_plugin.types import SampleId


class RewardError(RuntimeError):
    """A grader raised, ran out of time, died, or returned something that is no finite number."""


@dataclass(frozen=True)
class GradeItem:
    """One response to grade. answer: ground truth, "" when the data has none; record: the row's other fields."""

    prompt: str
    response: str
    answer: str
    record: Mapping[str, object]
    id: SampleId


@dataclass(frozen=True)
class Grade:
    """total: weighted sum of `parts`, one entry a grader, in the order of the specs.

    error: what failed, None when nothing did; a failed part is 0.0. dropped: the sample must not be trained on.
    """

    total: float
    parts: tuple[float, ...]
    error: str | None = None
    dropped: bool = False
