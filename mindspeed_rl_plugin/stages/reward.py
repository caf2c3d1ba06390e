"""Reward: responses are graded, a group at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.dock import ColumnSpec
from mindspeed_rl_plugin.environment import say
from mindspeed_rl_plugin.reward import Grade, GradeItem, RewardPool
from mindspeed_rl_plugin.rows import Rows, SampleId, unpack_json
from mindspeed_rl_plugin.stages.context import RankContext
from mindspeed_rl_plugin.stages.stage import Stage, StageSpec

REWARD = ColumnSpec("reward", torch.float32, "sample", ragged=False)


OF_EPISODES = ("turns", "turn_reward", "conversation", "environment_failed")


def spec(graders: int, by_group: bool = True) -> StageSpec:
    """graders: number of rewards, the width of `reward_parts`; by_group: whether one is called with whole groups."""
    return StageSpec(
        "reward",
        reads=("tokens", "loss_mask", "meta"),
        if_written=OF_EPISODES,
        writes=(
            REWARD,
            ColumnSpec("reward_parts", torch.float32, "sample", ragged=False, trailing=(graders,)),
            # 0: a grader or the environment failed, and the sample is dropped
            ColumnSpec("graded", torch.int8, "sample", ragged=False),
            ColumnSpec("grader_error", torch.int8, "sample", ragged=False),  # 1: a grader failed
        ),
        resource="cpu",
        whole_groups=by_group,
        build=build,
    )


def build(spec: StageSpec, context: RankContext) -> Reward:
    """The stage on this rank."""
    drops = context.config.episodes.environment_on_error == "drop"
    return Reward(*spec.on(context), context.graders, context.decode, drops)


@dataclass(eq=False)
class Reward(Stage):
    """graders: the pool of this rank; decode: response token ids to the text that graders see; drops: whether an
    episode whose environment failed is dropped."""

    graders: RewardPool
    decode: Callable[[Sequence[int]], str]
    drops: bool = False

    def for_thread(self) -> Reward:
        """The same for another thread."""
        return replace(self, dock=self.dock.for_thread())

    def compute(self, rows: Rows) -> Rows | None:
        """Grades of B responses; None where there are none. Raises RewardError where a failure stops the run."""
        return self.grades(rows, self.graders.grade(self.items(rows))) if len(rows) else None

    def items(self, rows: Rows) -> list[GradeItem]:
        """What graders get of B responses."""
        if "turns" in rows.columns:
            return self._episodes(rows)
        masks = rows["loss_mask"].rows()
        texts = [self.decode(row[mask.bool()].tolist()) for row, mask in zip(rows["tokens"].rows(), masks, strict=True)]
        return [grade_item(*of) for of in zip(unpack_json(rows["meta"]), rows.ids, texts, strict=True)]

    def grades(self, rows: Rows, grades: Sequence[Grade]) -> Rows:
        """The columns of `spec` for rows that were graded."""
        graded = grade_rows(rows.ids, grades)
        if self.drops:
            graded["graded"][rows["environment_failed"].bool()] = 0
        return graded

    def _episodes(self, rows: Rows) -> list[GradeItem]:
        """The same of B episodes: their last turn."""
        columns = (rows["tokens"].rows(), rows["turns"].rows(), rows["turn_reward"].rows())
        columns = (unpack_json(rows["meta"]), rows.ids, *columns, unpack_json(rows["conversation"]))
        return [
            grade_item(meta, sample, self._last(tokens, turns), said, float(rewards.sum()))
            for meta, sample, tokens, turns, rewards, said in zip(*columns, strict=True)
        ]

    def _last(self, tokens: Tensor, turns: Tensor) -> str:
        first, end = turns[-1].tolist()
        return self.decode(tokens[first:end].tolist())

    def graded(self, ids: Sequence[SampleId], more: Sequence[str] = ()) -> Rows:
        """The rewards and lengths of rows that are graded, whoever did that, and `more` columns."""
        names = {self.spec.stored_writes.get(name, name): name for name in ("reward", "graded", "grader_error")}
        rows = self.dock.read(ids, [*names, "length", *more])
        return Rows(rows.ids, {names.get(name, name): column for name, column in rows.columns.items()})


def grade_item(
    meta: Mapping[str, Any],
    sample: SampleId,
    text: str,
    conversation: Sequence[Mapping[str, object]] | None = None,
    environment: float | None = None,
) -> GradeItem:
    """What graders get. meta: of the prompt (`prompts.meta_of`); text: response, of an episode its last turn."""
    fields = meta["text"], text, meta["answer"], meta["record"], sample, meta.get("messages")
    return GradeItem(*fields, conversation, environment)


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
                say(f"warning: a grader failed, for the first time in {self.what}: {text}")
            self.said.add(name)
