"""The `Trainer` Protocol: what the stages and the asynchronous schedule ask of the ranks that train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mindspeed_rl_plugin.rows import Ragged, Rows
from mindspeed_rl_plugin.weights.publish import Published, TrainerWeights


class Trainer(Protocol):
    """This rank's part of a model that is trained. All ranks of the trainer make each call, in the same order.

    Its implementation is Megatron's: `loop.megatron_trainer.MegatronTrainer`. The rest of a job is Megatron's too,
    whoever implements this: its launch script and flags, its train loop, its checkpoints, and its model-parallel
    layout, from which the dock knows which rank trains which row. With engines in the trainers' ranks weights move by
    a plan of their own, and a critic has its own passes.
    """

    @property
    def weights(self) -> TrainerWeights:
        """The plan of its shards: which rank publishes which slices of which Hugging Face tensor. Engines plan from
        this what they pull."""

    def publish(self, version: int) -> Published:
        """Copy this rank's shard into host memory under a version, which counts optimizer steps and rises; others read
        it from then on. Returns seconds and bytes. Raises ValueError, on all ranks, for weights that are not
        finite, or not those of the plan."""

    def refuse_broken(self) -> None:
        """Raise ValueError, on all ranks, for weights that are not finite: a checkpoint follows."""

    def forward(self, micro_batches: Sequence[Rows]) -> list[Ragged] | None:
        """Log-prob of each trained token of this data parallel rank's micro-batches (`tokens`, `loss_mask`), in nats at
        the sampling temperature: a ragged column `[L]` float32 each, 0.0 where the mask is 0; None on a rank that has
        no logits. The arithmetic is that of `step`, so that its first ratio is exactly 1."""

    def step(self, micro_batches: Sequence[Rows], call: Any, *, version: int) -> tuple[tuple, Mapping[str, float]]:
        """One optimizer step on this data parallel rank's micro-batches, which have the columns that the stage
        `update` reads. call: what the trainer's own loop handed over for this step; version: of the weights that
        `logp_old` is of. Returns what its own loop wants back, and metrics by the names of `monitor.names`."""
