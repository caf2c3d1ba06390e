"""Which ranks work on which rows, so that a row stays near the rank that trains it. Each rank computes the same.

A group is stored on a machine of the data parallel rank that trains the group's first row. If the pipeline of this data
parallel rank is on several machines, its groups are distributed over them. Compared with storage on the machine of the
last pipeline stage, this moves a few percent more bytes, but uses the memory and the links of all these machines. It is
only a few percent because every pipeline stage reads the tokens of all rows. If possible, engines and ranks on the
machine of a group sample and grade it. Engines get equally many rows, and ranks equally many groups (or one more).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from mindspeed_rl_plugin.forward import Step
from mindspeed_rl_plugin.rows import Group, SampleId

Item = TypeVar("Item")


@dataclass(frozen=True)
class Placement:
    """Machine, data parallel rank and engine of all ranks."""

    node: tuple[int, ...]  # machine of each rank; machines are numbered by their lowest ranks, from 0
    dp_rank: tuple[int, ...]  # data parallel rank of each rank
    engine: tuple[int, ...]  # rollout engine of each rank

    @property
    def machines(self) -> int:
        return max(self.node) + 1

    @cached_property
    def trained_on(self) -> list[tuple[int, ...]]:
        """Machines of each data parallel rank; those of later pipeline stages, which read more, come first."""
        ranks = range(len(self.node) - 1, -1, -1)
        parts = range(max(self.dp_rank) + 1)
        return [tuple(dict.fromkeys(self.node[r] for r in ranks if self.dp_rank[r] == d)) for d in parts]

    @cached_property
    def trainers(self) -> list[frozenset[int]]:
        """Data parallel ranks of each machine."""
        places = list(enumerate(self.trained_on))
        return [frozenset(d for d, machines in places if n in machines) for n in range(self.machines)]

    def owners(self, plan: Sequence[Step], groups: int) -> np.ndarray:
        """`[groups]` machine of each group of a rollout that `plan` trains: a machine of the data parallel rank that
        trains the group's first row. If there are several: the one with the fewest groups per rank so far."""
        first: dict[int, tuple[int, int]] = {}
        for step in plan:
            for dp_rank, batches in enumerate(step.micro_batches):
                for sample in (i for batch in batches for i in batch):
                    seen = first.get(sample.group)
                    if seen is None or sample.member < seen[0]:
                        first[sample.group] = (sample.member, dp_rank)
        ranks, held = np.bincount(self.node), np.zeros(self.machines)
        owners = np.empty(groups, np.int64)
        for group in range(groups):
            owners[group] = min(self.trained_on[first[group][1]], key=lambda n: held[n] / ranks[n])
            held[owners[group]] += 1
        return owners

    def generated_by(self, engine: int, ids: Sequence[SampleId], owners: np.ndarray) -> list[SampleId]:
        """Rows of one epoch that an engine samples: the same number for every engine (or one more), and as many as
        possible on the machine that owns them."""
        ordered, engines = sorted(ids), range(max(self.engine) + 1)
        places = [(self.node[self.engine.index(e)],) for e in engines]
        return deal(ordered, [int(owners[i.group]) for i in ordered], places)[engine]

    def graded_by(self, rank: int, groups: Sequence[Group], owner: Callable[[Group], int]) -> list[Group]:
        """Groups that a rank grades: the same number for every rank (or one more), and as many as possible on the
        machine that owns them."""
        ordered = sorted(groups)
        return deal(ordered, [owner(g) for g in ordered], [(n,) for n in self.node])[rank]

    def near(self, plan: Sequence[Step], owner: Callable[[Group], int]) -> list[Step]:
        """The same steps and micro-batches. Within each step a micro-batch goes to a data parallel rank on the machine
        of its first row, unless that rank has its equal share of micro-batches already."""
        batches = [[batch for rank in step.micro_batches for batch in rank] for step in plan]
        dealt = (deal(of_step, [owner(batch[0][:2]) for batch in of_step], self.trained_on) for of_step in batches)
        return [Step(tuple(map(tuple, parts))) for parts in dealt]


def deal(items: Sequence[Item], owners: Sequence[int], places: Sequence[Collection[int]]) -> list[list[Item]]:
    """Divide items into parts of equal size (some have one item more). An item goes to a part on its machine if such a
    part is not full. Returns the items of each part, in order.

    owners: machine of each item; places: machines of each part. Parts are filled one after the other."""
    few, more = divmod(len(owners), len(places))
    part_of, held, left = [-1] * len(owners), [0] * len(places), list(range(len(owners)))
    for limit, local in ((few, True), (few + 1, True), (few, False), (few + 1, False)):
        parts = range(len(places))
        open_parts = {n: deque(p for p in parts if not local or n in places[p]) for n in {owners[i] for i in left}}
        rest = []
        for item in left:
            here = open_parts[owners[item]]
            while here and held[here[0]] >= limit:
                here.popleft()
            if not here or (held[here[0]] == few and not more):
                rest.append(item)
                continue
            part_of[item] = here[0]
            more -= held[here[0]] == few
            held[here[0]] += 1
        left = rest
    parts = [[] for _ in places]
    for item, part in zip(items, part_of, strict=True):
        parts[part].append(item)
    return parts
