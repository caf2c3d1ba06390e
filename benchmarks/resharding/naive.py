"""The arm `naive`, Fig. 3 of the paper: gathered shards pass into the engine, beside training weights that stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mindspeed_rl_plugin.layout.transfer_plan import Copy, Move
from mindspeed_rl_plugin.weights.allgather import AllgatherPlan, post_bucket
from mindspeed_rl_plugin.weights.p2p import P2PChannel
from mindspeed_rl_plugin.weights.transfer import copy_pieces, in_turn


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
    taken: dict[str, list[Copy]] = {}  # by number of the shard
    for copy in plan.copies:
        taken.setdefault(copy.piece.source.param, []).append(copy)

    def start(moves: Sequence[Move]) -> Callable[[], None]:
        numbers = [m.piece.destination.param for m in moves if m.destination == channel.rank]
        arriving = {number: plan.shards[int(number)] for number in numbers}
        held = {n: torch.empty(s.shape, dtype=s.dtype(dtype), device=device) for n, s in arriving.items()}
        wait = post_bucket(plan, moves, source, held, channel, dtype)

        def finish() -> None:
            wait()
            for number, tensor in held.items():
                copy_pieces(taken.get(number, ()), {number: tensor}, destination)
            held.clear()

        return finish

    in_turn(plan.gather.buckets_of(channel.rank), start)
    for _, piece in plan.gather.copies:
        number = piece.destination.param
        copy_pieces(taken.get(number, ()), {number: plan.stored(piece, source)}, destination)
