"""The arm `naive`, Fig. 3 of the paper: gathered shards pass into the engine, beside training weights that stay."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mindspeed_rl_plugin.reshard.allgather import AllgatherPlan, post_round
from mindspeed_rl_plugin.reshard.p2p import Batch, P2PChannel
from mindspeed_rl_plugin.reshard.transfer import copy_pieces


@torch.no_grad()
def naive(
    plan: AllgatherPlan,
    source: Mapping[str, Tensor],
    destination: Mapping[str, Tensor],
    *,
    channel: P2PChannel,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """The plan without a buffer for the whole model: no more than two rounds of shards are held, one that is copied
    into the engine and one that arrives."""
    rank, flying = channel.rank, None
    for numbers in (*plan.rounds, ()):
        held = {}
        for i in numbers:
            shard = plan.shards[i]
            if rank in shard.names:
                held[i] = shard.stored(source, rank).to(shard.dtype(dtype)).contiguous()
            elif rank in plan.destinations:
                held[i] = torch.empty(shard.shape, dtype=shard.dtype(dtype), device=device)
        batch = post_round(plan, numbers, held, channel) if numbers else None
        if flying is not None:
            _finish(plan, *flying, destination)  # before the round after the next one is posted
        flying = batch, held


def _finish(plan: AllgatherPlan, batch: Batch, held: dict[int, Tensor], destination: Mapping[str, Tensor]) -> None:
    """Wait for a round, copy what the engine needs out of it, and forget it."""
    batch.wait()
    for i, tensor in held.items():
        copy_pieces(plan.copies[i], {str(i): tensor}, destination)
    held.clear()
