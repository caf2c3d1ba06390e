"""The plan: which slices of the weights every rank copies, sends and receives so that each engine rank gets its part.

Source ranks (trainer) and destination ranks (engine) are independent sets: equal, overlapping or disjoint. Every rank
computes the plan itself, from the layouts of all ranks; by `TransferPlan.fingerprint` ranks check that their plans are
equal. Ranks with equal layouts share one layout object (layout.py): source and destination layouts are intersected once
per object, and only the choice of a source is made for every rank.

**Buckets.** Every move is in a numbered bucket. In a bucket no rank sends more than half of `bucket_bytes`, nor
receives more. Two buckets are in flight, each with a send and a receive buffer: two times `bucket_bytes` in all. Both
ranks of a move know its bucket, and every rank works through its buckets in rising order, so ranks cannot deadlock.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from mindspeed_rl_plugin.layout.layout import Canonical, Layout, Segment


class Place(NamedTuple):
    """A segment and the stored parameter that it belongs to."""

    param: str
    segment: Segment


class Piece(NamedTuple):
    """Slices `[start, start + size)` of a canonical tensor, with their place on a source and on a destination rank."""

    start: int
    size: int
    nbytes: int
    source: Place
    destination: Place

    def inside(self, params: Mapping[str, Any], place: Place) -> Any:
        """The view of the slices in one of the stored parameters `params`; place: the piece's source or destination."""
        return place.segment.view(params[place.param], self.start, self.size)


class Copy(NamedTuple):
    """A piece that a rank copies, from its trainer parameters into its engine parameters."""

    rank: int
    piece: Piece


class Move(NamedTuple):
    """A piece that one rank sends to another, in a bucket."""

    bucket: int
    source: int
    destination: int
    piece: Piece


@dataclass(frozen=True)
class TransferPlan:
    """What `make_plan` returns."""

    copies: tuple[Copy, ...]  # of all ranks, or of one rank
    moves: tuple[Move, ...]  # of all ranks, or of one rank, by rising bucket
    unused: tuple[str, ...]  # canonical tensors of the trainer that no engine rank stores
    fingerprint: int  # equal on ranks with equal plans

    def buckets_of(self, rank: int) -> list[list[Move]]:
        """The moves in which a rank takes part, bucket by bucket."""
        mine = (m for m in self.moves if rank in (m.source, m.destination))
        return [list(moves) for _, moves in groupby(mine, key=lambda m: m.bucket)]

    def copied(self, rank: int) -> int:
        """Bytes that a rank copies instead of receiving them."""
        return sum(copy.piece.nbytes for copy in self.copies if copy.rank == rank)


def make_plan(
    sources: Mapping[int, Layout],
    destinations: Mapping[int, Layout],
    tensors: Mapping[str, Canonical],
    *,
    itemsize: int,
    bucket_bytes: int,
    rank: int | None = None,
    node_size: int | None = None,
) -> TransferPlan:
    """Plan the transfer from `sources` to `destinations`, each rank -> layout.

    tensors: the canonical tensors; itemsize: bytes of an element of a message; node_size: number of consecutive ranks
    on one node (None: all); rank: keep only this rank's copies and moves. A rank that has a slice in its own trainer
    parameters copies it. Else a rank of its node sends the slice; if no rank of its node has it, a rank of the node
    that sent the fewest bytes to other nodes so far. Of several such ranks, the one that sent the fewest bytes so far
    sends the slice. Raises ValueError if no source has a needed slice, or half a bucket is smaller than a slice;
    AssertionError if a layout stores a tensor that the model lacks, or if segments of an engine's parameter overlap.
    """
    holders = Holders(sources, tensors, node_size or 1 + max(*sources, *destinations))
    wanted = [(_places(layout, ranks[0], tensors), ranks) for layout, ranks in _classes(destinations)]
    build = _Builder(holders.node_size, bucket_bytes, rank)
    missing = sorted({name for places, _ in wanted for name in places} - set(holders.order))
    for name in [*holders.order, *missing]:
        for places, ranks in wanted:
            for place in places.get(name, ()):
                at = place.segment.start
                for start, stop, pool in holders.find(place, ranks[0]):
                    assert start == at, f"{name}: [{at}, {start}) is not delivered to {place.param}"
                    build.add(start, stop, tensors[name].slice_bytes(itemsize), pool, place, ranks)
                    at = stop
                assert at == place.segment.stop, f"{name}: not delivered to {place.param} from {at} on"
    unused = tuple(name for name in holders.order if not any(name in places for places, _ in wanted))
    moves = tuple(sorted(build.moves, key=lambda move: move.bucket))
    return TransferPlan(tuple(build.copies), moves, unused, build.fingerprint)


