"""Estimate: traffic and memory of a reshard in each mode, computed from layouts, and a run's host memory.

For devices it counts weights, gradients and optimizer state of the fullest device, without activations and KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np

from mindspeed_rl_plugin.adapters.targets import adapter_numels
from mindspeed_rl_plugin.config.run_flags import LoraConfig
from mindspeed_rl_plugin.launch.memory_fit import ADAM_BYTES
from mindspeed_rl_plugin.layout.family_table import LayerType, Split
from mindspeed_rl_plugin.layout.layout import (
    EngineParallel,
    ModelShape,
    Parallel,
    canonical_tensors,
    engine_layout,
    megatron_layout,
)
from mindspeed_rl_plugin.tools.plan.flow import Flow, FlowCells

FLOW_MODES = ("allgather", "stream")
TENSOR, EXPERT, COMMON = range(3)  # kinds of weights: TW, EW and CW of the paper's Eq. 3


@dataclass(frozen=True)
class PlannedRun:
    """The planned run. The defaults are for a plan by --model and --train, without a script."""

    shape: ModelShape
    train: Parallel
    itemsize: int = 2  # bytes of a weight of the trainer
    engine_itemsize: int = 2  # bytes of a weight in engines and in messages of the reshard
    grad_bytes: int = 4  # of one gradient
    reused: int = 0  # bytes of a parameter's optimizer state that are stored in its 2-byte weight
    distributed: bool = True  # whether optimizer state is spread over the data parallel ranks
    # number of pieces in which optimizer state is copied from the host for its update; None: it stays on the device
    pieces: int | None = None
    generate: str | None = None  # layout of an engine as text, such as tp2,ep8
    bucket_bytes: int = 256 << 20  # of --rl-reshard-bucket-mb
    critic: bool = False  # whether the trainer has a critic
    lora: LoraConfig = LoraConfig()  # adapters that are trained instead of the weights
    reference: bool | None = None  # whether the run has a reference; None: unknown
    dock_bytes: float = 0  # of a rollout's samples on all machines, at maximum length
    node: int = 8  # ranks per node
    near: float = 50e9  # bytes per second from rank to rank in a node
    far: float = 100e9  # bytes per second over a node's link to others, each way
    host: float = 25e9  # bytes per second between a device and its host, each way
    device_bytes: float = 64e9  # memory of a device
    notes: tuple[str, ...] = ()  # assumptions of the plan that differ from the script
    refused: tuple[str, ...] = ()  # arguments of the script that a run refuses, but the plan does not need


class TrainerBytes(NamedTuple):
    """Bytes of a model on one device of the trainer."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    parked: int = 0  # bytes of optimizer state that MindSpeed stores on the host
    # most bytes of merged weights (LoRA) that a transfer has at a time: the largest, and those of two buckets
    merged: int = 0

    @property
    def device(self) -> int:
        """Bytes on the device in the update."""
        return self.weights + self.gradients + self.optimizer

    @property
    def leaves(self) -> int:
        """Bytes that are copied to the host for the generation; gradients are freed, not copied."""
        return self.weights + (0 if self.parked else self.optimizer)


@dataclass(frozen=True)
class Estimate:
    """Results for a run. Bytes on a device are those of the fullest device."""

    run: PlannedRun
    weights: np.ndarray  # `[3]` bytes of the model on the trainer, by kind
    flows: dict[str, Flow]  # by mode
    policy: TrainerBytes  # of the trained model
    critic: TrainerBytes  # of the critic, 0 without one
    generate: int  # bytes of the engine's weights
    whole: int  # bytes of the complete model in messages of the reshard
    in_flight: int  # bytes of `stream` in addition to the weights of both sides (`Flow.in_flight`)
    shared: bool  # whether a device has both trainer and engine
    gdp: int  # GDP of Eq. 3, data parallel ranks of all engines
    gep: int  # GEP of Eq. 3, expert parallel ranks of an engine

    @property
    def update(self) -> int:
        return self.policy.device + self.critic.device

    @property
    def whole_training(self) -> Estimate:
        """The same run if it trained all weights."""
        policy, critic = _fullest(run := replace(self.run, lora=LoraConfig()))
        return replace(self, run=run, policy=policy, critic=critic)

    def peak(self, mode: str) -> int:
        """Peak bytes of the reshard on a device with an engine. A trainer there has only the policy's weights then."""
        trainer = (self.policy.weights + self.policy.merged) * self.shared
        return self.generate + trainer + {"allgather": self.whole}.get(mode, self.in_flight)

    @property
    def offloaded(self) -> int:
        """Bytes of training state that are copied to the host for the generation."""
        return self.policy.leaves + self.critic.leaves

    @property
    def parked(self) -> int:
        """Bytes of optimizer state that never leave the host."""
        return self.policy.parked + self.critic.parked

    @property
    def reference(self) -> int:
        """Most bytes of the reference on the host: those of the weights, or twice as many if the weights lie in the
        memory of complete main parameters (--reuse-fp32-param, and optimizer state that is not spread over ranks)."""
        train = self.run.train
        alone = train.dp * train.cp == 1 or (self.run.shape.experts and train.edp == 1)
        return self.policy.weights * (2 if self.run.reused and (alone or not self.run.distributed) else 1)

    @property
    def redundant(self) -> float:
        """R of the paper's Eq. 3: redundant bytes on all devices of the generation together."""
        return float(self.gdp * (self.weights[TENSOR] / self.run.train.tp + self.weights[EXPERT] / self.gep))

    def seconds(self, mode: str) -> tuple[float, float]:
        """Seconds of the busiest rank inside its node, and of the busiest link between nodes. Both transfers run at the
        same time, so the reshard takes as long as the longer one."""
        flow = self.flows[mode]
        near = max((flow.received - flow.received_far).max(), (flow.sent - flow.sent_far).max())
        return float(near) / self.run.near, float(max(flow.node_in.max(), flow.node_out.max())) / self.run.far


