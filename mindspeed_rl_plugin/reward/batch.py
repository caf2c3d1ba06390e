"""Responses that are graded together, and their grades so far."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mindspeed_rl_plugin.reward.items import Grade, GradeItem, RewardError
from mindspeed_rl_plugin.workers.process import LATE


class Batch:
    """Items, and their results so far.

    names: names of the graders, as errors show them.
    weights, on_error: of each grader.
    failures: collects the first failure of each grader.
    where: place of the items, for errors; None: errors give rollout, prompt and response of an item.
    texts: what workers get of each item.
    left: number of missing grades.
    end: deadline for all grades, on the monotonic clock.
    """

    def __init__(
        self,
        items: Sequence[GradeItem],
        names: Sequence[str],
        weights: Sequence[float],
        on_error: Sequence[str],
        failures: dict[str, str],
        where: str | None = None,
    ) -> None:
        self.items, self.failures, self.left, self.end = items, failures, 0, math.inf
        self._names, self._weights, self._on_error, self._where = names, weights, on_error, where
        self.texts = [vars(item) | {"record": dict(item.record), "id": None} for item in items]
        self._parts = [[0.0] * len(names) for _ in items]
        self._errors: list[list[str]] = [[] for _ in items]
        self._dropped = [False] * len(items)

    def record(self, index: int, grader: int, value: float | None, error: str | None) -> None:
        """Store a grade, or the error of its grader. Raises RewardError for an error that stops the run."""
        self.left -= 1
        if error is None:
            self._parts[index][grader] = value
            return
        limit = " (--rl-reward-timeout)" if error.startswith(LATE) else ""
        text = f"reward {self._names[grader]!r} {error}{limit}\n  {self.place(index)}"
        text += "\n  (the grade is 0, and reward/errors counts the error)" * (self._on_error[grader] == "zero")
        self.failures.setdefault(self._names[grader], text)
        self._errors[index].append(text)
        self._dropped[index] |= self._on_error[grader] == "drop"
        if self._on_error[grader] == "stop":
            raise RewardError(f"{text}\n  (with --rl-reward-on-error zero or drop the run continues and counts this)")

    def place(self, index: int) -> str:
        """Place and texts of an item, for an error."""
        item = self.items[index]
        rollout = "the evaluation" if item.id.epoch < 0 else f"rollout {item.id.epoch}"  # epochs of evaluations are < 0
        where = self._where or f"on {rollout}, prompt {item.id.group}, response {item.id.member}"
        texts = (f"{name} {_shortened(getattr(item, name))}" for name in ("prompt", "response", "answer"))
        return f"{where}: {', '.join(texts)}"

    def grades(self) -> list[Grade]:
        """The results in the order of the items; a total is the weighted sum of the parts."""
        totals = [sum(w * p for w, p in zip(self._weights, parts, strict=True)) for parts in self._parts]
        return [
            Grade(total, tuple(parts), "\n".join(errors) or None, dropped)
            for total, parts, errors, dropped in zip(totals, self._parts, self._errors, self._dropped, strict=True)
        ]


def _shortened(text: str, limit: int = 160) -> str:
    """Beginning and end of a text: a question is mostly at the beginning, an answer at the end."""
    half = limit // 2
    return repr(text if len(text) <= limit else f"{text[:half]} [...] {text[-half:]}")
