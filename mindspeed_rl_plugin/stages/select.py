"""Select: which rows of a rollout count, and how often. The groups were chosen before it, by `stages.groups`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mindspeed_rl_plugin.algorithms import Algorithm
from mindspeed_rl_plugin.algorithms.selection import carries_signal
from mindspeed_rl_plugin.dock import ColumnSpec
from mindspeed_rl_plugin.forward import Step
from mindspeed_rl_plugin.rows import Rows, group_index
from mindspeed_rl_plugin.stages.stage import Stage, StageSpec, Work

VALID = ColumnSpec("valid", torch.int8, "sample", ragged=False)  # 0: not trained, and counted in no denominator


def spec(algorithm: Algorithm) -> StageSpec:
    """The stage. It also reads `valid` if a user's stage before it writes this column."""
    multiplicity = ColumnSpec("multiplicity", torch.int32, "sample", ragged=False)  # how often filtration has drawn it
    return StageSpec(
        "select",
        reads=("reward", "graded"),
        writes=(VALID, multiplicity) if algorithm.filters else (VALID,),
        resource="cpu",
        whole_groups=True,
        if_written=("valid",),
        flags=("--rl-filtration",),
        build=Select,
    )


class Select(Stage):
    """The stage: which rows of a rollout count and, with filtration, how often."""

    timed_as: ClassVar[str] = "advantage"

    def part(self, work: Work) -> tuple[Any, ...]:
        return work.share, work.steps

    def compute(self, rows: Rows, steps: Sequence[Step]) -> Rows | None:
        """Columns of this rank's groups; None if it has no rows. Collective if filtration draws from complete batches.

        steps: of one pass over the rollout."""
        algorithm = self.context.algorithm
        valid = valid_rows(rows, algorithm.dynamic_sampling) if len(rows) else torch.empty(0, dtype=torch.bool)
        columns = {"valid": valid.to(torch.int8)}
        if algorithm.filters:
            columns["multiplicity"] = self._multiplicity(rows, valid, steps)
        return Rows(rows.ids, columns) if len(rows) else None

    def _multiplicity(self, rows: Rows, valid: Tensor, steps: Sequence[Step]) -> Tensor:
        """`[B]` int32, how often each row is trained: n draws from each pool of n valid rows. A pool is a group; if
        filtration draws from complete batches, the rows of an optimizer step, from all ranks."""
        kept = valid.nonzero().flatten().tolist()
        ids, reward = [rows.ids[i] for i in kept], rows["reward"][kept] if kept else torch.empty(0)
        pools = group_index(ids) if ids else torch.empty(0, dtype=torch.int64)
        if self.context.algorithm.filtration_whole_batch:
            parts = list(self.context.ranks.gather((ids, reward.tolist())))
            ids = [i for theirs, _ in parts for i in theirs]
            reward = torch.tensor([r for _, theirs in parts for r in theirs], dtype=torch.float32)
            step_of = {i: number for number, step in enumerate(steps) for i in step.ids}
            pools = torch.tensor([step_of[i] for i in ids], dtype=torch.int64)
        times = self.context.algorithm.multiplicity(reward, pools, ids, self.context.seed).tolist()
        taken = dict(zip(ids, times, strict=True))
        return torch.tensor([taken.get(i, 0) for i in rows.ids], dtype=torch.int32)


def valid_rows(rows: Rows, dynamic: bool) -> Tensor:
    """`[B]` bool: rows that are trained. A group with a failed grade is left out; with dynamic sampling also a group
    with equal task rewards. If a user's stage gave a row `valid` 0, only this row is left out."""
    groups = group_index(rows.ids)
    valid = ~torch.isin(groups, groups[rows["graded"] == 0].unique())
    if dynamic:
        valid &= carries_signal(rows["reward"], groups)
    return valid & (rows["valid"] != 0) if "valid" in rows.columns else valid
