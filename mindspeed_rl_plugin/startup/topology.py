"""Where this rank stands: its data-parallel place in training, and its engine in generation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """Places of one rank.

    rank, world: of the job; dp_rank, dp_size: data parallel place in training; writer: whether this rank
    writes what the last pipeline stage computed for its data parallel rank (last stage, first tensor and
    context parallel rank); engine, engines: rollout engine that it belongs to, of how many; engine
    leader: the first rank of its engine.
    """

    rank: int
    world: int
    dp_rank: int
    dp_size: int
    writer: bool
    engine: int
    engines: int
    engine_leader: bool

    @property
    def leader(self) -> bool:
        """First rank of the job: it holds the dock and writes the run's files."""
        return self.rank == 0

    @classmethod
    def from_megatron(cls, generate_tp: int) -> Topology:
        """Read Megatron's process groups. Engine e holds ranks e * generate_tp and the following."""
        import torch.distributed as dist
        from megatron.core import parallel_state as mpu

        rank, world = dist.get_rank(), dist.get_world_size()
        first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
        return cls(
            rank=rank,
            world=world,
            dp_rank=mpu.get_data_parallel_rank(),
            dp_size=mpu.get_data_parallel_world_size(),
            writer=first and mpu.is_pipeline_last_stage(ignore_virtual=True),
            engine=rank // generate_tp,
            engines=world // generate_tp,
            engine_leader=rank % generate_tp == 0,
        )
