"""Shards: the whole model once, as the trainer's ranks store it, and the rounds in which it is gathered. Pure.

A *shard* is a stored parameter that some trainer ranks share. A *round* is what travels together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np

from mindspeed_rl_plugin.reshard.layout import Canonical, Layout, Segment, Shapes

Rounds = tuple[tuple[int, ...], ...]


class Shard(NamedTuple):
    """A stored parameter: its segments, its shape without the padding behind them, its bytes on the wire, and
    trainer rank -> name of the parameter. wide: float32 whatever the model's dtype."""

    segments: tuple[Segment, ...]
    shape: tuple[int, ...]
    nbytes: int
    wide: bool
    names: Mapping[int, str]


def make_shards(
    sources: Mapping[int, Layout], shapes: Mapping[int, Shapes], tensors: Mapping[str, Canonical], itemsize: int
) -> tuple[Shard, ...]:
    """All shards. sources, shapes: trainer rank -> its layout and what it stores; itemsize: bytes of an element on the
    wire. Those at equal depth of their pipeline stage follow each other, so that all stages send at once."""
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


def make_rounds(shards: Sequence[Shard], round_bytes: int) -> Rounds:
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


def two_rounds(
    shards: Sequence[Shard], rounds: Rounds, sources: Mapping[int, Layout], ranks: Iterable[int], converted: bool
) -> int:
    """Most bytes that two rounds in a row take on any of the engine's `ranks`, besides the weights of both sides.

    A round is received while the one before it is copied into the engine. A rank that stores a shard takes nothing for
    it, unless it is `converted` to another dtype. sources: trainer rank -> layout.
    """
    # Ranks with one and the same layout hold the same shards; None is a rank without a trainer.
    one_of = {id(sources.get(rank)): rank for rank in ranks}
    row = {rank: i for i, rank in enumerate(one_of.values())}
    taken = np.tile(np.array([p.nbytes for p in shards], np.int64), (len(row), 1))
    for i, shard in enumerate(shards):
        if shard.wide or not converted:
            taken[[row[rank] for rank in shard.names if rank in row], i] = 0
    sizes = np.add.reduceat(taken, [0, *accumulate(map(len, rounds[:-1]))], axis=1)
    return int((sizes[:, 1:] + sizes[:, :-1]).max() if len(rounds) > 1 else sizes.max())
