"""Estimate: what a reshard moves and holds in each mode, from layouts alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindspeed_rl_plugin.reshard.flow import Cells, Flow
from mindspeed_rl_plugin.reshard.footprint import MODES, Footprint, Weights, eq3, footprint, weights
from mindspeed_rl_plugin.reshard.layout import (
    EngineParallel,
    ModelShape,
    Parallel,
    canonical_tensors,
    engine_layout,
    megatron_layout,
    megatron_shapes,
)
from mindspeed_rl_plugin.reshard.shards import make_rounds, make_shards, two_rounds
from mindspeed_rl_plugin.tools.plan import published


@dataclass(frozen=True)
class Machine:
    """A cluster. node_size: ranks a node; near, far, host: bytes a second from rank to rank in a node, over a node's
    link to others each way, and between a device and its host each way; device_bytes: memory of a device."""

    node_size: int
    near: float
    far: float
    host: float
    device_bytes: int


@dataclass(frozen=True)
class Cost:
    """A mode's bytes and seconds. near_seconds: of the busiest rank inside its node; far_seconds: of the busiest link
    between nodes; both pass at once, so that the transfer takes the longer."""

    flow: Flow
    near_seconds: float
    far_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.near_seconds, self.far_seconds)


@dataclass(frozen=True)
class Estimate:
    """What `estimate` found. out_seconds: training weights to the host, and as long back; gdp, utp, gep: of Eq. 3;
    published: bytes `[ranks]` that MindSpeed-RL's own path receives, or why it refuses the pair."""

    weights: Weights
    footprint: Footprint
    costs: dict[str, Cost]
    out_seconds: float
    gdp: int
    utp: int
    gep: int
    published: np.ndarray | str

    @property
    def redundant(self) -> float:
        """R of the paper's Eq. 3, bytes."""
        return eq3(self.weights, gdp=self.gdp, utp=self.utp, gep=self.gep)


def estimate(
    shape: ModelShape,
    train: Parallel,
    engine: EngineParallel,
    engines: int,
    machine: Machine,
    *,
    first: int = 0,
    itemsize: int = 2,
    engine_itemsize: int | None = None,
    grad_bytes: int = 4,
    distributed: bool = True,
    bucket_bytes: int = 256 << 20,
    critic: bool = False,
    experts: str = "sequential",
) -> Estimate:
    """Figures of all modes. The engines live on ranks [first, first + engines x engine.ranks). critic: the trainer has
    one beside the policy; itemsize, engine_itemsize: bytes of a weight in the trainer, and in the engine (None: the
    same), as which it travels; experts: how the trainer stores them (`rows.EXPERTS`).

    In `naive` and `allgather` every engine rank receives the whole model but what it holds; in `stream` only what it
    lacks. Raises ValueError where sizes do not divide.
    """
    sources = {r: megatron_layout(shape, train, r, experts=experts) for r in range(train.world)}
    stored = {r: megatron_shapes(shape, train, r, experts=experts) for r in sources}
    ranks = engines * engine.ranks
    destinations = {first + i: engine_layout(shape, engine, i % engine.ranks) for i in range(ranks)}
    tensors, moved = canonical_tensors(shape), engine_itemsize or itemsize
    cells = Cells(sources, destinations, tensors, itemsize=moved, node_size=machine.node_size)
    stream, whole = _cost(cells.flow(), machine), _cost(cells.flow(everything=True), machine)
    shards = make_shards(sources, stored, tensors, moved)
    rounds = make_rounds(shards, bucket_bytes // 2)
    held = footprint(
        shape,
        train,
        engine,
        itemsize=itemsize,
        engine_itemsize=moved,
        grad_bytes=grad_bytes,
        distributed=distributed,
        bucket_bytes=bucket_bytes,
        shared=first < train.world,
        critic=critic,
        rounds=two_rounds(shards, rounds, sources, destinations, moved != itemsize),
        in_flight=stream.flow.in_flight(list(destinations), bucket_bytes),
    )
    return Estimate(
        weights(shape, itemsize),
        held,
        dict(zip(MODES, (whole, whole, stream), strict=True)),
        held.train / machine.host,
        ranks // engine.tp,
        train.tp,
        engine.ep,
        _published(shape, train, engine, range(first, first + ranks), moved),
    )


def _published(
    shape: ModelShape, train: Parallel, engine: EngineParallel, ranks: range, itemsize: int
) -> np.ndarray | str:
    try:
        return published.received(shape, train, engine, ranks, itemsize)
    except ValueError as error:
        return str(error)


def _cost(flow: Flow, machine: Machine) -> Cost:
    near = max((flow.received - flow.received_far).max(), (flow.sent - flow.sent_far).max())
    far = max(flow.node_in.max(), flow.node_out.max())
    return Cost(flow, float(near) / machine.near, float(far) / machine.far)