def estimate(run: PlannedRun, engine: EngineParallel, engines: int, first: int = 0) -> Estimate:
    """Figures of all modes. The engines are on ranks [first, first + engines x engine.ranks). In `allgather` every
    engine rank receives all weights that it does not have as a trainer, in `stream` only those that it needs and does
    not have. Raises ValueError if sizes do not divide."""
    shape, train, itemsize = run.shape, run.train, run.engine_itemsize
    ranks = range(first, first + engines * engine.ranks)
    sources = {r: megatron_layout(shape, train, r) for r in range(train.world)}
    destinations = {r: engine_layout(shape, engine, (r - first) % engine.ranks) for r in ranks}
    cells = FlowCells(sources, destinations, canonical_tensors(shape), itemsize=itemsize, node_size=run.node)
    flows = {mode: cells.flow(everything=mode == "allgather") for mode in FLOW_MODES}
    return Estimate(
        run,
        weights_by_layer(shape, run.itemsize).sum(0),
        flows,
        *_fullest(run),
        generate=max(sum(map(prod, wanted.shapes.values())) for wanted in destinations.values()) * itemsize,
        whole=int(weights_by_layer(shape, itemsize).sum()),
        in_flight=flows["stream"].in_flight(list(ranks), run.bucket_bytes),
        shared=first < train.world,
        gdp=len(ranks) // engine.tp,
        gep=engine.ep,
    )


def weights_by_layer(shape: ModelShape, itemsize: int) -> np.ndarray:
    """`[layers + 2, 3]` bytes of each layer by kind of weight (TENSOR, EXPERT, COMMON). Row 0 has the parameters before
    the layers, the last row those after them."""
    tensors, out, seen = canonical_tensors(shape), np.zeros((shape.layers + 2, 3), np.int64), set()
    layers = map(shape.layer_rows, range(shape.layers))
    for place, rows in enumerate((shape.rows(LayerType.EMBEDDING), *layers, shape.rows(LayerType.OUTPUT))):
        for row in rows:
            whole = row.split is Split.REPLICATED
            kind = EXPERT if row.layer_type is LayerType.EXPERT else COMMON if whole else TENSOR
            for name in set(shape.names_of(row, place - 1)) - seen:
                seen.add(name)  # a tied head is not counted again
                nbytes = tensors[name].slices * tensors[name].slice_bytes(itemsize)
                out[place, kind] += nbytes * (shape.experts if kind == EXPERT else 1)
    return out


def _fullest(run: PlannedRun) -> tuple[TrainerBytes, TrainerBytes]:
    """Policy and critic on the trainer's fullest device. Instead of an output layer, a critic has one row on every rank
    of the last pipeline stage."""
    train = run.train
    spread, expert_spread = (train.dp * train.cp, train.edp) if run.distributed else (1, 1)
    state_bytes = ADAM_BYTES[run.itemsize] - (run.reused if run.itemsize == 2 else 0)

    def held(weights: int, trained: int, experts: int, merged: Sequence[int] = ()) -> TrainerBytes:
        state = state_bytes * (-(-(trained - experts) // spread) + -(-experts // expert_spread))
        parked, state = (state, -(-state // run.pieces)) if run.pieces else (0, state)
        most = min(sum(merged) * run.itemsize, max(merged, default=0) * run.itemsize + 2 * run.bucket_bytes)
        return TrainerBytes(weights * run.itemsize, trained * run.grad_bytes, state, parked, most)

    devices = []
    layouts = ((rank, megatron_layout(run.shape, train, rank)) for rank in range(train.world))
    for rank, shapes in {id(layout): (rank, layout.shapes) for rank, layout in layouts}.values():  # each layout once
        numel = sum(map(prod, shapes.values()))
        experts = sum(prod(s) for name, s in shapes.items() if ".mlp.experts." in name)
        head = prod(shapes.get("output_layer.weight", (0,)))
        value_head = run.shape.hidden if "decoder.final_layernorm.weight" in shapes else 0
        adapters, values = adapter_numels(run.shape, train, rank, run.lora), numel - head + value_head
        policy = held(numel + adapters[0], *adapters) if run.lora.lora_rank else held(numel, numel, experts)
        devices.append((policy, held(values, values, experts) if run.critic else TrainerBytes()))
    return max(devices, key=lambda pair: pair[0].device + pair[1].device)
