"""Publishes a trainer's weights for engines in other processes: as a copy on the host, under a version.

Each slice of a canonical tensor (complete, as in Hugging Face) is published by exactly one of the ranks that have it:
the host memory of all ranks together has one model for each version. The *share* of a rank is what it publishes: blocks
of slices in the engine's dtype (`wide` tensors: float32). If weights are verified, each block is followed by digests of
its slices. Other processes need only the trainer's description to plan their reads.

Training waits only while the weights are checked and each rank copies its share. The trainer does not wait for
readers: a version is overwritten when its memory is needed for a newer version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.layout.layout import (
    Canonical,
    Layout,
    ModelShape,
    Parallel,
    Segment,
    canonical_tensors,
    megatron_layout,
)
from mindspeed_rl_plugin.layout.transfer_plan import Holders, Place
from mindspeed_rl_plugin.weights.live import stored_parameters, trainer_storage
from mindspeed_rl_plugin.weights.offload import gathered
from mindspeed_rl_plugin.weights.published_memory import ByteSpan, PublishedMemory
from mindspeed_rl_plugin.weights.verify import first_broken, refuse_broken, slice_digests

_BLOCK_ALIGNMENT = 64  # bytes, of a block
_DIGEST = 8  # bytes

Gather = Callable[[Any], list[Any]]  # value -> values of all ranks


class HeldSlices(NamedTuple):
    """Slices `[start, stop)` of a canonical tensor, with the stored parameter that contains them."""

    place: Place
    start: int
    stop: int


class PublishedBlock(NamedTuple):
    """Slices of a canonical tensor in host memory. Digests are int64 `[tables, slices]`."""

    segment: Segment  # the slices
    shape: tuple[int, ...]  # of its elements, in canonical orientation
    dtype: torch.dtype  # of its elements
    at: int  # byte offset of its elements
    digests: int  # byte offset of its digests; 0: none
    tables: int  # 2 for a `wide` tensor (digests in float32 and in the engine's dtype), else 1

    def values(self, memory: Tensor) -> Tensor:
        """The block's elements in canonical orientation, a view of the bytes `memory`."""
        return memory[self.at : self.at + prod(self.shape) * self.dtype.itemsize].view(self.dtype).view(self.shape)

    def table(self, memory: Tensor) -> Tensor:
        """The digests of its slices, a view of the bytes `memory`."""
        size = self.segment.size
        flat = memory[self.digests : self.digests + self.tables * size * _DIGEST]
        return flat.view(torch.int64).view(self.tables, size)

    def spans(self, start: int, size: int) -> list[ByteSpan]:
        """Spans of slices `[start, start + size)`, and of their digests if there are any."""
        first, each = start - self.segment.start, self.segment.size
        width = prod(self.shape) // each * self.dtype.itemsize  # bytes of a slice
        if self.segment.axis == 0:
            out = [(self.at + first * width, 1, size * width, size * width)]
        else:
            item = self.dtype.itemsize
            out = [(self.at + first * item, self.shape[0], size * item, each * item)]
        if self.digests:
            out.append((self.digests + first * _DIGEST, self.tables, size * _DIGEST, each * _DIGEST))
        return out


@dataclass(frozen=True)
class Packed:
    """Consecutive blocks, of `nbytes` in all."""

    blocks: tuple[PublishedBlock, ...]
    nbytes: int

    @property
    def layout(self) -> Layout:
        """The layout for `make_plan`: number of a block -> its slices."""
        return {str(i): (block.segment,) for i, block in enumerate(self.blocks)}

    @classmethod
    def of(
        cls, ranges: Iterable[tuple[str, int, int]], tensors: Mapping[str, Canonical], dtype: torch.dtype, verify: bool
    ) -> Packed:
        """One block for each range of slices (tensor's name, start, stop). dtype: of the engine."""
        blocks, end = [], 0
        for name, start, stop in ranges:
            tensor, size = tensors[name], stop - start
            kind = torch.float32 if tensor.wide else dtype
            shape = tuple(size if axis == tensor.axis else n for axis, n in enumerate(tensor.shape))
            digests = _aligned(end + prod(shape) * kind.itemsize) if verify else 0
            tables = 2 if tensor.wide else 1
            blocks.append(PublishedBlock(Segment(name, tensor.axis, start, size, 0), shape, kind, end, digests, tables))
            end = _aligned(digests + tables * size * _DIGEST if verify else end + prod(shape) * kind.itemsize)
        return cls(tuple(blocks), end)


