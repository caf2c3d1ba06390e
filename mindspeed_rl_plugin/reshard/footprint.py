"""Footprint: bytes of weights, gradients and optimizer on every device in each phase, by mode of resharding. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod

from mindspeed_rl_plugin.reshard.family_table import Split, Stage
from mindspeed_rl_plugin.reshard.layout import (
    EngineParallel,
    ModelShape,
    Parallel,
    canonical_tensors,
    engine_shapes,
    megatron_shapes,
)

MODES = ("naive", "allgather", "stream")
# Of each parameter, by the bytes of a weight: two float32 moments of Adam, and a float32 main parameter where the
# weight itself is none.
STATE_BYTES = {2: 12, 4: 8}
_COMMON = (Split.REPLICATED, Split.DOWN)


@dataclass(frozen=True)
class Weights:
    """Bytes of a model: tensor parallel weights TW, expert weights EW, common weights CW of the paper's Eq. 3."""

    tensor: int
    expert: int
    common: int

    @property
    def total(self) -> int:
        return self.tensor + self.expert + self.common


@dataclass(frozen=True)
class Footprint:
    """Bytes on the fullest device. train, gradients, optimizer: of the trainer; generate: the engine's weights; whole:
    the model; shared: whether a device has both trainer and engine; critic, critic_state: a critic's weights, and its
    gradients and optimizer state, 0 without one. All of it has left before a reshard but for the weights in `naive`.
    rounds, in_flight: what `naive` and `stream` take besides the weights of both sides (`shards.two_rounds`,
    `Flow.in_flight`)."""

    train: int
    gradients: int
    optimizer: int
    generate: int
    whole: int
    bucket_bytes: int
    shared: bool = True
    critic: int = 0
    critic_state: int = 0
    rounds: int = 0
    in_flight: int = 0

    def update(self) -> int:
        """Bytes in the update."""
        return self.train + self.gradients + self.optimizer + self.critic + self.critic_state

    def peak(self, mode: str) -> int:
        """Most bytes on a device with an engine during the reshard, gradients and optimizer state having left it.

        naive: two rounds of shards on their way into the engine's weights; allgather: the paper's four steps, whose
        temporary buffer has the whole model; stream: what of two buckets is in flight beside both shards.
        """
        kept = self.train if self.shared else 0
        critic = self.critic if self.shared else 0
        more = {"naive": critic + self.rounds, "allgather": self.whole, "stream": self.in_flight}
        return kept + self.generate + more[mode]

    def resident(self, mode: str) -> int:
        """Bytes on a device with an engine during generation: `naive` keeps the training weights."""
        return self.generate + (self.train + self.critic if mode == "naive" and self.shared else 0)


def weights(shape: ModelShape, itemsize: int) -> Weights:
    """Sizes of the canonical model by kind of weight."""
    parts = weights_by_layer(shape, itemsize).values()
    return Weights(*(sum(getattr(part, f.name) for part in parts) for f in fields(Weights)))


def weights_by_layer(shape: ModelShape, itemsize: int) -> dict[int, Weights]:
    """The same of each layer by its global number; -1 is what precedes the layers, `shape.layers` what follows."""
    tensors, seen = canonical_tensors(shape), set()
    out = {layer: dict(tensor=0, expert=0, common=0) for layer in range(-1, shape.layers + 1)}
    for stage in Stage:
        for row in shape.rows(stage):
            kind = "expert" if stage is Stage.EXPERT else "common" if row.split in _COMMON else "tensor"
            for layer in _layers(shape, stage):
                place = {Stage.FIRST: -1, Stage.LAST: shape.layers}.get(stage, layer)
                for name in shape.names_of(row, layer):
                    if name not in seen:
                        seen.add(name)
                        t = tensors[name]
                        count = shape.experts if stage is Stage.EXPERT else 1
                        out[place][kind] += count * t.slices * t.slice_bytes(itemsize)
    return {layer: Weights(**sizes) for layer, sizes in out.items()}


def _layers(shape: ModelShape, stage: Stage) -> Sequence[int]:
    if stage in (Stage.FIRST, Stage.LAST):
        return range(1)
    return [layer for layer in range(shape.layers) if any(row.stage is stage for row in shape.layer_rows(layer))]


def eq3(size: Weights, *, gdp: int, utp: int, gep: int) -> float:
    """Redundant bytes R of the paper's Eq. 3, all devices of the generation together."""
    return gdp * (size.tensor / utp + size.expert / gep)


def footprint(
    shape: ModelShape,
    train: Parallel,
    engine: EngineParallel,
    *,
    itemsize: int,
    engine_itemsize: int | None = None,
    grad_bytes: int,
    distributed: bool,
    bucket_bytes: int,
    shared: bool = True,
    critic: bool = False,
    rounds: int = 0,
    in_flight: int = 0,
) -> Footprint:
    """What the fullest trainer device and the fullest engine device hold.

    itemsize: bytes of the trainer's weights, 2 or 4; engine_itemsize: of the engine's (None: the same), which those
    in an allgather's buffer have too; grad_bytes: of a gradient; distributed: whether the optimizer's state is spread
    over the data parallel ranks; critic: count a critic beside the policy; rounds, in_flight: as `Footprint` has them.
    Activations and the KV cache are not counted.
    """
    spread = (train.dp * train.cp, train.edp) if distributed else (1, 1)

    def held(numel: int, experts: int) -> tuple[int, int, int]:
        state = STATE_BYTES[itemsize] * (-(-(numel - experts) // spread[0]) + -(-experts // spread[1]))
        return numel * itemsize, numel * grad_bytes, state

    fullest, beside = (0, 0, 0), (0, 0, 0)
    for numel, experts, of_critic in _shards(shape, train):
        both = held(numel, experts), held(of_critic, experts) if critic else (0, 0, 0)
        fullest, beside = max((fullest, beside), both, key=lambda pair: sum(map(sum, pair)))
    own = {r: sum(prod(s) for s in engine_shapes(shape, engine, r).values()) for r in range(engine.ranks)}
    moved = engine_itemsize or itemsize
    generate, whole = max(own.values()) * moved, weights(shape, moved).total
    of_critic = beside[0], beside[1] + beside[2]
    return Footprint(*fullest, generate, whole, bucket_bytes, shared, *of_critic, rounds, in_flight)


def _shards(shape: ModelShape, train: Parallel) -> set[tuple[int, int, int]]:
    """(elements, those of experts, those of a critic) of every trainer rank that differs. Where the policy has its
    output layer, or shares it with the embedding, a critic has one row of it, whole on every rank."""
    out, seen = set(), set()
    for rank in range(train.world):
        shapes = megatron_shapes(shape, train, rank)
        if id(shapes) not in seen:
            seen.add(id(shapes))
            experts = sum(prod(s) for name, s in shapes.items() if ".mlp.experts." in name)
            numel = sum(prod(s) for s in shapes.values())
            of_head = prod(shapes.get("output_layer.weight", (0,)))
            value_head = shape.hidden if "decoder.final_layernorm.weight" in shapes else 0
            out.add((numel, experts, numel - of_head + value_head))
    return out
