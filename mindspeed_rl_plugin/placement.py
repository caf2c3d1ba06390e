"""Who works on which rows, so that a row stays on the machine where it will be trained: pure functions of ids.

A group lives on the machine whose data parallel rank trains its first member. That machine's engines draw it, its
ranks grade it and compute its advantages; only the update of a group that two machines share reads from another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_rl_plugin.forward import Step
from mindspeed_rl_plugin.types import SampleId


@dataclass(frozen=True)
class Placement:
    """Places of all ranks. node: machine of each rank, numbered from 0 by lowest rank; dp_rank: data parallel rank of
    each rank; engine: rollout engine of each rank."""

    node: tuple[int, ...]
    dp_rank: tuple[int, ...]
    engine: tuple[int, ...]

    def homes(self, plan: Sequence[Step], groups: int) -> np.ndarray:
        """`[groups]` machine of each group of a rollout that is trained by `plan`."""
        first: dict[int, tuple[int, int]] = {}
        for step in plan:
            for dp_rank, batches in enumerate(step.micro_batches):
                for sample in (i for batch in batches for i in batch):
                    seen = first.get(sample.group)
                    if seen is None or sample.member < seen[0]:
                        first[sample.group] = (sample.member, self.node[self.dp_rank.index(dp_rank)])
        return np.array([first[g][1] for g in range(groups)], np.int64)

    def drawn_by(self, engine: int, ids: Sequence[SampleId], homes: np.ndarray) -> list[SampleId]:
        """Rows that an engine draws: its part of those that live on its machine, equally many for every engine.

        Where the machines' rows do not divide so, all rows are dealt out evenly instead, in id order.
        """
        engines = max(self.engine) + 1
        beside = [e for e in range(engines) if self._node_of(e) == self._node_of(engine)]
        counts = [sum(self._node_of(e) == n for e in range(engines)) for n in range(max(self.node) + 1)]
        rows = [int((homes == n).sum()) for n in range(len(counts))]
        if any(r * engines != c * len(homes) for r, c in zip(rows, counts, strict=True)):
            return _part(sorted(ids), engine, engines)
        here = [i for i in sorted(ids) if homes[i.group] == self._node_of(engine)]
        return _part(here, beside.index(engine), len(beside))

    def whole_groups_of(self, rank: int, ids: Sequence[SampleId], homes: np.ndarray) -> list[SampleId]:
        """Groups that a rank grades: its part of those that live on its machine."""
        beside = [r for r, n in enumerate(self.node) if n == self.node[rank]]
        groups = [g for g, n in enumerate(homes.tolist()) if n == self.node[rank]]
        mine = set(_part(groups, beside.index(rank), len(beside)))
        return [i for i in sorted(ids) if i.group in mine]

    def _node_of(self, engine: int) -> int:
        return self.node[self.engine.index(engine)]


def _part(items: Sequence, index: int, parts: int) -> list:
    """The contiguous part of one of several, the first ones larger by one where it does not divide."""
    size, extra = divmod(len(items), parts)
    begin = index * size + min(index, extra)
    return list(items[begin : begin + size + (index < extra)])
