"""The plan of a rollout: its groups, its optimizer steps, and the machine that owns each group."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_rl_plugin.forward import Step, TokenBudget, plan_batches, plan_tokens
from mindspeed_rl_plugin.forward.fragments import Common, Trees, common_tokens, first_paths, row_sizes
from mindspeed_rl_plugin.loop.arithmetic import Arithmetic
from mindspeed_rl_plugin.loop.placement import Placement
from mindspeed_rl_plugin.rows import Group, Rows, SampleId
from mindspeed_rl_plugin.stages.groups import GroupStats


def of_epoch(epoch: int, groups: int) -> tuple[Group, ...]:
    """All groups of one epoch of the dock; a round of a rollout is one epoch."""
    return tuple((epoch, g) for g in range(groups))


def samples(groups: Iterable[Group], members: int) -> list[SampleId]:
    """All samples of some groups, group by group."""
    return [SampleId(epoch, group, member) for epoch, group in groups for member in range(members)]


def by_epoch(groups: Iterable[Group]) -> dict[int, list[int]]:
    """Epoch -> indices of its groups; both in rising order."""
    parts: dict[int, list[int]] = {}
    for epoch, group in sorted(groups):
        parts.setdefault(epoch, []).append(group)
    return parts


class RolloutPlan:
    """The rollout in use.

    epoch: number of the round that is being sampled, from 0; -1 before the first round.
    opened: number of the newest epoch.
    queue: (epoch, number of groups) of epochs in the dock that are collected later.
    groups: of the rollout, in training order.
    deferred: groups that are sampled, graded and kept in the dock for the next rollout.
    lengths: group -> number of tokens of each row, prompt included; for `groups`, `deferred` and groups just graded.
    common: for the same groups, which first tokens their rows share; only if the budget says that these run once.
    steps: remaining optimizer steps.
    rounds: epoch -> number of its groups; an epoch that is missing here has as many as a rollout.
    sizes: of a rollout.
    placement: which ranks work on which rows.
    budget: limit of the tokens of a micro-batch; None: a micro-batch has a fixed number of rows.
    near: whether micro-batches go to ranks near their rows if there is no `budget` (with `budget` they always do); true
      for rollouts of several rounds.
    """

    def __init__(
        self, sizes: Arithmetic, placement: Placement, budget: TokenBudget | None = None, near: bool = False
    ) -> None:
        self.sizes, self.placement, self.budget, self.near = sizes, placement, budget, near
        self.epoch = self.opened = -1
        self.queue: list[tuple[int, int]] = []
        self.groups: tuple[Group, ...] = ()
        self.deferred: tuple[Group, ...] = ()
        self.lengths: dict[Group, tuple[int, ...]] = {}
        self.common: dict[Group, Common] = {}
        self.steps: list[Step] = []
        self.rounds: dict[int, int] = {}
        self.one_pass: list[Step] = []  # optimizer steps of one pass over the rollout
        self._owners = functools.cache(self._owners_of)

    # the round that is being sampled

    @property
    def round(self) -> tuple[Group, ...]:
        return of_epoch(self.epoch, self.rounds.get(self.epoch, self.sizes.prompts))

    def open_next(self, groups: int | None = None) -> int:
        """Number of a new epoch of `groups` groups, by default as many as a rollout has."""
        self.opened += 1
        if groups not in (None, self.sizes.prompts):
            self.rounds[self.opened] = groups
        return self.opened

    def take_round(self) -> None:
        """Make the first epoch of the queue the round."""
        self.epoch, _ = self.queue.pop(0)

    def ids(self, groups: Iterable[Group]) -> list[SampleId]:
        return samples(groups, self.sizes.members)

    def generated_by(self, engine: int) -> list[SampleId]:
        """Rows of the round that an engine samples."""
        return self.placement.generated_by(engine, self.ids(self.round), self.owners(self.epoch))

    def graded_by(self, rank: int, groups: Sequence[Group]) -> list[SampleId]:
        """Rows of the groups that a rank grades and compares."""
        return self.ids(self.placement.graded_by(rank, groups, self.owner))

    # the rollout

    def plan(self, groups: Sequence[Group]) -> list[Step]:
        """Optimizer steps of one pass over groups. A budget of tokens changes the rows of micro-batches, not those of a
        step."""
        plan = self._cut(groups)
        if self.budget is None:
            return self.placement.near(plan, self.owner) if self.near else plan
        ids = self.ids(groups)
        near = {i: self.placement.trainers[self.owner(i[:2])] for i in ids}
        return plan_tokens(plan, self._lengths(ids), self.budget, near, self.common)

    def measured(self, graded: Mapping[Group, GroupStats]) -> None:
        """Keep lengths and common tokens of groups that are graded now."""
        self.lengths |= {group: of_group.lengths for group, of_group in graded.items()}
        self.common |= {group: of_group.common for group, of_group in graded.items() if of_group.common}

    def read(self, groups: Sequence[Group], rows: Rows) -> None:
        """Keep the same of groups whose rows are at hand. rows: `tokens`, maybe `paths`, group by group."""
        sizes = iter(row_sizes(rows, self.shares))
        firsts = iter(first_paths(rows))
        for group in groups:
            self.lengths[group] = tuple(itertools.islice(sizes, self.sizes.members))
            mine = list(itertools.islice(firsts, self.sizes.members))
            if self.shares:
                self.common[group] = common_tokens(mine)

    @property
    def shares(self) -> bool:
        """Whether common first tokens of a group run once in a micro-batch."""
        return self.budget is not None and self.budget.shared

    def metrics(self) -> dict[str, float]:
        """If they do, how many tokens a pass over the rollout does not compute again."""
        if not self.shares:
            return {}
        batches = [ids for step in self.one_pass for rank in step.micro_batches for ids in rank]
        saved = sum(sum(self._lengths(ids).values()) - self.tokens(ids) for ids in batches)
        return {"tokens/shared": float(saved)}

    def tokens(self, ids: Iterable[SampleId]) -> int:
        """Tokens that the model computes for a micro-batch, without padding."""
        ids = list(ids)
        return Trees(self._lengths(ids), self.common).tokens(ids)

    def _lengths(self, ids: Iterable[SampleId]) -> dict[SampleId, int]:
        return {i: self.lengths[i[:2]][i.member] for i in ids}

    def use(self, groups: Sequence[Group], steps: Sequence[Step]) -> None:
        """Train on these groups next; steps: result of `plan`."""
        self.groups, self.one_pass = tuple(groups), list(steps)
        self.steps = self.one_pass * self.sizes.epochs
        kept = (*self.groups, *self.deferred)
        self.lengths = {g: self.lengths[g] for g in kept if g in self.lengths}
        self.common = {g: self.common[g] for g in kept if g in self.common}

    def next_step(self, dp_rank: int) -> tuple[tuple[tuple[SampleId, ...], ...], int, bool]:
        """A data parallel rank's micro-batches of the next optimizer step, the number of earlier steps of the rollout,
        and whether this step belongs to the last pass over the rows."""
        taken = len(self.one_pass) * self.sizes.epochs - len(self.steps)
        step = self.steps.pop(0)
        return step.of_rank(dp_rank), taken, len(self.steps) < len(self.one_pass)

    def batches(self, dp_rank: int) -> list[tuple[SampleId, ...]]:
        """All micro-batches of one pass of a data parallel rank."""
        return [ids for step in self.one_pass for ids in step.of_rank(dp_rank)]

    # the machines that store rows

    def owners(self, epoch: int) -> np.ndarray:
        """`[groups]` machine of each group of a round, as if all its groups were trained."""
        return self._owners(self.rounds.get(epoch, self.sizes.prompts))

    def owner(self, group: Group) -> int:
        return int(self.owners(group[0])[group[1]])

    def owners_of_round(self, groups: int | None = None) -> np.ndarray:
        """`[groups]` machine of each group of a round of that size, by default the size of a rollout."""
        return self._owners(self.sizes.prompts if groups is None else groups)

    def _owners_of(self, groups: int) -> np.ndarray:
        """`[groups]` machine of each group of a round. If the round has another size than a rollout, each machine owns
        the same share of it as of a rollout."""
        prompts = self.sizes.prompts
        if groups != prompts:
            return np.sort(self._owners(prompts))[np.arange(groups) * prompts // groups]
        return self.placement.owners(self._cut(of_epoch(0, prompts)), prompts)

    def _cut(self, groups: Sequence[Group]) -> list[Step]:
        return plan_batches(
            self.ids(groups),
            global_batch_size=self.sizes.global_batch,
            micro_batch_size=self.sizes.micro_batch,
            dp_size=self.sizes.data_parallel,
        )

    # checkpoint

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {
            "epoch": self.epoch,
            "opened": self.opened,
            "queue": list(map(list, self.queue)),
            "groups": list(map(list, self.groups)),
            "carried": list(map(list, self.deferred)),
            "lengths": [list(self.lengths.get(group, ())) for group in (*self.groups, *self.deferred)],
            "common": [list(map(list, self.common.get(group, ()))) for group in (*self.groups, *self.deferred)],
            "steps_left": len(self.steps),
        }

    def load(self, state: Mapping[str, Any], rounds: Mapping[int, int]) -> None:
        """Restore `state`. rounds: epoch of the dock -> its number of groups."""
        self.rounds.update(rounds)
        self.epoch, self.queue = state["epoch"], [(epoch, groups) for epoch, groups in state.get("queue", ())]
        self.opened = state.get("opened", self.epoch)
        self.groups, self.deferred = (tuple(map(tuple, state[name])) for name in ("groups", "carried"))
        kept = (*self.groups, *self.deferred)
        self.lengths = dict(zip(kept, map(tuple, state["lengths"]), strict=True))
        # A checkpoint of an older version, or without --rl-share-prompts, has none: these groups then share nothing.
        common = zip(kept, state.get("common", ()), strict=False)
        self.common = {group: tuple(map(tuple, members)) for group, members in common if members}

    def resume(self, left: int) -> None:
        """Continue the rollout in use, with so many optimizer steps left."""
        if left:
            self.use(self.groups, self.plan(self.groups))
            self.steps = self.steps[len(self.steps) - left :]
