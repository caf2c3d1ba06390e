"""Gathering every shard of the trainer on every engine rank: the modes `naive` and `allgather`, baselines of `stream`.

Each engine rank takes the shards (`shards.py`) that it lacks from a trainer rank that has them, and then copies what
its engine needs out of them. `allgather` keeps all of them in one temporary buffer, the paper's step 1; `naive` keeps
no more than two rounds of them. Both receive alike: the whole model but the rank's own shard.

The messages are point to point: shards differ in size (pipelines, experts, vocabularies), for which gloo, nccl and hccl
have no allgather that would not pad them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_rl_plugin.reshard.layout import Canonical, Layout, Shapes
from mindspeed_rl_plugin.reshard.p2p import Batch, Message, P2PChannel
from mindspeed_rl_plugin.reshard.plan import Copy, Traffic, make_plan
from mindspeed_rl_plugin.reshard.shards import Shard, make_rounds, make_shards
from mindspeed_rl_plugin.reshard.transfer import copy_pieces

_ALIGNMENT = 64  # bytes, of a shard in the buffer


@dataclass(frozen=True)
class Gathering:
    """Who sends which shard to whom, and what this rank copies out of each.

    rounds: numbers of the shards that travel together; routes: per shard, engine rank -> trainer rank for those that
    lack it; copies: per shard; traffic: bytes of every rank; destinations: the engine ranks.
    """

    shards: tuple[Shard, ...]
    rounds: tuple[tuple[int, ...], ...]
    routes: tuple[Mapping[int, int], ...]
    copies: tuple[tuple[Copy, ...], ...]
    traffic: Mapping[int, Traffic]
    destinations: frozenset[int]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer that holds all shards."""
        return sum(map(_aligned, (p.nbytes for p in self.shards)))


def make_gathering(
    sources: Mapping[int, Layout],
    shapes: Mapping[int, Shapes],
    destinations: Mapping[int, Layout],
    tensors: Mapping[str, Canonical],
    *,
    itemsize: int,
    round_bytes: int,
    rank: int,
    node_size: int | None = None,
) -> Gathering:
    """Plan it, alike on every rank. sources, destinations: rank -> layout; shapes: what trainer ranks store.

    round_bytes: most bytes of a round of more than one shard. A shard comes from a rank of the same node where one
    has it, among equals from the one that has sent least. Raises ValueError where no shard holds what an engine wants.
    """
    shards = make_shards(sources, shapes, tensors, itemsize)
    nodes = node_size or 1 + max(*sources, *destinations)
    traffic = {r: Traffic() for r in sorted({*sources, *destinations})}
    routes = [_route(p, destinations, traffic, nodes) for p in shards]
    copies: list[list[Copy]] = [[] for _ in shards]
    if rank in destinations:
        held = {str(i): p.segments for i, p in enumerate(shards)}
        chosen = make_plan(
            {rank: held}, {rank: destinations[rank]}, tensors, itemsize=itemsize, bucket_bytes=round_bytes
        )
        for copy in chosen.copies:
            copies[int(copy.piece.source.param)].append(copy)
    return Gathering(
        shards,
        make_rounds(shards, round_bytes),
        tuple(routes),
        tuple(map(tuple, copies)),
        traffic,
        frozenset(destinations),
    )


def _route(
    shard: Shard, destinations: Mapping[int, Layout], traffic: Mapping[int, Traffic], node_size: int
) -> dict[int, int]:
    route = {}
    for rank in sorted(destinations):
        if rank in shard.names:
            traffic[rank].copied += shard.nbytes
            continue
        near = [r for r in shard.names if r // node_size == rank // node_size]
        source = min(near or shard.names, key=lambda r: traffic[r].sent)
        route[rank] = source
        traffic[source].sent += shard.nbytes
        traffic[rank].received += shard.nbytes
        traffic[rank].off_node += 0 if near else shard.nbytes
    return route


@torch.no_grad()
def gather(
    plan: Gathering,
    source: Mapping[str, Tensor],
    destination: Mapping[str, Tensor],
    *,
    channel: P2PChannel,
    dtype: torch.dtype,
    device: torch.device,
    whole: bool,
) -> Tensor | None:
    """Bring the plan about on this rank. Collective over all ranks that it names.

    whole: gather everything into one temporary buffer first, and return it, for the caller to free (`allgather`);
    else copy and forget round by round (`naive`). dtype: what travels. Raises what `Batch.wait` does.
    """
    buffer = None
    if whole and channel.rank in plan.destinations:
        buffer = torch.empty(plan.nbytes, dtype=torch.uint8, device=device)
    rounds = _Rounds(plan, source, channel, dtype, device, buffer)
    flying: tuple[tuple[int, ...], Batch, dict[str, Tensor]] | None = None
    arrived: dict[str, Tensor] = {}
    for numbers in (*plan.rounds, ()):
        posted = numbers, *rounds.post(numbers)
        if flying is not None:
            done, batch, held = flying
            batch.wait()
            if whole:
                arrived |= held
            else:
                _select(plan, done, held, destination)
                held.clear()  # before the round after the next one is posted
        flying = posted
    if whole:
        _select(plan, range(len(plan.shards)), arrived, destination)
    return buffer


def _select(
    plan: Gathering, numbers: Sequence[int], held: Mapping[str, Tensor], destination: Mapping[str, Tensor]
) -> None:
    """The engine's slices of some shards; nothing on a rank without an engine."""
    for i in numbers:
        copy_pieces(plan.copies[i], held, destination)


class _Rounds:
    """Posts the messages of rounds, and gives shards their place."""

    def __init__(
        self,
        plan: Gathering,
        source: Mapping[str, Tensor],
        channel: P2PChannel,
        dtype: torch.dtype,
        device: torch.device,
        buffer: Tensor | None,
    ) -> None:
        self.plan, self.source, self.channel, self.dtype, self.device = plan, source, channel, dtype, device
        self.buffer, self.at = buffer, 0

    def post(self, numbers: Sequence[int]) -> tuple[Batch, dict[str, Tensor]]:
        """Messages of a round, and what this rank will hold of it: number of the shard -> tensor."""
        rank, sends, receives, held = self.channel.rank, [], [], {}
        for i in numbers:
            shard, route = self.plan.shards[i], self.plan.routes[i]
            mine = self._own(shard) if rank in shard.names else None
            sends += _messages(mine, [r for r, s in route.items() if s == rank], i)
            if rank in self.plan.destinations:
                held[str(i)] = self._place(shard, mine)
                receives += _messages(held[str(i)], [route[rank]] if rank in route else [], i)
        return self.channel.post(f"shards {numbers[0]} to {numbers[-1]}" if numbers else "", sends, receives), held

    def _own(self, shard: Shard) -> Tensor:
        """This rank's shard as it travels."""
        stored = self.source[shard.names[self.channel.rank]]
        return stored[: shard.shape[0]].to(torch.float32 if shard.wide else self.dtype).contiguous()

    def _place(self, shard: Shard, mine: Tensor | None) -> Tensor:
        """Where a shard lies: in the buffer, with a copy of this rank's own; without a buffer, its own as it is."""
        dtype = torch.float32 if shard.wide else self.dtype
        if self.buffer is None:
            return torch.empty(shard.shape, dtype=dtype, device=self.device) if mine is None else mine
        place = self.buffer[self.at : self.at + shard.nbytes].view(dtype).view(shard.shape)
        self.at += _aligned(shard.nbytes)
        return place if mine is None else place.copy_(mine)


def _messages(tensor: Tensor | None, peers: Sequence[int], tag: int) -> list[Message]:
    return [(tensor, peer, tag) for peer in peers]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