@dataclass(frozen=True)
class Share(Packed):
    """What one rank publishes."""

    parts: tuple[tuple[HeldSlices, ...], ...] = ()  # for each block, the places of its slices on the rank


@dataclass(frozen=True)
class TrainerWeights:
    """The description of a trainer from which another process plans its pull."""

    shape: ModelShape
    parallel: Parallel
    kinds: tuple[tuple[str, str], ...]  # how each rank stores the model, see `live.trainer_storage`
    dtype: str  # name of the engine's dtype, in which all but `wide` tensors are published
    verify: bool = False  # whether digests are published too

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        parallel: Parallel,
        rank: int,
        model_chunks: Sequence[Module],
        engine_dtype: torch.dtype,
        gather: Gather,
        verify: bool = False,
    ) -> TrainerWeights:
        """The description of a live trainer; collective over its ranks by `gather`. Raises ValueError if the model
        differs from the shape."""
        mine = trainer_storage(shape, parallel, rank, stored_parameters(model_chunks))
        kinds = tuple(tuple(kind) for kind in gather(mine))
        return cls(shape, parallel, kinds, str(engine_dtype).removeprefix("torch."), verify)

    def text(self) -> str:
        """JSON, for other processes."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: str) -> TrainerWeights:
        """Inverse of `text`. Raises ValueError for an invalid text."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"malformed description of a trainer's weights: {error}") from error

    @property
    def engine_dtype(self) -> torch.dtype:
        """Dtype of published weights, except `wide` tensors, which are float32."""
        return getattr(torch, self.dtype)

    @property
    def tensors(self) -> Mapping[str, Canonical]:
        return canonical_tensors(self.shape)

    @cached_property
    def layouts(self) -> dict[int, Layout]:
        """Trainer rank -> its layout."""
        return {r: megatron_layout(self.shape, self.parallel, r, *kinds) for r, kinds in enumerate(self.kinds)}

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """The share of each rank. Each slice is in exactly one share."""
        parts = _deal(self.layouts, self.tensors, self.engine_dtype.itemsize)
        return tuple(self._share(parts[rank]) for rank in self.layouts)

    def _share(self, held: Sequence[HeldSlices]) -> Share:
        """A share from slices; consecutive slices become one block."""
        runs: list[list[HeldSlices]] = []
        for part in held:
            last = runs[-1][-1] if runs else None
            joined = last and last.place.segment.name == part.place.segment.name and last.stop == part.start
            runs[-1].append(part) if joined else runs.append([part])
        ranges = [(run[0].place.segment.name, run[0].start, run[-1].stop) for run in runs]
        packed = Packed.of(ranges, self.tensors, self.engine_dtype, self.verify)
        return Share(packed.blocks, packed.nbytes, tuple(map(tuple, runs)))


def _deal(
    layouts: Mapping[int, Layout], tensors: Mapping[str, Canonical], itemsize: int
) -> dict[int, list[HeldSlices]]:
    """Rank -> slices that it publishes. Of the ranks with the same slices, the one with the fewest bytes so far gets
    them."""
    holders, load = Holders(layouts, tensors, len(layouts)), dict.fromkeys(layouts, 0)
    out: dict[int, list[HeldSlices]] = {rank: [] for rank in layouts}
    for name in holders.order:
        tensor, chosen = tensors[name], dict[tuple[int, ...], int]()
        everything = Place(name, Segment(name, tensor.axis, 0, tensor.slices, 0))
        for start, stop, pool in holders.find(everything, 0):
            same = tuple(pool.ranks)  # one of these ranks publishes all slices of the tensor that they have in common
            if same not in chosen:
                chosen[same] = min(same, key=load.__getitem__)
            rank = chosen[same]
            load[rank] += (stop - start) * tensor.slice_bytes(itemsize)
            out[rank].append(HeldSlices(pool.place[rank], start, stop))
    return out


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _BLOCK_ALIGNMENT) * _BLOCK_ALIGNMENT


