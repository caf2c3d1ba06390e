"""What is graded at once, and what came of it so far."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_rl_plugin.reward.items import Grade, GradeItem, RewardError


class Batch:
    """Items, and the results so far. names: of the graders, as errors show them; where: what errors say of an item's
    place, None for its sample. texts: what workers get of each item; failures: the first of each grader."""

    def __init__(
        self, items: Sequence[GradeItem], names: Sequence[str], on_error: str, where: str | None = None
    ) -> None:
        self._items, self._names, self._on_error, self._where = items, names, on_error, where
        self.texts = [vars(item) | {"record": dict(item.record), "id": None} for item in items]
        self._parts = [[0.0] * len(names) for _ in items]
        self._errors: list[list[str]] = [[] for _ in items]
        self.failures: dict[str, str] = {}

    def record(self, index: int, grader: int, value: float | None, error: str | None) -> None:
        """One grade, or why there is none. Raises RewardError for an error that stops the run."""
        if error is None:
            self._parts[index][grader] = value
            return
        text = f"reward {self._names[grader]!r} {error}\n  {self.place(index)}"
        self.failures.setdefault(self._names[grader], text)
        self._errors[index].append(text)
        if self._on_error == "stop":
            raise RewardError(f"{text}\n  (--rl-reward-on-error zero or drop: the run goes on and counts such samples)")

    def place(self, index: int) -> str:
        """Which item, with its texts."""
        item = self._items[index]
        rollout = "the evaluation" if item.id.epoch < 0 else f"rollout {item.id.epoch}"  # as `stages.evaluate` numbers
        where = self._where or f"on {rollout}, prompt {item.id.group}, response {item.id.member}"
        texts = (f"{name} {_shortened(getattr(item, name))}" for name in ("prompt", "response", "answer"))
        return f"{where}: {', '.join(texts)}"

    def grades(self, weights: Sequence[float]) -> list[Grade]:
        """The results, parts weighted into totals."""
        totals = [sum(w * p for w, p in zip(weights, parts, strict=True)) for parts in self._parts]
        return [
            Grade(total, tuple(parts), "\n".join(errors) or None, self._on_error == "drop" and bool(errors))
            for total, parts, errors in zip(totals, self._parts, self._errors, strict=True)
        ]


def _shortened(text: str, limit: int = 160) -> str:
    """Head and tail: the question begins, the answer ends a text."""
    half = limit // 2
    return repr(text if len(text) <= limit else f"{text[:half]} [...] {text[-half:]}")
