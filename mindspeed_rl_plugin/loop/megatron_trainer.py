"""Megatron as the trainer of a job: this rank's chunks, their published weights, forward passes and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.nn import Module

from mindspeed_rl_plugin.adapters.adapted_chunks import check_ran
from mindspeed_rl_plugin.forward import ForwardSettings, router_replay
from mindspeed_rl_plugin.forward.pipeline import compute_logps, compute_routed_logps
from mindspeed_rl_plugin.loop.inputs import Inputs
from mindspeed_rl_plugin.rows import Ragged, Rows
from mindspeed_rl_plugin.stages.update import Stepped, TrainStep, take_step
from mindspeed_rl_plugin.update.step import MegatronStep, PolicyStep
from mindspeed_rl_plugin.weights.publish import Published, Publisher, TrainerWeights


@dataclass
class MegatronTrainer:
    """See `stages.trainer.Trainer`."""

    model: Sequence[Module]  # chunks of this rank
    settings: ForwardSettings
    policy: MegatronStep  # runs its optimizer steps
    publisher: Publisher | None = None  # publishes its weights; None if no other process generates

    @classmethod
    def of(cls, inputs: Inputs, model: Sequence[Module], publisher: Publisher | None) -> MegatronTrainer:
        """Build it on this rank, by the flags."""
        longest = inputs.config.rollout.max_response_length
        policy = PolicyStep(inputs.algorithm, inputs.forward, model, norm_length=longest)
        return cls(model, inputs.forward, policy, publisher)

    @property
    def weights(self) -> TrainerWeights:
        return self.publisher.weights

    def publish(self, version: int) -> Published:
        return self.publisher.publish(self.model, version)

    def refuse_broken(self) -> None:
        self.publisher.refuse_broken(self.model)

    def forward(self, micro_batches: Sequence[Rows]) -> list[Ragged] | None:
        logps = compute_logps(self.model, micro_batches, self.settings)
        if any("routes" in rows.columns for rows in micro_batches):
            router_replay.check(self.settings.routed)
        return logps

    def forward_routed(self, micro_batches: Sequence[Rows]) -> tuple[list[Ragged], list[Ragged]] | None:
        return compute_routed_logps(self.model, micro_batches, self.settings)

    def step(self, micro_batches: Sequence[Rows], call: TrainStep, *, version: int) -> Stepped:
        stepped = take_step(self.policy, micro_batches, call, version=version)
        check_ran(self.model)
        return stepped
