"""Reward: responses are graded, a group at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from mindspeed_rl_plugin.dock import ColumnSpec, Dock
from mindspeed_rl_plugin.reward import GradeItem, RewardPool
from mindspeed_rl_plugin.rows import Rows, unpack_json
from mindspeed_rl_plugin.stages.stage import Stage, StageSpec

REWARD = ColumnSpec("reward", torch.float32, "sample", ragged=False)


def spec(graders: int) -> StageSpec:
    """graders: number of rewards, the width of `reward_parts`."""
    return StageSpec(
        "reward",
        reads=("tokens", "loss_mask", "meta"),
        writes=(
            REWARD,
            ColumnSpec("reward_parts", torch.float32, "sample", ragged=False, trailing=(graders,)),
            ColumnSpec("graded", torch.int8, "sample", ragged=False),  # 0: a grader failed and the sample is dropped
            ColumnSpec("grader_error", torch.int8, "sample", ragged=False),  # 1: a grader failed
        ),
        unit="group",  # a batch grader sees all responses of a prompt in one call, on however many ranks
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
        return grade(rows, self.graders, self.decode) if len(rows) else None


def grade(rows: Rows, graders: RewardPool, decode: Callable[[Sequence[int]], str]) -> Rows:
    """The columns of `spec` for B >= 1 responses."""
    items = []
    for i, meta in enumerate(unpack_json(rows["meta"])):
        response = rows["tokens"].row(i)[rows["loss_mask"].row(i).bool()]
        text = decode(response.tolist())
        items.append(GradeItem(meta["text"], text, meta["answer"], meta["record"], rows.ids[i], meta.get("messages")))
    grades = graders.grade(items)
    return Rows(
        rows.ids,
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