def _classes(layouts: Mapping[int, Layout]) -> list[tuple[Layout, tuple[int, ...]]]:
    """Ranks grouped by layout object, in rank order."""
    groups: dict[int, tuple[Layout, list[int]]] = {}
    for rank in sorted(layouts):
        groups.setdefault(id(layouts[rank]), (layouts[rank], []))[1].append(rank)
    return [(layout, tuple(ranks)) for layout, ranks in groups.values()]


class _Pool:
    """Ranks that have a range of slices. place: rank -> where it has them; near: node -> the ranks on it."""

    def __init__(self, held: Sequence[tuple[Place, tuple[int, ...]]], node_size: int) -> None:
        self.place: dict[int, Place] = {}
        self.near: dict[int, list[int]] = {}
        for place, ranks in held:
            for r in ranks:
                if r not in self.place:
                    self.place[r] = place
                    self.near.setdefault(r // node_size, []).append(r)
        self.ranks = sorted(self.place)


class Holders:
    """Which source ranks have which slices of every canonical tensor."""

    def __init__(self, sources: Mapping[int, Layout], tensors: Mapping[str, Canonical], node_size: int) -> None:
        self.node_size = node_size
        self._held: dict[str, dict[Place, tuple[int, ...]]] = {}
        self._found: dict[tuple[str, int, int], list[tuple[int, int, _Pool]]] = {}
        depth: dict[str, int] = {}
        for layout, ranks in _classes(sources):
            for position, (param, segments) in enumerate(layout.items()):
                for s in segments:
                    _check_bounds(s, tensors, f"trainer rank {ranks[0]}")
                    places = self._held.setdefault(s.name, {})
                    place = Place(param, s)
                    places[place] = places.get(place, ()) + ranks
                    depth.setdefault(s.name, position)
        # Tensors at equal depth in their pipeline stages follow each other, so that all stages send at the same time.
        self.order = sorted(self._held, key=lambda name: depth[name])

    def find(self, want: Place, who: int) -> list[tuple[int, int, _Pool]]:
        """`(start, stop, holders)` that tile the slices of `want`, a place on engine rank `who`."""
        s = want.segment
        tiles = self._found.setdefault((s.name, s.start, s.size), [])
        if tiles:
            return tiles
        everyone = self._held.get(s.name, {}).items()
        held = [(p, ranks) for p, ranks in everyone if p.segment.start < s.stop and s.start < p.segment.stop]
        inner = {edge for p, _ in held for edge in (p.segment.start, p.segment.stop) if s.start < edge < s.stop}
        for start, stop in pairwise([s.start, *sorted(inner), s.stop]):
            cover = [(p, r) for p, r in held if p.segment.start <= start and stop <= p.segment.stop]
            if not cover:
                raise ValueError(
                    f"{s.name}: no trainer rank holds slices [{start}, {stop}) of axis {s.axis}, "
                    f"which engine rank {who} needs for {want.param}"
                )
            tiles.append((start, stop, _Pool(cover, self.node_size)))
        return tiles


def _places(layout: Layout, rank: int, tensors: Mapping[str, Canonical]) -> dict[str, list[Place]]:
    """Canonical tensor -> places at which an engine rank stores slices of it."""
    places: dict[str, list[Place]] = {}
    for param, segments in layout.items():
        for s in segments:
            _check_bounds(s, tensors, f"engine rank {rank}")
            places.setdefault(s.name, []).append(Place(param, s))
        _check_disjoint(param, segments, rank)
    return places


def _check_bounds(s: Segment, tensors: Mapping[str, Canonical], who: str) -> None:
    tensor = tensors.get(s.name)
    inside = tensor is not None and s.axis == tensor.axis and 0 <= s.start < s.stop <= tensor.slices
    assert inside, f"{who} stores {s}; the tensor is {tensor}"


def _check_disjoint(param: str, segments: Iterable[Segment], rank: int) -> None:
    for a, b in pairwise(sorted(segments, key=lambda s: (s.slot, s.offset))):
        assert a.slot < b.slot or a.offset + a.size <= b.offset, f"{param} of engine rank {rank}: {b} overlaps {a}"


class _Builder:
    """Chooses sources and buckets, move by move, the same on every rank."""

    def __init__(self, node_size: int, bucket_bytes: int, rank: int | None) -> None:
        self.node_size, self.bucket_bytes, self.limit, self.rank = node_size, bucket_bytes, bucket_bytes // 2, rank
        self.copies: list[Copy] = []
        self.moves: list[Move] = []
        self.fingerprint = 0
        self.sent = defaultdict[int, int](int)  # bytes by rank
        self.node_sent = defaultdict[int, int](int)  # bytes by node, to other nodes
        # Rank -> [bucket that it fills now, bytes in this bucket], for its sends and for its receives.
        self.sending, self.receiving = (defaultdict[int, list[int]](lambda: [0, 0]) for _ in range(2))

    def add(self, start: int, stop: int, slice_bytes: int, pool: _Pool, want: Place, ranks: Sequence[int]) -> None:
        """Deliver `[start, stop)` of `want` to every one of `ranks`."""
        pieces: dict[Place, list[Piece]] = {}
        nbytes, tag = (stop - start) * slice_bytes, zlib.crc32(want.segment.name.encode())
        for rank in ranks:
            own = pool.place.get(rank)
            if own is not None:
                self.fingerprint = hash((self.fingerprint, tag, start, nbytes, rank))
                if self.rank in (None, rank):
                    self.copies.append(Copy(rank, Piece(start, stop - start, nbytes, own, want)))
                continue
            near = pool.near.get(rank // self.node_size)
            if near:
                source = min(near, key=self.sent.__getitem__)
            else:  # a rank of the node that sent the fewest bytes to other nodes
                source = min(pool.ranks, key=lambda r: (self.node_sent[r // self.node_size], self.sent[r]))
                self.node_sent[source // self.node_size] += nbytes
            place = pool.place[source]
            if place not in pieces:
                pieces[place] = list(self._split(start, stop, slice_bytes, place, want))
            for piece in pieces[place]:
                self._move(source, rank, piece, tag)

    def _split(self, start: int, stop: int, slice_bytes: int, source: Place, want: Place) -> Iterator[Piece]:
        step = self.limit // slice_bytes
        if step == 0:
            raise ValueError(
                f"a bucket of {self.bucket_bytes} bytes cannot hold two slices of {slice_bytes} bytes of "
                f"{want.segment.name}; raise --rl-reshard-bucket-mb"
            )
        for at in range(start, stop, step):
            size = min(step, stop - at)
            yield Piece(at, size, size * slice_bytes, source, want)

    def _move(self, source: int, destination: int, piece: Piece, tag: int) -> None:
        send, receive, nbytes = self.sending[source], self.receiving[destination], piece.nbytes
        bucket = max(send[0], receive[0])
        # If the later one of the two buckets is full, the move begins the next bucket.
        if (send[0] == bucket and send[1] + nbytes > self.limit) or (
            receive[0] == bucket and receive[1] + nbytes > self.limit
        ):
            bucket += 1
        for queue in (send, receive):
            if queue[0] < bucket:
                queue[:] = bucket, nbytes
            else:
                queue[1] += nbytes
        self.sent[source] += nbytes
        self.fingerprint = hash((self.fingerprint, tag, piece.start, nbytes, source, destination, bucket))
        if self.rank is None or self.rank == source or self.rank == destination:
            self.moves.append(Move(bucket, source, destination, piece))
