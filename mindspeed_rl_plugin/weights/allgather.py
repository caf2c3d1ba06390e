"""The mode `allgather`: every engine rank gathers all shards of the trainer into one temporary buffer.

It is the method of the paper MindSpeed RL, arXiv 2507.19017. A *shard* is a stored parameter; trainer ranks that store
the same slices of the same Hugging Face tensors have the same shard. Each engine rank receives, bucket by bucket, all
shards that it does not store as a trainer rank. Then it copies what it needs out of the buffer. `make_plan` chooses the
senders: for it, each shard is a tensor. Messages are point to point: collectives would pad shards to one size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_rl_plugin.layout.layout import Canonical, Layout, RankLayout, Segment
from mindspeed_rl_plugin.layout.transfer_plan import Copy, Move, Piece, TransferPlan, make_plan
from mindspeed_rl_plugin.weights.p2p import P2PChannel
from mindspeed_rl_plugin.weights.transfer import copy_pieces, in_turn

_SHARD_ALIGNMENT = 64  # bytes, of a shard in the buffer


class Shard(NamedTuple):
    """A stored parameter."""

    segments: tuple[Segment, ...]
    shape: tuple[int, ...]  # without the padding behind the segments
    wide: bool  # whether it is sent as float32 whatever the model's dtype

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which the shard is sent, for a model of `dtype`."""
        return torch.float32 if self.wide else dtype


@dataclass(frozen=True)
class AllgatherPlan:
    """What `allgather` moves."""

    shards: tuple[Shard, ...]
    gather: TransferPlan  # sends every shard, by its number, to every engine rank
    copies: tuple[Copy, ...]  # from shards, by their numbers, into this rank's engine; empty on a rank without engine
    unused: tuple[str, ...]  # canonical tensors that no engine rank stores

    @property
    def fingerprint(self) -> int:
        """That of `gather`."""
        return self.gather.fingerprint

    def copied(self, rank: int) -> int:
        """Bytes that a rank copies instead of receiving them."""
        return self.gather.copied(rank)

    def places(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """A new buffer for all shards: number of a shard -> the view of its place in the buffer."""
        spans, end = [], 0
        for shard in self.shards:
            nbytes = prod(shard.shape) * shard.dtype(dtype).itemsize
            spans.append(slice(end, end + nbytes))
            end += -(-nbytes // _SHARD_ALIGNMENT) * _SHARD_ALIGNMENT
        buffer = torch.empty(end, dtype=torch.uint8, device=device)
        views = (buffer[span].view(s.dtype(dtype)).view(s.shape) for span, s in zip(spans, self.shards, strict=True))
        return {str(i): view for i, view in enumerate(views)}

    def stored(self, piece: Piece, source: Mapping[str, Tensor]) -> Tensor:
        """The shard of a piece of `gather`, a view of the parameters `source` of the rank that sends it."""
        shard = self.shards[int(piece.destination.param)]
        return source[piece.source.param][: shard.shape[0]]


def make_allgather_plan(
    sources: Mapping[int, RankLayout],
    destinations: Mapping[int, Layout],
    tensors: Mapping[str, Canonical],
    *,
    itemsize: int,
    bucket_bytes: int,
    rank: int,
    node_size: int | None = None,
) -> AllgatherPlan:
    """See `make_plan`. Buckets are larger than `bucket_bytes` if a shard is larger than half of that.

    Raises ValueError if this rank's engine needs slices that no shard has.
    """
    shards = _make_shards(sources, tensors)
    numbers = {shard.segments: str(i) for i, shard in enumerate(shards)}
    slices = {numbers[s.segments]: Canonical((1, prod(s.shape)), 0, s.wide) for s in shards}
    whole = {number: (Segment(number, 0, 0, 1, 0),) for number in slices}
    alike = {id(layout): layout for layout in sources.values()}  # ranks with equal layouts share one object
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
    engines = {id(layout): layout for layout in destinations.values()}.values()
    stored = {segment.name for layout in engines for segments in layout.values() for segment in segments}
    unused = tuple(name for name in tensors if name not in stored)
    if rank not in destinations:
        return AllgatherPlan(shards, gather, (), unused)
    buffer = {rank: {str(i): shard.segments for i, shard in enumerate(shards)}}
    taken = make_plan(buffer, {rank: destinations[rank]}, tensors, itemsize=itemsize, bucket_bytes=bucket_bytes)
    return AllgatherPlan(shards, gather, taken.copies, unused)


def _make_shards(sources: Mapping[int, RankLayout], tensors: Mapping[str, Canonical]) -> tuple[Shard, ...]:
    shards: dict[tuple[Segment, ...], Shard] = {}
    for rank in sorted(sources):
        for name, segments in sources[rank].items():
            if segments and segments not in shards:
                shape = _without_padding(segments, sources[rank].shapes[name])
                shards[segments] = Shard(segments, shape, tensors[segments[0].name].wide)
    return tuple(shards.values())


def _without_padding(segments: Sequence[Segment], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape without the padded rows of the vocabulary, which are not sent."""
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
    """Carry out the plan on this rank; see `stream`. Temporary memory: the buffer for all shards."""
    places = plan.places(device, dtype) if plan.copies else {}
    for _, piece in plan.gather.copies:
        places[piece.destination.param].copy_(plan.stored(piece, source))
    buckets = plan.gather.buckets_of(channel.rank)
    in_turn(buckets, lambda moves: post_bucket(plan, moves, source, places, channel, dtype))
    copy_pieces(plan.copies, places, destination)


def post_bucket(
    plan: AllgatherPlan,
    moves: Sequence[Move],
    source: Mapping[str, Tensor],
    places: Mapping[str, Tensor],
    channel: P2PChannel,
    dtype: torch.dtype,
) -> Callable[[], None]:
    """Post the messages of a bucket; returns a function that waits for them. Shards are received into `places`. They
    are sent from `places`, or, on a rank without engine, from `source`."""
    sends, receives = [], []
    for m in moves:
        number = m.piece.destination.param
        if m.source == channel.rank and number in places:
            sends.append((places[number], m.destination, int(number)))
        elif m.source == channel.rank:
            stored, kind = plan.stored(m.piece, source), plan.shards[int(number)].dtype(dtype)
            sends.append((stored.to(kind).contiguous(), m.destination, int(number)))
        else:
            receives.append((places[number], m.source, int(number)))
    return channel.post(f"bucket {moves[0].bucket} of shards", sends, receives).wait