@dataclass(frozen=True)
class Published:
    """The costs of one `publish` on this rank."""

    version: int
    seconds: float  # that training waited
    nbytes: int  # of the rank's share


class Publisher:
    """Publishes this rank's share of the weights.

    offer: (bytes of a version, number of versions) -> memory for them; versions: at least 2, so that one can be read
    while the next one is written; gather: over all trainer ranks.
    """

    def __init__(
        self,
        weights: TrainerWeights,
        rank: int,
        offer: Callable[[int, int], PublishedMemory],
        versions: int = 2,
        *,
        gather: Gather,
    ) -> None:
        assert versions >= 2, versions
        self.weights, self.rank, self._gather = weights, rank, gather
        self.share = weights.shares[rank]
        self._store = offer(self.share.nbytes, versions)

    @torch.no_grad()
    def publish(self, model_chunks: Sequence[Module], version: int) -> Published:
        """Copy this rank's share under `version`. Collective over the trainer's ranks; the chunks are on the device.

        Raises ValueError if the model differs from its description, and BrokenWeights if a weight is not finite. All
        ranks raise the same, and nothing is published.
        """
        begin = time.perf_counter()
        with gathered(model_chunks):
            source = stored_parameters(model_chunks)
            self._check(source, f"after {version} updates")
            array = self._store.begin(version)
            get_device().page_lock(array)
            memory = torch.from_numpy(array)
            self._copy(source, memory)
            get_device().synchronize_stream()
        self._store.commit(version, self._about(memory))
        return Published(version, time.perf_counter() - begin, self.share.nbytes)

    def refuse_broken(self, model_chunks: Sequence[Module]) -> None:
        """Raises what `publish` raises. Collective. Called before a checkpoint: in the middle of a rollout
        nothing is published, so `publish` has not checked these weights."""
        with gathered(model_chunks):
            self._check(stored_parameters(model_chunks), "before a checkpoint")

    def _check(self, source: Mapping[str, Tensor], when: str) -> None:
        """Raises the same on all ranks: if one rank stopped alone, the others would wait for it."""
        changed, broken, layouts = self._changed(source), 0, self.weights.layouts
        if not changed:
            broken = first_broken(source[name] for name in layouts[self.rank])
        found = self._gather((changed, broken))
        if first := next((text for text, _ in found if text), ""):
            raise ValueError(first)
        refuse_broken([broken for _, broken in found], layouts, when)

    def _changed(self, source: Mapping[str, Tensor]) -> str:
        """How this rank's model differs from its description; empty if it does not."""
        try:
            kinds = trainer_storage(self.weights.shape, self.weights.parallel, self.rank, source)
        except ValueError as error:
            return str(error)
        described = self.weights.kinds[self.rank]
        changed = f"rank {self.rank} stores the model as {kinds}, but its description says {described}"
        return "" if kinds == described else changed

    def _copy(self, source: Mapping[str, Tensor], memory: Tensor) -> None:
        for block, parts in zip(self.share.blocks, self.share.parts, strict=True):
            values, axis = block.values(memory), block.segment.axis
            for (param, segment), start, stop in parts:
                live, at = segment.view(source[param], start, stop - start), start - block.segment.start
                place = values.narrow(axis, at, stop - start)
                # torch_npu 2.7.1 copies by way of other host memory if dtypes differ or the target has gaps. With
                # non_blocking, that memory is read before it is filled.
                place.copy_(live, non_blocking=place.is_contiguous() and place.dtype == live.dtype)
                if self.weights.verify:
                    kinds = (torch.float32, self.weights.engine_dtype)[-block.tables :]
                    here = segment._replace(start=start, size=stop - start)
                    for row, kind in zip(block.table(memory), kinds, strict=True):
                        digests = slice_digests(live, here, self.weights.tensors[segment.name], kind)
                        row[at : at + stop - start].copy_(digests)

    def _about(self, memory: Tensor) -> bytes:
        """Digest of each block, int64; empty if weights are not verified."""
        if not self.weights.verify:
            return b""
        return np.array([int(block.table(memory)[0].sum()) for block in self.share.blocks], np.int64).tobytes()
