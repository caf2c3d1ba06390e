"""The arm `naive`, Fig. 3 of the paper: gathered shards pass into the engine, beside training weights that stay."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mindspeed_rl_plugin.weights.allgather import AllgatherPlan, post_bucket
from mindspeed_rl_plugin.weights.p2p import MessageBatch, P2PChannel
from mindspeed_rl_plugin.weights.transfer import copy_pieces


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
    """The plan without a buffer for the whole model: no more than two buckets of shards are held, one that is copied
    into the engine and one that arrives."""
    rank, flying = channel.rank, None
    for moves in (*plan.gather.buckets_of(rank), ()):
        arriving = {
            m.piece.destination.param: plan.shards[int(m.piece.destination.param)]
            for m in moves
            if m.destination == rank
        }
        held = {n: torch.empty(s.shape, dtype=s.dtype(dtype), device=device) for n, s in arriving.items()}
        batch = post_bucket(plan, moves, source, held, channel, dtype) if moves else None
        if flying is not None:
            _finish(plan, *flying, destination)  # before the bucket after the next one is posted
        flying = batch, held
    for number, shard in enumerate(plan.shards):
        if rank in shard.names:
            copy_pieces(
                plan.copies[number], {str(number): shard.stored(source, rank).to(shard.dtype(dtype))}, destination
            )


def _finish(
    plan: AllgatherPlan, batch: MessageBatch, held: dict[str, Tensor], destination: Mapping[str, Tensor]
) -> None:
    """Wait for a bucket, copy what the engine needs out of it, and forget it."""
    batch.wait()
    for number, tensor in held.items():
        copy_pieces(plan.copies[int(number)], {number: tensor}, destination)
    held.clear()
