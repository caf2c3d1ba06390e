"""Parcels: the whole model once, as the trainer's ranks store it, and the rounds in which it is gathered. Pure.

A *parcel* is a stored parameter that some trainer ranks share. A *round* is what travels together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np

from mindspeed_rl_plugin.reshard.layout import Canonical, Layout, Segment, Shapes

Rounds = tuple[tuple[int, ...], ...]


class Parcel(NamedTuple):
    """A stored parameter: its segments, its shape without the padding behind them, its bytes on the wire, and
    trainer rank -> name of the parameter. wide: float32 whatever the model's dtype."""

    segments: tuple[Segment, ...]
    shape: tuple[int, ...]
    nbytes: int
    wide: bool
    names: Mapping[int, str]


def make_parcels(
    sources: Mapping[int, Layout], shapes: Mapping[int, Shapes], tensors: Mapping[str, Canonical], itemsize: int
) -> tuple[Parcel, ...]:
    """All parcels. sources, shapes: trainer rank -> its layout and what it stores; itemsize: bytes of an element on the
    wire. Those at equal depth of their pipeline stage follow each other, so that all stages send at once."""
    found: dict[tuple[Segment, ...], tuple[int, Parcel]] = {}
    for rank in sorted(sources):
        for position, (name, segments) in enumerate(sources[rank].items()):
            if not segments:
                continue
            if segments not in found:
                shape, wide = _without_padding(segments, shapes[rank][name]), tensors[segments[0].name].wide
                found[segments] = position, Parcel(segments, shape, prod(shape) * (4 if wide else itemsize), wide, {})
            found[segments][1].names.setdefault(rank, name)
    return tuple(parcel for _, parcel in sorted(found.values(), key=lambda item: item[0]))


def _without_padding(segments: Sequence[Segment], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Rows behind the last segment, of the padded vocabulary, do not travel."""
    if any(s.axis != 0 or s.slot >= 0 or s.transposed for s in segments):
        return tuple(shape)
    return (max(s.offset + s.size for s in segments), *shape[1:])


def make_rounds(parcels: Sequence[Parcel], round_bytes: int) -> Rounds:
    """Numbers of the parcels of each round: at most `round_bytes`, or one larger parcel."""
    rounds: list[list[int]] = []
    filled = 0
    for i, parcel in enumerate(parcels):
        if not rounds or filled + parcel.nbytes > round_bytes:
            rounds.append([])
            filled = 0
        rounds[-1].append(i)
        filled += parcel.nbytes
    return tuple(map(tuple, rounds))


def two_rounds(
    parcels: Sequence[Parcel], rounds: Rounds, sources: Mapping[int, Layout], ranks: Iterable[int], converted: bool
) -> int:
    """Most bytes that two rounds in a row take on any of the engine's `ranks`, besides the weights of both sides.

    A round is received while the one before it is copied into the engine. A rank that stores a parcel takes nothing for
    it, unless it is `converted` to another dtype. sources: trainer rank -> layout.
    """
    # Ranks with one and the same layout hold the same parcels; None is a rank without a trainer.
    one_of = {id(sources.get(rank)): rank for rank in ranks}
    row = {rank: i for i, rank in enumerate(one_of.values())}
    taken = np.tile(np.array([p.nbytes for p in parcels], np.int64), (len(row), 1))
    for i, parcel in enumerate(parcels):
        if parcel.wide or not converted:
            taken[[row[rank] for rank in parcel.names if rank in row], i] = 0
    sizes = np.add.reduceat(taken, [0, *accumulate(map(len, rounds[:-1]))], axis=1)
    return int((sizes[:, 1:] + sizes[:, :-1]).max() if len(rounds) > 1 else sizes.max())
