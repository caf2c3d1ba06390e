"""Reward: grades responses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from mindspeed_rl_plugin.dock import ColumnSpec
from mindspeed_rl_plugin.environment import say
from mindspeed_rl_plugin.reward import Grade, GradeItem, RewardPool
from mindspeed_rl_plugin.rows import Rows, SampleId, unpack_json
from mindspeed_rl_plugin.stages.context import RankContext
from mindspeed_rl_plugin.stages.stage import Stage, StageSpec

REWARD = ColumnSpec("reward", torch.float32, "sample", ragged=False)
OF_TURNS = ("turns", "turn_reward", "conversation", "environment_failed")


def spec(graders: int, by_group: bool = True) -> StageSpec:
    """graders: number of rewards, the width of `reward_parts`; by_group: whether a grader is called with groups."""
    return StageSpec(
        "reward",
        reads=("tokens", "loss_mask", "meta"),
        if_written=OF_TURNS,
        writes=(
            REWARD,
            ColumnSpec("reward_parts", torch.float32, "sample", ragged=False, trailing=(graders,)),
            # 0: a grader or the environment failed, so that the sample's group is not trained
            ColumnSpec("graded", torch.int8, "sample", ragged=False),
            ColumnSpec("grader_error", torch.int8, "sample", ragged=False),  # 1: a grader failed
        ),
        resource="cpu",
        whole_groups=by_group,
        build=Reward,
    )


class Reward(Stage):
    """The stage on this rank, with this rank's pool of graders."""

    def __init__(self, spec: StageSpec, context: RankContext) -> None:
        super().__init__(spec, context)
        self.graders: RewardPool = context.graders

    def for_thread(self) -> Reward:
        """The same stage, for use in another thread."""
        other = copy.copy(self)
        other.dock = self.dock.for_thread()
        return other

    def compute(self, rows: Rows) -> Rows | None:
        """Grades of B responses; None if there are none. Raises RewardError if a failure stops the run."""
        return self.grades(rows, self.graders.grade(self.items(rows))) if len(rows) else None

    def items(self, rows: Rows) -> list[GradeItem]:
        """What graders get of B responses."""
        return grade_items(rows, self.context.decode)

    def grades(self, rows: Rows, grades: Sequence[Grade]) -> Rows:
        """The columns of `spec` for rows that were graded."""
        graded = grade_rows(rows.ids, grades)
        if self.context.responses.drops_failed:
            graded["graded"][rows["environment_failed"].bool()] = 0
        return graded

    def graded(self, ids: Sequence[SampleId], more: Sequence[str] = ()) -> Rows:
        """The grades and lengths of rows, whichever ranks graded them, and `more` columns."""
        names = {self.spec.stored_writes.get(name, name): name for name in ("reward", "graded", "grader_error")}
        rows = self.dock.read(ids, [*names, "length", *more])
        return Rows(rows.ids, {names.get(name, name): column for name, column in rows.columns.items()})


def grade_items(rows: Rows, decode: Callable[[Sequence[int]], str]) -> list[GradeItem]:
    """What graders get of B responses. With several turns, the text of the response is the last turn, and the
    conversation and the environment's reward are added."""
    conversations, rewards = ([None] * len(rows),) * 2
    if "conversation" in rows.columns:
        conversations = map(_last_path, unpack_json(rows["conversation"]))
        rewards = [float(row.sum()) for row in rows["turn_reward"].rows()]
    texts, meta = map(decode, _last_turns(rows)), unpack_json(rows["meta"])
    parts = zip(rows.ids, texts, meta, conversations, rewards, strict=True)
    return [
        GradeItem(m["text"], text, m["answer"], m["record"], sample, m.get("messages"), conversation, reward)
        for sample, text, m, conversation, reward in parts
    ]


def _last_path(conversation: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages of the path on which a response has ended."""
    last = conversation[-1].get("path")
    return [message for message in conversation if message.get("path") == last]


def _last_turns(rows: Rows) -> list[list[int]]:
    """Token ids of each row's last turn; with one turn, of the response."""
    if "turns" in rows.columns:
        ends = (turns[-1].tolist() for turns in rows["turns"].rows())
        return [tokens[first:end].tolist() for tokens, (first, end) in zip(rows["tokens"].rows(), ends, strict=True)]
    masks = rows["loss_mask"].rows()
    return [tokens[mask.bool()].tolist() for tokens, mask in zip(rows["tokens"].rows(), masks, strict=True)]


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
    """Prints the first failure of each grader."""

    def __init__(self, what: str = "this rollout") -> None:
        self.what = what  # where graders fail, for the message
        self.printed: set[str] = set()

    def add(self, failures: Iterable[Mapping[str, str]], *, show: bool) -> None:
        """failures: for each rank, grader -> text of a failure; show: whether this rank prints."""
        for name, text in (pair for part in failures for pair in part.items()):
            if name not in self.printed and show:
                say(f"warning: a grader failed, for the first time in {self.what}: {text}")
            self.printed.add(name)
