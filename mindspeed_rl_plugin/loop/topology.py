"""The topology of a job, as seen by one rank: its data parallel rank in training, its engine in generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.nn import Module


@dataclass(frozen=True)
class Topology:
    """Ranks and indices of one process.

    rank, world: this rank among the ranks that train, and their number.
    dp_rank, dp_size: data parallel rank in training, and number of data parallel ranks.
    last_stage: whether this rank holds the end of the model.
    writer: whether this rank writes what its data parallel rank computed: the first tensor and context parallel rank of
        those that hold the end of the model.
    engine, engines: index of this rank's rollout engine, and number of engines; without any: `rank` and `world`.
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
        """First rank of the job: it puts prompts into the dock and writes the run's files."""
        return self.rank == 0

    @classmethod
    def from_megatron(cls, generate_tp: int, model: Sequence[Module]) -> Topology:
        """Read Megatron's process groups. Engine e begins at rank e * generate_tp. model: this rank's chunks."""
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
