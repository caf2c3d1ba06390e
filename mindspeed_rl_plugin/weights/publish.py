"""The trainer's side of weights for engines on other ranks: a copy on the host, under a version.

Training stands still only while a rank copies its share. Who reads it, and when, is no concern of the trainer: a
version goes when its memory is needed for a newer one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.weights.live import stored_parameters, trainer_storage
from mindspeed_rl_plugin.weights.offload import gathered
from mindspeed_rl_plugin.weights.published_memory import PublishedMemory
from mindspeed_rl_plugin.weights.shares import Gather, TrainerWeights
from mindspeed_rl_plugin.weights.verify import first_broken, refuse_broken, slice_digests


@dataclass(frozen=True)
class Published:
    """What one `publish` did on this rank."""

    version: int
    seconds: float  # for which training stood still
    nbytes: int  # of the rank's share


class Publisher:
    """Publishes this rank's share of the weights.

    weights: of the trainer; offer: (bytes, versions) -> memory for so many versions of so many bytes;
    versions: 2 at least, or there would be none to read while the next one is written; gather: of all trainer ranks.
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

        Raises ValueError where the model is not what was described, and BrokenWeights, on all ranks, where a weight is
        not finite; nothing is published then.
        """
        begin = time.perf_counter()
        with gathered(model_chunks):
            source = stored_parameters(model_chunks)
            self._check(source, f"after {version} updates")
            memory = self._memory(version)
            self._copy(source, memory)
            get_device().synchronize_stream()
        self._store.commit(version, self._about(memory))
        return Published(version, time.perf_counter() - begin, self.share.nbytes)

    def refuse_broken(self, model_chunks: Sequence[Module]) -> None:
        """Raises as `publish` does. Collective, before a checkpoint: its weights may never be published, which happens
        only at the end of a rollout."""
        with gathered(model_chunks):
            self._check(stored_parameters(model_chunks), "before a checkpoint")

    def _check(self, source: dict[str, Tensor], when: str) -> None:
        """Raises on all ranks alike: one that stopped alone would leave the others waiting."""
        changed, broken, layouts = self._changed(source), 0, self.weights.layouts
        if not changed:
            broken = first_broken(source[name] for name in layouts[self.rank])
        found = self._gather((changed, broken))
        if first := next((text for text, _ in found if text), ""):
            raise ValueError(first)
        refuse_broken([broken for _, broken in found], layouts, when)

    def _changed(self, source: dict[str, Tensor]) -> str:
        """How this rank's model differs from what was described."""
        try:
            kinds = trainer_storage(self.weights.shape, self.weights.parallel, self.rank, source)
        except ValueError as error:
            return str(error)
        described = self.weights.kinds[self.rank]
        return (
            ""
            if kinds == described
            else f"rank {self.rank} stores the model as {kinds}, and was described as {described}"
        )

    def _memory(self, version: int) -> Tensor:
        memory = self._store.begin(version)
        get_device().page_lock(memory)
        return torch.from_numpy(memory)

    def _copy(self, source: dict[str, Tensor], memory: Tensor) -> None:
        for block, parts in zip(self.share.blocks, self.share.parts, strict=True):
            values, axis = block.values(memory), block.segment.axis
            for (param, segment), start, stop in parts:
                live, at = segment.view(source[param], start, stop - start), start - block.segment.start
                place = values.narrow(axis, at, stop - start)
                # torch_npu 2.7.1 copies through host memory where it converts or leaves gaps, and does not wait for it.
                place.copy_(live, non_blocking=place.is_contiguous() and place.dtype == live.dtype)
                if self.weights.verify:
                    kinds = (torch.float32, self.weights.engine_dtype)[-block.tables :]
                    here = segment._replace(start=start, size=stop - start)
                    for row, kind in zip(block.table(memory), kinds, strict=True):
                        digests = slice_digests(live, here, self.weights.tensors[segment.name], kind)
                        row[at : at + stop - start].copy_(digests)

    def _about(self, memory: Tensor) -> bytes:
        """Digest of each block, int64; empty where weights are not verified."""
        if not self.weights.verify:
            return b""
        return np.array([int(block.table(memory)[0].sum()) for block in self.share.blocks], np.int64).tobytes()
