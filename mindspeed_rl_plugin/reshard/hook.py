"""Resharder: the way of the weights from the live trainer into the live engine, in one object.

Engine replica e lives on world ranks [e x g, (e + 1) x g) where an engine has g ranks (`EngineParallel.ranks`); the
rank within it is `rank % g`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.reshard.digest import Held, compare, weights_digest
from mindspeed_rl_plugin.reshard.execute import layout_digests, share_ints, stream
from mindspeed_rl_plugin.reshard.families import HEAD
from mindspeed_rl_plugin.reshard.layout import (
    EngineParallel,
    Layout,
    ModelShape,
    Parallel,
    canonical_tensors,
    engine_layout,
    megatron_layout,
)
from mindspeed_rl_plugin.reshard.live import (
    SHOWN,
    differences,
    engine_storage,
    raise_if,
    stored_parameters,
    trainer_storage,
    wide_names,
)
from mindspeed_rl_plugin.reshard.plan import Plan, make_plan

__all__ = ["Resharder", "Transfer", "differences", "stored_parameters"]


@dataclass(frozen=True)
class Transfer:
    """What one reshard did on this rank. Bytes; seconds; digest of the weights where they were verified."""

    version: int
    copied: int
    sent: int
    received: int
    seconds: float
    digest: str | None


class Resharder:
    """Builds both layouts and the plan once, checks them against the live models, and moves weights.

    shape, train: the model and its training layout; generate: sizes of the engine, or its tensor parallel size;
    engine_dtype: dtype of its weights, in which they travel; node_size: consecutive ranks on one node;
    verify: compare digests of both sides after each transfer; deadline: seconds one bucket may take.
    Every method is collective over `group` (None: the world). Raises ValueError when the layouts
    cannot be built.
    """

    def __init__(
        self,
        shape: ModelShape,
        train: Parallel,
        generate: int | EngineParallel,
        *,
        rank: int,
        engine_dtype: torch.dtype,
        bucket_bytes: int = 256 << 20,
        node_size: int | None = None,
        group: dist.ProcessGroup | None = None,
        verify: bool = False,
        deadline: float = 600.0,
    ) -> None:
        engine = EngineParallel(generate) if isinstance(generate, int) else generate
        if train.world % engine.ranks:
            flag = f"--rl-generate-tp {engine.tp}" if engine.ranks == engine.tp else f"--rl-generate-ep {engine.ep}"
            raise ValueError(f"{flag} does not divide the world of {train.world} ranks; choose a divisor")
        self.shape, self.train, self.engine, self.rank = shape, train, engine, rank
        self.dtype, self.bucket_bytes, self.node_size = engine_dtype, bucket_bytes, node_size
        self.group, self.verify, self.deadline = group, verify, deadline
        self.device = get_device().current()
        self.tensors = canonical_tensors(shape)
        self.plan: Plan | None = None
        self._sources: dict[int, Layout] = {}
        self._destinations: dict[int, Layout] = {}
        for r in range(engine.ranks):
            engine_layout(shape, engine, r)

    def to_engine(
        self, model_chunks: Sequence[Module], engine_parameters: Mapping[str, Tensor], version: int
    ) -> Transfer:
        """Write the trainer's weights into the engine's parameters, in place.

        model_chunks: Megatron's, complete (`swap.gathered`) and on the device; engine_parameters: name ->
        live tensor of this rank's engine. Raises ValueError where names, shapes or dtypes are not what
        the layouts say, WeightMismatch when verification fails, TimeoutError past the deadline.
        """
        begin = time.perf_counter()
        source = stored_parameters(model_chunks)
        destination = {name: tensor.data for name, tensor in engine_parameters.items()}
        plan = self._bind(source, destination)
        stream(
            plan,
            source,
            destination,
            rank=self.rank,
            dtype=self.dtype,
            device=self.device,
            group=self.group,
            deadline=self.deadline,
        )
        digest = weights_digest(self._verify(source, destination)) if self.verify else None
        get_device().synchronize()
        traffic, seconds = plan.traffic[self.rank], time.perf_counter() - begin
        return Transfer(version, traffic.copied, traffic.sent, traffic.received, seconds, digest)

    def digest(self, model_chunks: Sequence[Module]) -> str:
        """Digest of the trainer's weights in the engine's dtype; equal for equal weights in any layout."""
        source = stored_parameters(model_chunks)
        self._bind_source(source)
        return weights_digest(compare(self._held(source, self._sources), [], self.tensors))

    def _bind(self, source: Mapping[str, Tensor], destination: Mapping[str, Tensor]) -> Plan:
        self._bind_source(source)
        own_head = HEAD in destination if self.shape.tied else None
        size, here = self.engine.ranks, self.rank % self.engine.ranks
        engine = engine_storage(self.shape, self.engine, here, own_head, destination)
        wide = wide_names(engine_layout(self.shape, engine, here, own_head), self.tensors)
        wanted = {name: torch.float32 if name in wide else self.dtype for name in destination}
        problems = [f"{n} is {t.dtype}, not {wanted[n]}" for n, t in destination.items() if t.dtype != wanted[n]]
        raise_if(problems, f"the engine's parameters on rank {self.rank} are not those of {self.shape}")
        if self.plan is None:
            world = range(self.train.world)
            self._destinations = {w: engine_layout(self.shape, engine, w % size, own_head) for w in world}
            plan = make_plan(
                self._sources,
                self._destinations,
                self.tensors,
                itemsize=self.dtype.itemsize,
                bucket_bytes=self.bucket_bytes,
                rank=self.rank,
                node_size=self.node_size,
            )
            assert not plan.unused, f"the engine has no place for {plan.unused[:SHOWN]}"
            self._agree(plan.fingerprint)
            self.plan = plan
        return self.plan

    def _bind_source(self, source: Mapping[str, Tensor]) -> None:
        impl, experts = trainer_storage(self.shape, self.train, self.rank, source)
        if not self._sources:
            world = range(self.train.world)
            self._sources = {w: megatron_layout(self.shape, self.train, w, impl, experts) for w in world}

    def _agree(self, fingerprint: int) -> None:
        """All ranks compare their plans; on nccl and hccl this also opens the communicator for all of them."""
        if self.train.world == 1:
            return
        prints = [row[0] for row in share_ints([fingerprint], 1, self.device, self.group)]
        if len(set(prints)) > 1:
            raise RuntimeError(f"ranks planned differently, by fingerprint: {dict(enumerate(prints))}")

    def _verify(self, source: Mapping[str, Tensor], destination: Mapping[str, Tensor]) -> dict[str, int]:
        ours, theirs = self._held(source, self._sources), self._held(destination, self._destinations)
        return compare(ours, theirs, self.tensors)

    def _held(self, params: Mapping[str, Tensor], layouts: Mapping[int, Layout]) -> list[Held]:
        mine = layout_digests(params, layouts[self.rank], self.tensors, self.dtype)
        counts = {r: sum(len(segments) for segments in layout.values()) for r, layout in layouts.items()}
        rows = [mine] if len(layouts) == 1 else share_ints(mine, max(counts.values()), self.device, self.group)
        return [Held(r, layouts[r], rows[i][: counts[r]]) for i, r in enumerate(sorted(layouts))]
