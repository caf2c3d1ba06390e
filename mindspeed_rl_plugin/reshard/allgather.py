"""The mode `allgather`, the paper's: every engine rank gathers all shards of the trainer into one temporary buffer.

A *shard* is a stored parameter that some trainer ranks have alike. Each engine rank takes those that it lacks from a
trainer rank that has them, in *rounds* of what travels together, and then copies what its engine needs out of the
buffer: it receives the whole model but its own shard.

The messages are point to point: shards differ in size (pipelines, experts, vocabularies), for which gloo, nccl and hccl
have no allgather that would not pad them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_rl_plugin.reshard.layout import Canonical, Layout, Segment, Shapes
from mindspeed_rl_plugin.reshard.p2p import Batch, P2PChannel
from mindspeed_rl_plugin.reshard.plan import Copy, Traffic, make_plan
from mindspeed_rl_plugin.reshard.transfer import copy_pieces

_ALIGNMENT = 64  # bytes, of a shard in the buffer


class Shard(NamedTuple):
    """A stored parameter: its segments, its shape without the padding behind them, its bytes on the wire, and
    trainer rank -> name of the parameter. wide: float32 whatever the model's dtype."""

    segments: tuple[Segment, ...]
    shape: tuple[int, ...]
    nbytes: int
    wide: bool
    names: Mapping[int, str]

    def stored(self, source: Mapping[str, Tensor], rank: int) -> Tensor:
        """The view of it on a rank that stores it, as it is stored."""
        return source[self.names[rank]][: self.shape[0]]

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """As what the shard of a model of `dtype` travels."""
        return torch.float32 if self.wide else dtype


@dataclass(frozen=True)
class AllgatherPlan:
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
        return sum(_aligned(shard.nbytes) for shard in self.shards)

    def places(self, buffer: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Each shard's place in the buffer `[nbytes]`, uint8."""
        at = 0
        for shard in self.shards:
            yield buffer[at : at + shard.nbytes].view(shard.dtype(dtype)).view(shard.shape)
            at += _aligned(shard.nbytes)


def make_allgather_plan(
    sources: Mapping[int, Layout],
    shapes: Mapping[int, Shapes],
    destinations: Mapping[int, Layout],
    tensors: Mapping[str, Canonical],
    *,
    itemsize: int,
    round_bytes: int,
    rank: int,
    node_size: int | None = None,
) -> AllgatherPlan:
    """Plan it, alike on every rank. sources, destinations: rank -> layout; shapes: what trainer ranks store; itemsize:
    bytes of an element on the wire.

    round_bytes: most bytes of a round of more than one shard. A shard comes from a rank of the same node where one
    has it, among equals from the one that has sent least. Raises ValueError where no shard holds what an engine wants.
    """
    shards = _make_shards(sources, shapes, tensors, itemsize)
    nodes = node_size or 1 + max(*sources, *destinations)
    traffic = {r: Traffic() for r in sorted({*sources, *destinations})}
    routes = tuple(_route(shard, destinations, traffic, nodes) for shard in shards)
    copies: list[list[Copy]] = [[] for _ in shards]
    if rank in destinations:
        buffer = {rank: {str(i): shard.segments for i, shard in enumerate(shards)}}
        wanted = {rank: destinations[rank]}
        for copy in make_plan(buffer, wanted, tensors, itemsize=itemsize, bucket_bytes=round_bytes).copies:
            copies[int(copy.piece.source.param)].append(copy)
    rounds = _make_rounds(shards, round_bytes)
    return AllgatherPlan(shards, rounds, routes, tuple(map(tuple, copies)), traffic, frozenset(destinations))


def _make_shards(
    sources: Mapping[int, Layout], shapes: Mapping[int, Shapes], tensors: Mapping[str, Canonical], itemsize: int
) -> tuple[Shard, ...]:
    """All shards. Those at equal depth of their pipeline stage follow each other, so that all stages send at once."""
    found: dict[tuple[Segment, ...], tuple[int, Shard]] = {}
    for rank in sorted(sources):
        for position, (name, segments) in enumerate(sources[rank].items()):
            if not segments:
                continue
            if segments not in found:
                shape, wide = _without_padding(segments, shapes[rank][name]), tensors[segments[0].name].wide
                found[segments] = position, Shard(segments, shape, prod(shape) * (4 if wide else itemsize), wide, {})
            found[segments][1].names.setdefault(rank, name)
    return tuple(shard for _, shard in sorted(found.values(), key=lambda item: item[0]))


def _without_padding(segments: Sequence[Segment], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Rows behind the last segment, of the padded vocabulary, do not travel."""
    if any(s.axis != 0 or s.slot >= 0 or s.transposed for s in segments):
        return tuple(shape)
    return (max(s.offset + s.size for s in segments), *shape[1:])


def _make_rounds(shards: Sequence[Shard], round_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of the shards of each round: at most `round_bytes`, or one larger shard."""
    rounds: list[list[int]] = []
    filled = 0
    for i, shard in enumerate(shards):
        if not rounds or filled + shard.nbytes > round_bytes:
            rounds.append([])
            filled = 0
        rounds[-1].append(i)
        filled += shard.nbytes
    return tuple(map(tuple, rounds))


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
def allgather(
    plan: AllgatherPlan,
    source: Mapping[str, Tensor],
    destination: Mapping[str, Tensor],
    *,
    channel: P2PChannel,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """Bring the plan about on this rank. Collective over all ranks that it names.

    dtype: what travels. Returns the temporary buffer, for the caller to free; None on a rank without an engine. Raises
    what `Batch.wait` does.
    """
    rank, buffer, places = channel.rank, None, {}
    if rank in plan.destinations:
        buffer = torch.empty(plan.nbytes, dtype=torch.uint8, device=device)
        places = {str(i): place for i, place in enumerate(plan.places(buffer, dtype))}
    flying: Batch | None = None
    for numbers in plan.rounds:
        held = {i: places[str(i)] for i in numbers if places}
        for i in numbers:
            shard = plan.shards[i]
            if rank in shard.names:
                own = shard.stored(source, rank)
                held[i] = held[i].copy_(own) if i in held else own.to(shard.dtype(dtype)).contiguous()
        posted = post_round(plan, numbers, held, channel)
        if flying is not None:
            flying.wait()
        flying = posted
    if flying is not None:
        flying.wait()
    for copies in plan.copies:
        copy_pieces(copies, places, destination)
    return buffer


def post_round(plan: AllgatherPlan, numbers: Sequence[int], held: Mapping[int, Tensor], channel: P2PChannel) -> Batch:
    """Post the messages of a round. held: number of a shard -> what this rank sends of it, or receives it into."""
    rank, sends, receives = channel.rank, [], []
    for i in numbers:
        route = plan.routes[i]
        sends += [(held[i], peer, i) for peer, giver in route.items() if giver == rank]
        receives += [(held[i], route[rank], i)] if rank in route else []
    return channel.post(f"shards {numbers[0]} to {numbers[-1]}", sends, receives)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
