"""Resharder: moves the weights from the live trainer into the live engine, in one of MODES.

If an engine has g ranks (`EngineParallel.ranks`), world ranks [e x g, (e + 1) x g) are engine e, and `rank % g` is a
rank's number in its engine.
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
from mindspeed_rl_plugin.layout.layout import (
    EngineParallel,
    Layout,
    ModelShape,
    Parallel,
    RankLayout,
    canonical_tensors,
    engine_layout,
    megatron_layout,
)
from mindspeed_rl_plugin.layout.transfer_plan import TransferPlan, make_plan
from mindspeed_rl_plugin.weights.allgather import AllgatherPlan, allgather, make_allgather_plan
from mindspeed_rl_plugin.weights.live import (
    LISTED_DIFFERENCES,
    StoredParameters,
    engine_storage,
    engine_tensors,
    stored_parameters,
    trainer_storage,
)
from mindspeed_rl_plugin.weights.p2p import P2PChannel
from mindspeed_rl_plugin.weights.transfer import stream
from mindspeed_rl_plugin.weights.verify import (
    RankDigests,
    WeightMismatch,
    compare,
    first_broken,
    layout_digests,
    refuse_broken,
    tensors_in,
    weights_digest,
)

# By mode: functions that make and carry out the plan.
MODES = {"stream": (make_plan, stream), "allgather": (make_allgather_plan, allgather)}


@dataclass(frozen=True)
class Transfer:
    """Bytes and seconds of one reshard on this rank."""

    copied: int  # bytes that the rank copied instead of receiving them, by the plan
    sent: int  # bytes of messages that it sent
    received: int  # bytes of messages that it received
    temporary: int  # measured peak of memory, in bytes, in addition to the weights of trainer and engine
    seconds: float
    digest: str | None  # of the weights; None: not verified


class Resharder:
    """Builds both layouts and the plan once, checks them against the live models, and moves weights.

    shape, train: the model and its training layout.
    engine: sizes of the engine.
    engine_dtype: dtype of its weights and of messages.
    mode: one of MODES.
    node_size: number of consecutive ranks on one node.
    verify: compare digests of trainer and engine after each transfer.
    deadline: seconds to wait for each message.
    `to_engine` and `refuse_broken` are collective over `group` (None: the world), and raise ValueError if the layouts
    cannot be built.
    """

    def __init__(
        self,
        shape: ModelShape,
        train: Parallel,
        engine: EngineParallel,
        *,
        rank: int,
        engine_dtype: torch.dtype,
        mode: str = "stream",
        bucket_bytes: int = 256 << 20,
        node_size: int | None = None,
        group: dist.ProcessGroup | None = None,
        verify: bool = False,
        deadline: float = 600.0,
    ) -> None:
        assert train.world % engine.ranks == 0, f"{engine.ranks} of {train.world} ranks"
        self.shape, self.train, self.engine, self.rank = shape, train, engine, rank
        self.dtype, self.bucket_bytes, self.node_size = engine_dtype, bucket_bytes, node_size
        self.group, self.verify, self.deadline = group, verify, deadline
        self.device = get_device().current()
        self._make_plan, self._carry_out = MODES[mode]
        self.plan: TransferPlan | AllgatherPlan | None = None
        self._exported: list[int] = []
        self._compared = canonical_tensors(shape)  # for digests; `_bind` replaces it by `engine_tensors`
        self._temporary = get_device().temporary()
        self._sources: dict[int, RankLayout] = {}
        self._destinations: dict[int, RankLayout] = {}

    def to_engine(
        self, model_chunks: Sequence[Module], engine_parameters: Mapping[str, Tensor], version: int
    ) -> Transfer:
        """Write the trainer's weights into the engine's parameters, in place.

        model_chunks: Megatron's, up to date (`offload.gathered`) and on the device; engine_parameters: name -> live
        tensor of this rank's engine. Raises ValueError if names, shapes or dtypes differ from the layouts,
        BrokenWeights if a weight is not finite, WeightMismatch if verification fails, TimeoutError after the deadline,
        ConnectionError if a rank is lost.
        """
        begin = time.perf_counter()
        source = self._stored(model_chunks)
        destination = {name: tensor.data for name, tensor in engine_parameters.items()}
        plan = self._bind(destination)
        self._refuse_broken(source, f"after {version} updates")
        exported = self._held(source, self._sources) if self.verify else None
        self._exported = self._as_stored(source) if self.verify else []
        channel = self._channel()
        with self._temporary.measured(*source.plain.values(), *destination.values()):
            self._carry_out(plan, source, destination, channel=channel, dtype=self.dtype, device=self.device)
        digest = None
        if exported is not None:
            arrived = self._held(destination, self._destinations)
            digest = weights_digest(compare(exported, arrived, canonical_tensors(self.shape)))
        get_device().synchronize_stream()
        copied, seconds = plan.copied(self.rank), time.perf_counter() - begin
        return Transfer(copied, channel.sent, channel.received, self._temporary.peak, seconds, digest)

    def check_return(self, model_chunks: Sequence[Module]) -> None:
        """After generation: check by digests, in the trainer's dtype, that this rank still has the weights that it
        exported. Also checks weights that were not offloaded. Not collective; does nothing unless `verify`. Raises
        WeightMismatch naming parameter, rank and tensors."""
        if not self._exported:
            return
        now = self._as_stored(stored_parameters(model_chunks))
        stored = [name for name, segments in self._sources[self.rank].items() for _ in segments]
        for name, before, after in zip(stored, self._exported, now, strict=True):
            if before != after:
                raise WeightMismatch(
                    f"{name} of trainer rank {self.rank} ({tensors_in(self._sources[self.rank], name)}) has other "
                    "values after generation than before it; resume from the last checkpoint"
                )

    def refuse_broken(self, model_chunks: Sequence[Module]) -> None:
        """Before a checkpoint: raises BrokenWeights on every rank if weights of any rank hold NaN or infinity."""
        self._refuse_broken(self._stored(model_chunks), "before a checkpoint")

    def _stored(self, model_chunks: Sequence[Module]) -> StoredParameters:
        """The trainer's weights on this rank; raises if they differ from its layout."""
        source = stored_parameters(model_chunks)
        kinds = trainer_storage(self.shape, self.train, self.rank, source)
        if not self._sources:
            world = range(self.train.world)
            self._sources = {w: megatron_layout(self.shape, self.train, w, *kinds) for w in world}
        return source

    def _bind(self, destination: Mapping[str, Tensor]) -> TransferPlan | AllgatherPlan:
        """The plan; raises if the engine differs from its layout."""
        size, here = self.engine.ranks, self.rank % self.engine.ranks
        engine = engine_storage(self.shape, self.engine, here, destination)
        tensors = engine_tensors(self.shape, engine, here, destination, self.dtype)
        if self.plan is None:
            self._compared = tensors
            self._destinations = {w: engine_layout(self.shape, engine, w % size) for w in range(self.train.world)}
            self.plan = self._make_plan(
                self._sources,
                self._destinations,
                canonical_tensors(self.shape),
                itemsize=self.dtype.itemsize,
                bucket_bytes=self.bucket_bytes,
                rank=self.rank,
                node_size=self.node_size,
            )
            assert not self.plan.unused, f"the engine does not store {self.plan.unused[:LISTED_DIFFERENCES]}"
            # With nccl and hccl, this collective also opens the communicator of all ranks.
            mine = self.plan.fingerprint, sum(tensor.wide for tensor in tensors.values())
            prints = self._share(mine, 2, "the comparison of plans")
            if any(row != prints[0] for row in prints):
                raise RuntimeError(f"ranks made different plans; fingerprints by rank: {dict(enumerate(prints))}")
        return self.plan

    def _refuse_broken(self, source: Mapping[str, Tensor], when: str) -> None:
        first = first_broken(source[name] for name in self._sources[self.rank])
        firsts = self._share([first], 1, "the check of the weights")
        refuse_broken([broken for (broken,) in firsts], self._sources, when)

    def _as_stored(self, source: Mapping[str, Tensor]) -> list[int]:
        """Digests of this rank's weights in the trainer's dtype."""
        return layout_digests(source, self._sources[self.rank], self._compared, None)

    def _channel(self) -> P2PChannel:
        return P2PChannel(self.rank, group=self.group, deadline=self.deadline)

    def _share(self, mine: Sequence[int], length: int, what: str) -> list[list[int]]:
        return [[*mine]] if self.train.world == 1 else self._channel().share(what, mine, length, self.device)

    def _held(self, params: Mapping[str, Tensor], layouts: Mapping[int, Layout]) -> list[RankDigests]:
        mine = layout_digests(params, layouts[self.rank], self._compared, self.dtype)
        counts = {r: sum(len(segments) for segments in layout.values()) for r, layout in layouts.items()}
        rows = self._share(mine, max(counts.values()), "digests")
        return [RankDigests(r, layouts[r], rows[i][: counts[r]]) for i, r in enumerate(sorted(layouts))]
