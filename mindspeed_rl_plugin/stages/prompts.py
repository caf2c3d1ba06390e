"""Prompts: puts the next groups of a rollout into the dock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed_rl_plugin.dock import ColumnSpec, VersionBound
from mindspeed_rl_plugin.dock.api import ANY_VERSION
from mindspeed_rl_plugin.rows import Prompt, Ragged, Rows, SampleId, pack_json
from mindspeed_rl_plugin.stages.context import RankContext
from mindspeed_rl_plugin.stages.stage import StageSpec

# (epoch, its prompts) -> the prompts in the order of groups
Order = Callable[[int, Sequence[Prompt]], Sequence[Prompt]]


class Prompts:
    """The stage on this rank. It leases nothing; the first rank puts rows."""

    def __init__(self, spec: StageSpec, context: RankContext) -> None:
        self.spec, self.context, self.data = spec, context, context.data
        self.dock = context.dock_of("trainer")

    def run(
        self,
        epoch: int,
        groups: int,
        version_bound: VersionBound = ANY_VERSION,
        order: Order = lambda epoch, prompts: prompts,
        offered: Sequence[Prompt] = (),
    ) -> Rows:
        """Put the next groups of the data into the dock, as a new epoch. Returns the rows on every rank.

        version_bound: versions of the weights that may sample them; order: sorts the prompts of the epoch; offered:
        prompts that come before those of the data, at most `groups`."""
        rows = self.compute(epoch, groups, order, offered)
        self.dock.open(epoch, groups, self.context.members, version_bound)
        self.dock.put(rows if self.context.leader else None)
        return rows

    def compute(self, epoch: int, groups: int, order: Order, offered: Sequence[Prompt]) -> Rows:
        """The next groups, with the columns `SPEC.writes`."""
        return prompt_rows(epoch, order(epoch, [*offered, *self.data.next(groups - len(offered))]))


SPEC = StageSpec(
    "prompts",
    reads=(),
    writes=(
        ColumnSpec("prompt", torch.int32, "group", ragged=True),
        ColumnSpec("meta", torch.uint8, "group", ragged=True),  # JSON: fields of a `Prompt`
    ),
    resource="leader",
    build=Prompts,
)


def prompt_rows(epoch: int, prompts: Sequence[Prompt]) -> Rows:
    """One row per group: the first member of groups 0, 1, ... of the epoch."""
    tokens = [torch.tensor(p.tokens, dtype=torch.int32) for p in prompts]
    ids = tuple(SampleId(epoch, group, 0) for group in range(len(prompts)))
    return Rows(ids, {"prompt": Ragged.from_rows(tokens), "meta": pack_json(list(map(meta_of, prompts)))})


def meta_of(prompt: Prompt) -> dict[str, Any]:
    """A prompt for the column `meta`: the fields for graders and environments."""
    record, messages = dict(prompt.record), prompt.messages
    return {"text": prompt.text, "answer": prompt.answer, "row": prompt.row, "record": record, "messages": messages}
