"""Digests of weights, which do not depend on how the weights are split, and comparison of trainer and engine.

The digest of a slice is the sum, modulo 2**64, of (bits + c) x w(i) over its elements; i is the element's index in the
*canonical* tensor (the complete one), and w mixes its bits. So the digests of the parts of any split have the same sum,
and a value at a wrong place changes it. Digests follow from the layouts, not the plan, so they find errors of the plan.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_rl_plugin.layout.layout import Canonical, Layout, Segment
from mindspeed_rl_plugin.weights.storages import bytes_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD, _MIX, _SHIFT = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 29
_DIGESTED_AT_ONCE = 1 << 20  # number of elements that have int64 temporaries at the same time
_WRAP = 1 << 64
BLOCK_BYTES = 4 << 20  # bytes of a storage that have one digest


class WeightMismatch(RuntimeError):
    """Weights that should be equal differ: of engine and trainer, of replicas, or before and after an offload."""


class BrokenWeights(RuntimeError):
    """The trainer's weights hold NaN or infinity."""


class RankDigests(NamedTuple):
    """The layout of a rank, and the digests of its segments in their order."""

    rank: int
    layout: Layout
    digests: Sequence[int]


@torch.no_grad()
def slice_digests(values: Tensor, segment: Segment, tensor: Canonical, dtype: torch.dtype) -> Tensor:
    """`[slices]` int64: digest of each slice of a segment that a rank stores, on the device of `values`.

    values: the slices in canonical orientation, 1-D or 2-D; dtype: to which they are converted before bits are read.
    """
    columns = tensor.shape[1] if len(tensor.shape) == 2 else 1
    row0, column0 = (segment.start, 0) if segment.axis == 0 else (0, segment.start)
    grid = values if values.dim() == 2 else values[:, None]
    across = torch.arange(column0, column0 + grid.shape[1], device=grid.device)
    each = torch.zeros(grid.shape[segment.axis], dtype=torch.int64, device=grid.device)
    step = max(1, _DIGESTED_AT_ONCE // max(1, grid.shape[1]))
    for low, rows in zip(range(0, grid.shape[0], step), grid.split(step), strict=True):
        bits = rows.to(dtype).contiguous().view(_BITS[dtype.itemsize]).to(torch.int64)
        down = torch.arange(row0 + low, row0 + low + rows.shape[0], device=grid.device)
        weight = (down[:, None] * columns + across + 1) * _ODD
        weight = (weight ^ (weight >> _SHIFT)) * _MIX
        mixed = ((bits + _ODD) * weight).sum(1 - segment.axis)
        at = 0 if segment.axis else low
        each[at : at + len(mixed)] += mixed
    return each


def segment_digest(values: Tensor, segment: Segment, tensor: Canonical, dtype: torch.dtype) -> Tensor:
    """Digest of a segment that a rank stores, int64 scalar: the sum over its slices. See `slice_digests`."""
    return slice_digests(values, segment, tensor, dtype).sum()


@torch.no_grad()
def storage_digests(storage: torch.UntypedStorage) -> Tensor:
    """`[blocks]` int64: a digest of each BLOCK_BYTES bytes of a storage, on its device."""
    kind = torch.int32 if storage.nbytes() % 4 == 0 else torch.uint8
    blocks = bytes_of(storage).view(kind).split(BLOCK_BYTES // kind.itemsize)
    size = len(blocks[0])
    whole, every = Segment("", 0, 0, size, 0), Canonical((size,), 0)
    return torch.stack([segment_digest(block, whole, every, kind) for block in blocks])


def layout_digests(
    params: Mapping[str, Tensor], layout: Layout, tensors: Mapping[str, Canonical], dtype: torch.dtype | None
) -> list[int]:
    """Digest of every segment of a rank's layout, in order. dtype: of the digests of tensors that are not wide; None:
    each parameter's own dtype."""
    out = []
    for name, segments in layout.items():
        for s in segments:
            tensor = tensors[s.name]
            kind = params[name].dtype if dtype is None else torch.float32 if tensor.wide else dtype
            out.append(segment_digest(s.view(params[name], s.start, s.size), s, tensor, kind))
    return torch.stack(out).tolist() if out else []


def compare(
    sources: Sequence[RankDigests], destinations: Sequence[RankDigests], tensors: Mapping[str, Canonical]
) -> dict[str, int]:
    """Digest of every canonical tensor of the sources. Checks that replicas are equal, and destinations equal sources.

    Raises WeightMismatch naming tensor, ranks and range.
    """
    ours, theirs = _by_tensor(sources), _by_tensor(destinations)
    totals = {}
    for name, spans in ours.items():
        values = {span: _agreed(name, span, held, "trainer") for span, held in spans.items()}
        totals[name] = _sum_of(values, 0, tensors[name].slices, name)
        if name in theirs:
            _compare_tensor(name, values, theirs[name], tensors[name])
    return totals


def weights_digest(totals: Mapping[str, int]) -> str:
    """16 hexadecimal digits for a complete model; equal for equal weights, however they are split."""
    text = "\n".join(f"{name} {totals[name]:016x}" for name in sorted(totals))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


ElementRange = tuple[int, int]
RangeDigests = dict[ElementRange, list[tuple[int, int]]]  # span -> (rank, digest) of each holder


def _by_tensor(side: Sequence[RankDigests]) -> dict[str, RangeDigests]:
    out: dict[str, RangeDigests] = {}
    for held in side:
        segments = [s for segments in held.layout.values() for s in segments]
        for s, digest in zip(segments, held.digests, strict=True):
            out.setdefault(s.name, {}).setdefault((s.start, s.stop), []).append((held.rank, digest % _WRAP))
    return out


def _agreed(name: str, span: ElementRange, held: list[tuple[int, int]], side: str) -> int:
    """The digest of a span; raises if its holders report different ones."""
    if len({digest for _, digest in held}) > 1:
        ranks = ", ".join(f"{rank} ({digest:016x})" for rank, digest in held)
        raise WeightMismatch(f"{name} [{span[0]}, {span[1]}): {side} ranks hold different values: {ranks}")
    return held[0][1]


def _sum_of(values: Mapping[ElementRange, int], low: int, high: int, name: str) -> int:
    """Digest of `[low, high)`, the sum over spans that tile it."""
    inside = sorted(span for span in values if span[0] >= low and span[1] <= high)
    edges = [low, *(stop for _, stop in inside)]
    assert inside == list(pairwise(edges)) and edges[-1] == high, f"{name}: {inside} do not tile [{low}, {high})"
    return sum(values[span] for span in inside) % _WRAP


def _compare_tensor(name: str, ours: Mapping[ElementRange, int], spans: RangeDigests, tensor: Canonical) -> None:
    edges = {edge for span in ours for edge in span}
    for span, held in spans.items():
        if edges.issuperset(span):
            expected = _sum_of(ours, *span, name)
            wrong = [rank for rank, digest in held if digest != expected]
            if wrong:
                raise _mismatch(name, span, tensor, wrong)
    # If the engine splits finer than the trainer, only ranges between common edges can be compared.
    theirs = {span: _agreed(name, span, held, "engine") for span, held in spans.items()}
    for low, high in pairwise(sorted(edges & {edge for span in theirs for edge in span})):
        if _sum_of(ours, low, high, name) != _sum_of(theirs, low, high, name):
            ranks = sorted({rank for s, held in spans.items() if s[0] >= low and s[1] <= high for rank, _ in held})
            raise _mismatch(name, (low, high), tensor, ranks)


def _mismatch(name: str, span: ElementRange, tensor: Canonical, ranks: Sequence[int]) -> WeightMismatch:
    where = f"{name} [{span[0]}, {span[1]}) of axis {tensor.axis}"
    return WeightMismatch(f"{where}: engine ranks {ranks} differ from the trainer")


@torch.no_grad()
def first_broken(tensors: Iterable[Tensor]) -> int:
    """Number of the first tensor that holds NaN or infinity, counted from 1; 0 if there is none.

    Reads each tensor once, and waits for the device once. Needs extra memory only if minimum and maximum ignore NaN.
    """
    ends = [_ends(t) if t.numel() else torch.zeros(2, device=t.device) for t in tensors]
    if not ends:
        return 0
    bad = ~torch.stack(ends).isfinite().all(1)
    return int(bad.nonzero()[0]) + 1 if bad.any() else 0


def _ends(t: Tensor) -> Tensor:
    """`[2]` fp32, finite if all elements of t are finite."""
    if _carries_nan(t.device, t.dtype):
        return torch.stack(torch.aminmax(t)).float()
    return torch.where(t.isfinite().all(), 0.0, torch.inf).expand(2)


@functools.cache
def _carries_nan(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether minimum and maximum of numbers with a NaN are NaN on a device."""
    odd = torch.tensor([1.0, torch.nan, -1.0], device=device, dtype=dtype)
    return bool(torch.stack(torch.aminmax(odd)).isnan().all())


def refuse_broken(firsts: Sequence[int], layouts: Mapping[int, Layout], when: str) -> None:
    """Raises BrokenWeights if the weights of a trainer rank hold NaN or infinity. firsts: for each rank the result of
    `first_broken` for its weights, in the order of its layout."""
    for rank, broken in enumerate(firsts):
        if broken:
            name = list(layouts[rank])[broken - 1]
            raise BrokenWeights(
                f"{name} of trainer rank {rank} holds NaN or infinity {when} ({tensors_in(layouts[rank], name)}); the "
                "engine does not get these weights, and they are not saved; resume from the last checkpoint, with a "
                "smaller --lr or --clip-grad"
            )


def tensors_in(layout: Layout, name: str) -> str:
    """The slices of canonical tensors in a stored parameter."""
    return ", ".join(f"{s.name} [{s.start}, {s.stop})" for s in layout[name])
