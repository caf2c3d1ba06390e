"""The place of this rank: its data-parallel place in training, and its engine in generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.nn import Module


@dataclass(frozen=True)
class Topology:
    """Places of one rank.

    rank, world: of the job.
    dp_rank, dp_size: data parallel place in training.
    last_stage: whether it holds the end of the model.
    writer: whether it writes what the last stage computed for its data parallel rank (the first tensor and context
        parallel rank of that stage).
    engine, engines: number of its rollout engine, and number of engines.
    """

    rank: int
    world: int
    dp_rank: int
    dp_size: int
    last_stage: bool
    writer: bool
    engine: int
    engines: int

    @property
    def leader(self) -> bool:
        """First rank of the job: it puts prompts and writes the run's files."""
        return self.rank == 0

    @classmethod
    def from_megatron(cls, generate_tp: int, model: Sequence[Module]) -> Topology:
        """Read Megatron's process groups. Engine e has ranks from e * generate_tp on; model: this rank's chunks."""
        import torch.distributed as dist
        from megatron.core import parallel_state as mpu

        from mindspeed_rl_plugin.forward.pipeline import ends_here

        rank, world = dist.get_rank(), dist.get_world_size()
        last = ends_here(model)
        first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
        return cls(
            rank=rank,
            world=world,
            dp_rank=mpu.get_data_parallel_rank(),
            dp_size=mpu.get_data_parallel_world_size(),
            last_stage=last,
            writer=first and last,
            engine=rank // generate_tp,
            engines=world // generate_tp,
        )
