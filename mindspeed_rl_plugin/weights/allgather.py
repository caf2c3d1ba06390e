"""The mode `allgather`, the paper's: every engine rank gathers all shards of the trainer into one temporary buffer.

A *shard* is a stored parameter that is the same on some trainer ranks. Each engine rank takes those that it lacks from
trainer ranks that have them, bucket by bucket, and then copies what its engine needs out of the buffer: it receives the
whole model but its own shard. Who sends what is planned by `make_plan`, with shards in the place of tensors.

The messages are point to point: shards differ in size (pipelines, experts, vocabularies), for which gloo, nccl and hccl
have no allgather that would not pad them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_rl_plugin.layout.layout import Canonical, Layout, Segment, Shapes
from mindspeed_rl_plugin.layout.transfer_plan import Copy, Move, PlannedTraffic, TransferPlan, make_plan
from mindspeed_rl_plugin.weights.p2p import MessageBatch, P2PChannel
from mindspeed_rl_plugin.weights.transfer import copy_pieces

_ALIGNMENT = 64  # bytes, of a shard in the buffer


class Shard(NamedTuple):
    """A stored parameter."""

    segments: tuple[Segment, ...]
    shape: tuple[int, ...]  # without the padding behind the segments
    wide: bool  # whether it is float32 whatever the model's dtype
    names: Mapping[int, str]  # trainer rank -> name of the parameter

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which the shard travels, of a model of `dtype`."""
        return torch.float32 if self.wide else dtype

    def stored(self, source: Mapping[str, Tensor], rank: int) -> Tensor:
        """The shard's part of the parameter on a rank that stores it, a view."""
        return source[self.names[rank]][: self.shape[0]]


@dataclass(frozen=True)
class AllgatherPlan:
    """What `allgather` moves."""

    shards: tuple[Shard, ...]
    gather: TransferPlan  # brings every shard, by its number, to every engine rank
    copies: tuple[tuple[Copy, ...], ...]  # per shard, what this rank's engine takes of it; empty without an engine

    @property
    def traffic(self) -> Mapping[int, PlannedTraffic]:
        return self.gather.traffic

    def places(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The place of each shard, by number, in a new buffer for all of them."""
        spans, end = [], 0
        for shard in self.shards:
            nbytes = prod(shard.shape) * shard.dtype(dtype).itemsize
            spans.append(slice(end, end + nbytes))
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = torch.empty(end, dtype=torch.uint8, device=device)
        views = (buffer[span].view(s.dtype(dtype)).view(s.shape) for span, s in zip(spans, self.shards, strict=True))
        return {str(i): view for i, view in enumerate(views)}


def make_allgather_plan(
    sources: Mapping[int, Layout],
    shapes: Mapping[int, Shapes],
    destinations: Mapping[int, Layout],
    tensors: Mapping[str, Canonical],
    *,
    itemsize: int,
    bucket_bytes: int,
    rank: int,
    node_size: int | None = None,
) -> AllgatherPlan:
    """Plan it, alike on every rank. sources, destinations: rank -> layout; shapes: what trainer ranks store; itemsize:
    bytes of an element on the wire; bucket_bytes: as `make_plan` has it, more where a shard is larger than half of it.

    Raises ValueError where no shard holds what an engine wants.
    """
    shards = _make_shards(sources, shapes, tensors)
    numbers = {shard.segments: str(i) for i, shard in enumerate(shards)}
    slices = {numbers[s.segments]: Canonical((1, prod(s.shape)), 0, s.wide) for s in shards}
    whole = {number: (Segment(number, 0, 0, 1, 0),) for number in slices}
    alike = {id(layout): layout for layout in sources.values()}  # ranks with one layout share one object here too
    held = {k: {name: whole[numbers[s]] for name, s in layout.items() if s} for k, layout in alike.items()}
    gather = make_plan(
        {r: held[id(layout)] for r, layout in sources.items()},
        dict.fromkeys(destinations, whole),
        slices,
        itemsize=itemsize,
        bucket_bytes=max(bucket_bytes, *(2 * s.slice_bytes(itemsize) for s in slices.values())),
        rank=rank,
        node_size=node_size,
    )
    copies: list[list[Copy]] = [[] for _ in shards]
    if rank in destinations:
        buffer = {rank: {str(i): shard.segments for i, shard in enumerate(shards)}}
        wanted = {rank: destinations[rank]}
        for copy in make_plan(buffer, wanted, tensors, itemsize=itemsize, bucket_bytes=bucket_bytes).copies:
            copies[int(copy.piece.source.param)].append(copy)
    return AllgatherPlan(shards, gather, tuple(map(tuple, copies)))


def _make_shards(
    sources: Mapping[int, Layout], shapes: Mapping[int, Shapes], tensors: Mapping[str, Canonical]
) -> tuple[Shard, ...]:
    shards: dict[tuple[Segment, ...], Shard] = {}
    for rank in sorted(sources):
        for name, segments in sources[rank].items():
            if segments and segments not in shards:
                shape = _without_padding(segments, shapes[rank][name])
                shards[segments] = Shard(segments, shape, tensors[segments[0].name].wide, {})
            if segments:
                shards[segments].names.setdefault(rank, name)
    return tuple(shards.values())


def _without_padding(segments: Sequence[Segment], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Rows behind the last segment, of the padded vocabulary, do not travel."""
    if any(s.axis != 0 or s.slot >= 0 or s.transposed for s in segments):
        return tuple(shape)
    return (max(s.offset + s.size for s in segments), *shape[1:])


@torch.no_grad()
def allgather(
    plan: AllgatherPlan,
    source: Mapping[str, Tensor],
    destination: Mapping[str, Tensor],
    *,
    channel: P2PChannel,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Carry out the plan on this rank. Collective over all ranks that it names.

    dtype: what travels. Raises what `MessageBatch.wait` does.
    """
    rank, flying = channel.rank, None
    places = plan.places(device, dtype) if any(plan.copies) else {}
    own = {str(i): shard.stored(source, rank) for i, shard in enumerate(plan.shards) if places and rank in shard.names}
    for moves in plan.gather.buckets_of(rank):
        for number in own.keys() & {m.piece.destination.param for m in moves}:  # from where they are sent
            places[number].copy_(own.pop(number))
        posted = post_bucket(plan, moves, source, places, channel, dtype)
        if flying is not None:
            flying.wait()
        flying = posted
    for number, stored in own.items():
        places[number].copy_(stored)
    if flying is not None:
        flying.wait()
    for copies in plan.copies:
        copy_pieces(copies, places, destination)


def post_bucket(
    plan: AllgatherPlan,
    moves: Sequence[Move],
    source: Mapping[str, Tensor],
    places: Mapping[str, Tensor],
    channel: P2PChannel,
    dtype: torch.dtype,
) -> MessageBatch:
    """Post the messages of a bucket. A shard that arrives is received into its place; one that is sent comes from its
    place, or from `source` where it has none."""
    rank, sends, receives = channel.rank, [], []
    for m in moves:
        number = m.piece.destination.param
        if m.source == rank and number not in places:
            shard = plan.shards[int(number)]
            sends.append((shard.stored(source, rank).to(shard.dtype(dtype)).contiguous(), m.destination, int(number)))
        elif m.source == rank:
            sends.append((places[number], m.destination, int(number)))
        else:
            receives.append((places[number], m.source, int(number)))
    return channel.post(f"bucket {moves[0].bucket} of shards", sends, receives)
