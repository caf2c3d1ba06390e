"""The `Trainer` Protocol: the interface of the ranks that train, for stages and the asynchronous schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mindspeed_rl_plugin.rows import Ragged, Rows
from mindspeed_rl_plugin.weights.publish import Published, TrainerWeights


class Trainer(Protocol):
    """This rank's part of the trained model. All ranks of the trainer make each call, in the same order.

    `loop.megatron_trainer.MegatronTrainer` implements it for Megatron. With another implementation, the rest of a job
    still comes from Megatron: launch script and flags, train loop, checkpoints, and the model-parallel layout, from
    which the dock knows which rank trains which row. Engines on the ranks that train get weights in another way
    (`loop.colocation`), and a critic has its own passes.
    """

    @property
    def weights(self) -> TrainerWeights:
        """The plan of all shards: which rank publishes which slices of which Hugging Face tensor. Engines plan their
        pulls from it."""

    def publish(self, version: int) -> Published:
        """Copy this rank's shard into host memory, for other processes to read. version: number of optimizer steps so
        far, higher than before. Returns seconds and bytes. Raises, on all ranks, BrokenWeights for weights that are
        not finite, ValueError for weights that differ from the plan."""

    def refuse_broken(self) -> None:
        """Before a checkpoint: raise BrokenWeights, on all ranks, for weights that are not finite."""

    def forward(self, micro_batches: Sequence[Rows]) -> list[Ragged] | None:
        """Log-probs of trained tokens, in nats at the sampling temperature: for each micro-batch (`tokens`,
        `loss_mask`) of this data parallel rank a ragged column `[L]` float32, 0.0 at mask 0; None on a rank without
        logits. The arithmetic is that of `step`, so that the first ratio is exactly 1."""

    def forward_routed(self, micro_batches: Sequence[Rows]) -> tuple[list[Ragged], list[Ragged]] | None:
        """As `forward`, and a ragged column with the experts of each token, see `engine.routes`."""

    def step(self, micro_batches: Sequence[Rows], call: Any, *, version: int) -> tuple[tuple, Mapping[str, float]]:
        """One optimizer step on this data parallel rank's micro-batches, with the columns that the stage `update`
        reads. call: arguments that the trainer's own loop gave for this step; version: of the weights of `logp_old`.
        Returns the result for that loop, and metrics by the names of `monitor.names`."""
