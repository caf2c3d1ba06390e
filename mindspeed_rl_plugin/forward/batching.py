"""Which rows make which micro-batch of which optimizer step on which rank: a pure function of ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_rl_plugin.types import SampleId

MicroBatchIds = tuple[SampleId, ...]


@dataclass(frozen=True)
class Step:
    """Rows of one optimizer step.

    micro_batches: `[data parallel rank][micro-batch]` -> ids of its rows.
    """

    micro_batches: tuple[tuple[MicroBatchIds, ...], ...]

    @property
    def ids(self) -> tuple[SampleId, ...]:
        """All rows of the step, in id order."""
        return tuple(sorted(i for rank in self.micro_batches for batch in rank for i in batch))

    def of_rank(self, dp_rank: int) -> tuple[MicroBatchIds, ...]:
        """Micro-batches of one data parallel rank, in the order in which they run."""
        return self.micro_batches[dp_rank]


def plan_batches(ids: Sequence[SampleId], *, global_batch_size: int, micro_batch_size: int, dp_size: int) -> list[Step]:
    """Cut the rows of a rollout into optimizer steps, and deal each step out to the data parallel ranks.

    Rows go in id order, whatever the order of `ids`, so a step holds whole groups where the sizes allow it, and so
    does each rank's part of it, which is contiguous. Every rank computes the same plan alone. Sizes in rows. Raises
    ValueError when something does not divide.
    """
    ordered = sorted(ids)
    if len(set(ordered)) != len(ordered):
        raise ValueError(f"{len(ordered) - len(set(ordered))} of {len(ordered)} ids occur twice")
    across = micro_batch_size * dp_size
    if global_batch_size % across:
        raise ValueError(
            f"--global-batch-size {global_batch_size} is not a multiple of --micro-batch-size {micro_batch_size} "
            f"x {dp_size} data parallel ranks"
        )
    if not ordered or len(ordered) % global_batch_size:
        raise ValueError(
            f"a rollout of {len(ordered)} rows does not fill steps of --global-batch-size {global_batch_size}; "
            "--rl-rollout-prompts x --rl-samples-per-prompt must be a multiple of it"
        )
    micro = [tuple(ordered[i : i + micro_batch_size]) for i in range(0, len(ordered), micro_batch_size)]
    in_step = global_batch_size // micro_batch_size
    of_rank = in_step // dp_size
    return [
        Step(tuple(tuple(micro[i : i + of_rank]) for i in range(start, start + in_step, of_rank)))
        for start in range(0, len(micro), in_step)
    ]
