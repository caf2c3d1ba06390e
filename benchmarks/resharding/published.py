"""Bytes that MindSpeed-RL's own path moves for the same pair of layouts, for comparison.

Source: MegatronStyleVllmWeightContainer of MindSpeed-RL (mindspeed_rl/workers/resharding/vllm_weight_container.py at
commit 05a90d7): each rank, for the layers of its pipeline stage,

1. gathers every tensor parallel weight over all its tensor parallel ranks, where the sizes of the two sides differ;
2. broadcasts its part of the engine's weights to the other stages (a buffer per stage, experts included);
3. with spread experts broadcasts the trainer's experts to the other stages, a second time, whence each rank picks;
4. and sends what it picked to the rank that the engine wants it on.

Copies of key heads that a larger engine repeats and rows that pad the vocabulary are left out: both are its gain.
"""

from __future__ import annotations

import numpy as np

from mindspeed_rl_plugin.layout.layout import EngineParallel, ModelShape, Parallel


def received(
    by_layer: np.ndarray, shape: ModelShape, train: Parallel, engine: EngineParallel, ranks: range
) -> np.ndarray:
    """`[world]` bytes that every rank receives. by_layer: of `estimate.weights_by_layer`; ranks: those with engines.

    Raises ValueError with the reason for a pair that the path refuses (`_validate_parallel_config`), or has not: it
    knows engines with whole experts only.
    """
    spread, wanted = train.ep, engine.ranks  # ranks over which whole experts are spread
    _check(shape, train, engine, ranks)
    tensor, expert, common = _by_stage(by_layer, shape.layers, train)
    out = np.zeros(train.world)
    held = tensor / engine.tp + common + expert / wanted  # a rank of the engine, by stage
    for rank in range(train.world):
        stage = train.coordinates(rank).pp
        others = np.arange(train.pp) != stage
        if train.tp != engine.tp:
            out[rank] += (train.tp - 1) / train.tp * tensor[stage]
        out[rank] += (held + expert / spread)[others].sum()
        if not _stays(rank % wanted, spread, wanted):
            out[rank] += expert.sum() / wanted
    return out


def _stays(rank: int, spread: int, wanted: int) -> bool:
    """Whether the experts that a rank picked are those that it generates with. Source: get_expert_router."""
    steps = max(1, wanted // spread)
    return rank % steps * spread + rank // steps == rank


def _by_stage(by_layer: np.ndarray, layers: int, train: Parallel) -> np.ndarray:
    """`[3, stages]` bytes of tensor parallel, expert and common weights."""
    out = np.zeros((3, train.pp))
    for stage in range(train.pp):
        places = [i + 1 for chunk in train.stage_layers(layers, stage) for i in chunk]
        places += [0] * (stage == 0) + [-1] * (stage == train.pp - 1)
        out[:, stage] = by_layer[places].sum(0)
    return out


def _check(shape: ModelShape, train: Parallel, engine: EngineParallel, ranks: range) -> None:
    if ranks != range(train.world):
        raise ValueError("its engines live on all ranks of the trainer")
    if shape.moe_layers:
        if engine.ep < engine.ranks:
            raise ValueError(f"it has no engines that cut every expert over {engine.tp} ranks, as this one does")
        if engine.ranks % train.ep:
            raise ValueError(f"the trainer's {train.ep} ranks of experts do not divide the engine's {engine.ranks}")
        if train.expert_tp > 1:
            raise ValueError("it takes whole experts only, spread over the trainer's tensor parallel ranks too")
        if train.world % (train.pp * engine.ranks):
            raise ValueError(f"engines of {engine.ranks} ranks do not divide a stage of {train.world // train.pp}")
    if train.tp > engine.tp and train.tp % engine.tp:
        raise ValueError(f"the engine's tensor parallel size {engine.tp} does not divide the trainer's {train.tp}")
    if train.tp < engine.tp and (train.world // train.pp) % engine.tp:
        raise ValueError(f"engines of {engine.tp} ranks do not divide a stage of {train.world // train.pp}")
