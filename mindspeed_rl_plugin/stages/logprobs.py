"""Log-probs: per-token columns by forward-only passes of Megatron's own schedule: old and reference log-probs, and the
critic's values. The passes use the update's micro-batches, so that the update's first ratio is 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_rl_plugin.algorithms import Algorithm
from mindspeed_rl_plugin.dock import ColumnSpec
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId, joined
from mindspeed_rl_plugin.stages.stage import Stage, StageSpec, Work


def specs(algorithm: Algorithm) -> list[StageSpec]:
    """The passes that an algorithm needs."""
    needed = {
        "logp_old": (algorithm.old_logps, ()),
        "logp_ref": (algorithm.needs_reference, ("--rl-kl-loss-coef", "--rl-kl-reward-coef")),
        "values": (algorithm.needs_critic, ("--rl-advantage",)),  # of the critic, before each trained token
    }
    return [
        StageSpec(
            name,
            reads=("tokens", "loss_mask"),
            if_written=("paths",),
            writes=(ColumnSpec(name, torch.float32, "token", ragged=True),),
            resource="trainer",
            flags=flags,
            build=TokenPass,
        )
        for name, (need, flags) in needed.items()
        if need
    ]


class TokenPass(Stage):
    """The stage for one column: by the critic, by the policy, or by the policy with the reference's weights."""

    def part(self, work: Work) -> tuple[Any, ...]:
        """This data parallel rank's micro-batches."""
        return [i for ids in work.batches for i in ids], work.batches

    def compute(self, rows: Rows, batches: Sequence[Sequence[SampleId]]) -> Rows | None:
        """The column for the rows of these micro-batches. Collective over the model parallel ranks."""
        found = self._forward([rows.select(ids) for ids in batches])
        if not self.context.writer:
            return None
        columns = found if isinstance(found, tuple) else (found,)
        return Rows(rows.ids, {name: joined(parts) for name, parts in zip(self.spec.written, columns, strict=True)})

    def _forward(self, micro_batches: Sequence[Rows]) -> list[Ragged] | tuple[list[Ragged], list[Ragged]] | None:
        """A ragged column for each micro-batch, or two with routes; None on ranks without the end of the model."""
        context = self.context
        if self.spec.name == "values":
            return context.critic.values(micro_batches, context.forward)
        if self.spec.name == "logp_old":
            trainer = context.trainer
            return (trainer.forward_routed if "routes" in self.spec.written else trainer.forward)(micro_batches)
        with context.reference.swapped_into(context.model):
            return context.trainer.forward(micro_batches)
