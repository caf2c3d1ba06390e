"""The engine's part in published weights: pull what this machine's engine ranks need, and apply it between two steps.

A pull is not collective. It copies host memory of trainer ranks into this machine's *staging* (host memory for the
slices that its engine ranks need), and may overlap the engine's steps. `apply` then copies the staging into the live
parameters. Trainer and engine make their plans without messages, from the trainer's description.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.layout.layout import EngineParallel, Segment, engine_layout
from mindspeed_rl_plugin.layout.transfer_plan import Piece, make_plan
from mindspeed_rl_plugin.weights.live import engine_storage, engine_tensors
from mindspeed_rl_plugin.weights.machine_staging import Fill, Shared
from mindspeed_rl_plugin.weights.publish import Packed, PublishedBlock, TrainerWeights
from mindspeed_rl_plugin.weights.published_memory import ByteSpan, VersionSource, view
from mindspeed_rl_plugin.weights.verify import WeightMismatch, segment_digest, slice_digests, weights_digest

READ_BYTES = 32 << 20  # a read ends when it has this many bytes or more; the deadline is checked between two reads
THREADS = 8  # number of trainer ranks that are read at the same time
_WRAP = 1 << 64


class Pulled(NamedTuple):
    """A version that is now in the staging."""

    version: int
    seconds: float  # that `pull` took
    nbytes: int  # read for this call; 0 if this machine had the version already


class Applied(NamedTuple):
    """A version that the engine now has."""

    version: int
    seconds: float  # that the engine waited
    digest: str | None  # of the complete model; None: weights are not verified


class SliceReader:
    """Reads slices of published weights into packed memory. ranges: (tensor, start, stop) of the slices; sources: one
    for each trainer rank."""

    def __init__(
        self, weights: TrainerWeights, ranges: Iterable[tuple[str, int, int]], sources: Sequence[VersionSource]
    ) -> None:
        self.weights, self._sources = weights, sources
        self.staging = Packed.of(ranges, weights.tensors, weights.engine_dtype, weights.verify)
        here = weights.parallel.world  # in the plan, the staging is one more rank, after those of the trainer
        plan = make_plan(
            {rank: share.layout for rank, share in enumerate(weights.shares)},
            {here: self.staging.layout},
            weights.tensors,
            itemsize=weights.engine_dtype.itemsize,
            bucket_bytes=2 * READ_BYTES,
            rank=here,
        )
        self._pieces: dict[int, list[Piece]] = {}  # by trainer rank
        for move in plan.moves:
            self._pieces.setdefault(move.source, []).append(move.piece)
        self._until = self._seconds = 0.0

    def fill(self, version: int, seconds: float, memory: np.ndarray) -> bytes:
        """Read a version into `[nbytes]` uint8. Returns the digest of the complete model if weights are verified."""
        self._until, self._seconds = time.monotonic() + seconds, seconds
        everyone = range(len(self._sources)) if self.weights.verify else list(self._pieces)
        with ThreadPoolExecutor(min(THREADS, max(len(everyone), 1)), "rl-pull") as pool:
            work = [pool.submit(self._read, rank, version, memory) for rank in everyone]
            failed = [one for one in wait(work, return_when=FIRST_EXCEPTION).done if one.exception() is not None]
            if failed:
                self.end()
                pool.shutdown(wait=False, cancel_futures=True)
                raise failed[0].exception()
        return self._digest([one.result() for one in work]).encode() if self.weights.verify else b""

    def end(self) -> None:
        """End a read that runs in other threads."""
        self._until = 0.0

    def _read(self, rank: int, version: int, memory: np.ndarray) -> bytes:
        """Read all pieces of one trainer rank. Returns its description of the version."""

        def left() -> float:
            if (seconds := self._until - time.monotonic()) <= 0:
                why = f"was not done within {self._seconds:g} s" if self._until else "was ended"
                raise TimeoutError(f"the pull of version {version} {why}")
            return seconds

        source, blocks = self._sources[rank], self.weights.shares[rank].blocks
        _, about = source.seek(version, left(), left)
        for spans, into in _chunks(self._pieces.get(rank, ()), blocks, self.staging.blocks):
            source.read(version, spans, [view(memory, span) for span in into], left())
        source.check(version, left())
        return about

    def _digest(self, abouts: Sequence[bytes]) -> str:
        totals: dict[str, int] = {}
        for share, about in zip(self.weights.shares, abouts, strict=True):
            for block, digest in zip(share.blocks, np.frombuffer(about, np.int64).tolist(), strict=True):
                totals[block.segment.name] = (totals.get(block.segment.name, 0) + digest) % _WRAP
        return weights_digest(totals)


class _Taken(NamedTuple):
    """A segment that an engine rank stores, with its place in the staging."""

    param: str
    segment: Segment
    block: PublishedBlock
    at: int  # first of its slices within the block

    @classmethod
    def of(cls, param: str, s: Segment, blocks: Sequence[PublishedBlock]) -> _Taken:
        block = next(b for b in blocks if b.segment.start <= s.start and s.stop <= b.segment.stop)
        return cls(param, s, block, s.start - block.segment.start)


class Puller:
    """Copies published weights into the parameters of one engine rank.

    weights: the trainer's description.
    engine: sizes of this engine.
    parameters: name -> live tensor, to find how this version of the engine stores them.
    sources: one for each trainer rank.
    rank: of this process within its engine.
    ranks: all ranks of the engine on this machine.
    deadline: seconds that a pull may take.
    sharing: makes the staging, which processes of one machine with the same key may share.
    Raises ValueError if the parameters are not those of the model.
    """

    def __init__(
        self,
        weights: TrainerWeights,
        engine: EngineParallel,
        parameters: Mapping[str, Tensor],
        sources: Sequence[VersionSource],
        *,
        rank: int,
        ranks: Sequence[int],
        deadline: float,
        sharing: Callable[[str, int, Fill], Shared],
    ) -> None:
        self.weights, self.rank, self.deadline = weights, rank, deadline
        live, shape = {name: t.data for name, t in parameters.items()}, weights.shape
        self._device = next(iter(live.values())).device
        self.engine = engine_storage(shape, engine, rank, live)
        self._tensors = engine_tensors(shape, self.engine, rank, live, weights.engine_dtype)
        here = sorted({rank, *ranks})
        wanted = {r: engine_layout(shape, self.engine, r) for r in here}
        ranges = union(s for layout in wanted.values() for segments in layout.values() for s in segments)
        self._reader = SliceReader(weights, ranges, sources)
        self.staging = self._reader.staging
        grouped = groupby(self.staging.blocks, lambda block: block.segment.name)
        blocks = {name: list(blocks) for name, blocks in grouped}
        self._taken = [_Taken.of(name, s, blocks[s.name]) for name, each in wanted[rank].items() for s in each]
        key = hashlib.blake2b(f"{weights.text()} {self.engine} {here}".encode(), digest_size=16).hexdigest()
        self._shared = sharing(key, self.staging.nbytes, self._reader.fill)
        self._held: tuple[int, Tensor, bytes] | None = None

    def pull(self, version: int) -> Pulled:
        """Read a version into the staging; waits until the version is published.

        Raises what `VersionSource` raises; then no version is staged. May overlap the engine's steps, but not `apply`.
        """
        begin, self._held = time.perf_counter(), None
        array, about, nbytes = self._shared.get(version, self.deadline)
        if self._device.type != "cpu":  # in a new thread the current device is the first one
            get_device().api.set_device(self._device)
        get_device().page_lock(array)
        self._held = version, torch.from_numpy(array), about
        return Pulled(version, time.perf_counter() - begin, nbytes)

    @torch.no_grad()
    def apply(self, parameters: Mapping[str, Tensor]) -> Applied:
        """Write the last pulled version into the engine's parameters, in place, between two steps of the engine.

        Raises ValueError if none was pulled, and WeightMismatch, naming the tensor, if the engine's weights then differ
        from the published ones.
        """
        if self._held is None:
            raise ValueError("apply: no version is staged, or the last pull failed; pull one first")
        begin, (version, memory, about) = time.perf_counter(), self._held
        live = {name: t.data for name, t in parameters.items()}
        for name, s, block, at in self._taken:
            values = block.values(memory).narrow(s.axis, at, s.size)
            s.view(live[name], s.start, s.size).copy_(values, non_blocking=True)
        get_device().synchronize_stream()
        if self.weights.verify:
            self._verify(live, memory)
        return Applied(version, time.perf_counter() - begin, about.decode() or None)

    def close(self) -> None:
        """Free the staging, and end a pull in another thread. Idempotent."""
        self._held = None
        self._shared.close()  # before the next line, so that processes that share the staging get no error from it
        self._reader.end()

    def _verify(self, live: Mapping[str, Tensor], memory: Tensor) -> None:
        for name, s, block, at in self._taken:
            tensor = self._tensors[s.name]
            expected = block.table(memory)[0 if tensor.wide else -1, at : at + s.size].sum()
            kind = torch.float32 if tensor.wide else self.weights.engine_dtype
            got = segment_digest(s.view(live[name], s.start, s.size), s, tensor, kind)
            if int(got) != int(expected):
                raise WeightMismatch(
                    f"{s.name} [{s.start}, {s.stop}) of axis {s.axis}: {name} of engine rank {self.rank} differs "
                    "from what the trainer published"
                )


def pull_tensors(
    weights: TrainerWeights,
    sources: Sequence[VersionSource],
    version: int | None = None,
    names: Sequence[str] | None = None,
    deadline: float = 600.0,
) -> tuple[int, dict[str, Tensor]]:
    """Returns the version, and its complete tensors by their Hugging Face names, in the published dtype, on the host.
    Waits until the version is published. version: None: the newest.

    Raises ValueError for names that the model does not have, WeightMismatch, and errors of `VersionSource`.
    """
    tensors = weights.tensors
    if unknown := [name for name in names or () if name not in tensors]:
        raise ValueError(
            f"the model has no tensors {unknown[:4]}; it has {len(tensors)}, such as {next(iter(tensors))}"
        )
    wanted = tensors if names is None else names
    reader = SliceReader(weights, [(name, 0, tensors[name].slices) for name in wanted], sources)
    end = time.monotonic() + deadline  # the planning above does not count
    if version is None:
        version, _ = sources[0].seek(None, deadline)
    memory = torch.empty(reader.staging.nbytes, dtype=torch.uint8)
    reader.fill(version, end - time.monotonic(), memory.numpy())
    out = {}
    for block in reader.staging.blocks:
        values, segment = block.values(memory), block.segment
        if weights.verify and not slice_digests(values, segment, tensors[segment.name], block.dtype).equal(
            block.table(memory)[0]
        ):
            raise WeightMismatch(f"{segment.name} of version {version}: the values read are not those published")
        out[segment.name] = values
    return version, out


def union(segments: Iterable[Segment]) -> list[tuple[str, int, int]]:
    """Ranges (name, start, stop) that have all slices of the segments, each slice once; sorted."""
    out: list[tuple[str, int, int]] = []
    for name, start, stop in sorted({(s.name, s.start, s.stop) for s in segments}):
        if out and out[-1][0] == name and start <= out[-1][2]:
            _, low, high = out.pop()
            start, stop = low, max(high, stop)
        out.append((name, start, stop))
    return out


def _chunks(
    pieces: Iterable[Piece], theirs: Sequence[PublishedBlock], mine: Sequence[PublishedBlock]
) -> Iterator[tuple[list[ByteSpan], list[ByteSpan]]]:
    """Spans to read and their targets, in portions: one for each read (READ_BYTES)."""
    spans: list[ByteSpan] = []
    into: list[ByteSpan] = []
    nbytes = 0
    for piece in pieces:
        spans += theirs[int(piece.source.param)].spans(piece.start, piece.size)
        into += mine[int(piece.destination.param)].spans(piece.start, piece.size)
        nbytes += piece.nbytes
        if nbytes >= READ_BYTES:
            yield spans, into
            spans, into, nbytes = [], [], 0
    if spans:
        yield spans, into
