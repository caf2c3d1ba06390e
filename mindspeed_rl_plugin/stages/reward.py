"""Reward: responses are graded, a group at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from mindspeed_rl_plugin.dock import ColumnSpec, Dock
from mindspeed_rl_plugin.reward import Grade, GradeItem, RewardPool
from mindspeed_rl_plugin.rows import Rows, SampleId, unpack_json
from mindspeed_rl_plugin.stages.stage import Stage, StageSpec

REWARD = ColumnSpec("reward", torch.float32, "sample", ragged=False)


def spec(graders: int, by_group: bool = True) -> StageSpec:
    """graders: number of rewards, the width of `reward_parts`; by_group: whether one is called with whole groups."""
    return StageSpec(
        "reward",
        reads=("tokens", "loss_mask", "meta"),
        writes=(
            REWARD,
            ColumnSpec("reward_parts", torch.float32, "sample", ragged=False, trailing=(graders,)),
            ColumnSpec("graded", torch.int8, "sample", ragged=False),  # 0: a grader failed and the sample is dropped
            ColumnSpec("grader_error", torch.int8, "sample", ragged=False),  # 1: a grader failed
        ),
        unit="group" if by_group else "row",
        resource="cpu",
    )


class Reward(Stage):
    """graders: the pool of this rank; decode: response token ids to the text that graders see."""

    def __init__(
        self, spec: StageSpec, dock: Dock, deadline: float, graders: RewardPool, decode: Callable[[Sequence[int]], str]
    ) -> None:
        super().__init__(spec, dock, deadline)
        self.graders, self.decode = graders, decode

    def compute(self, rows: Rows) -> Rows | None:
        """Grades of B responses; None where there are none. Raises RewardError where a failure stops the run."""
        return grade_rows(rows.ids, self.graders.grade(self.items(rows))) if len(rows) else None

    def items(self, rows: Rows) -> list[GradeItem]:
        """What graders get of B responses."""
        items = []
        for i, meta in enumerate(unpack_json(rows["meta"])):
            text = self.decode(rows["tokens"].row(i)[rows["loss_mask"].row(i).bool()].tolist())
            items.append(
                GradeItem(meta["text"], text, meta["answer"], meta["record"], rows.ids[i], meta.get("messages"))
            )
        return items

    def graded(self, ids: Sequence[SampleId], more: Sequence[str] = ()) -> Rows:
        """What `select.group_stats` reads of rows that are graded, whoever did that, and `more` columns."""
        names = {self.spec.stored_writes.get(name, name): name for name in ("reward", "graded", "grader_error")}
        rows = self.dock.read(ids, [*names, "length", *more])
        return Rows(rows.ids, {names.get(name, name): column for name, column in rows.columns.items()})


def grade_rows(ids: Sequence[SampleId], grades: Sequence[Grade]) -> Rows:
    """The columns of `spec` for B >= 1 responses."""
    return Rows(
        tuple(ids),
        {
            "reward": torch.tensor([g.total for g in grades], dtype=torch.float32),
            "reward_parts": torch.tensor([g.parts for g in grades], dtype=torch.float32).reshape(len(grades), -1),
            "graded": torch.tensor([not g.dropped for g in grades], dtype=torch.int8),
            "grader_error": torch.tensor([g.error is not None for g in grades], dtype=torch.int8),
        },
    )


class FailureLog:
    """Says the first failure of each grader. what: in which they fail."""

    def __init__(self, what: str = "this rollout") -> None:
        self.what = what
        self.said: set[str] = set()

    def add(self, failures: Iterable[Mapping[str, str]], *, show: bool) -> None:
        """failures: of each rank, by grader; show: whether this rank prints."""
        for name, text in (pair for part in failures for pair in part.items()):
            if name not in self.said and show:
                print(f"[rl] warning: a grader failed, for the first time in {self.what}: {text}", flush=True)
            self.said.add(name)
