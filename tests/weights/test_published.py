"""Bytes of MindSpeed-RL's own path, against its collectives played through one by one."""

import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_rl_plugin.layout.layout import EngineParallel, ModelShape, Parallel
from mindspeed_rl_plugin.tools.plan.estimate import weights_by_layer

DENSE = ModelShape("qwen2", 4, 8, 4, 4, 2, 16, 32, 32)
ROUTED = ModelShape("qwen3_moe", 4, 8, 4, 4, 2, 16, 32, 32, experts=8, expert_ffn=4, dense_layers=(0,))
# of one layer, numbers: attention and MLP of each family; the embedding, and the head
ATTENTION, MLP, ONE_EXPERT, OUTER = 4 * 8 * 8, 3 * 8 * 16, 3 * 8 * 4, 32 * 8
BIAS = 3 * 8

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "resharding"))
import published  # noqa: E402


def received(shape, train, engine, ranks):
    return published.received(weights_by_layer(shape, 2), shape, train, engine, ranks)


def played(shape, train, engine):
    """Received numbers of every rank, by playing gather, broadcasts and sends with the sizes written down by hand."""
    routed = shape.family == "qwen3_moe"
    per_stage = shape.layers // train.pp
    out = []
    for rank in range(train.world):
        stage = train.coordinates(rank).pp
        total = 0
        for other in range(train.pp):
            layers = range(other * per_stage, (other + 1) * per_stage)
            sparse = sum(routed and i > 0 for i in layers)
            cut = len(layers) * ATTENTION + (len(layers) - sparse) * MLP + (other in (0, train.pp - 1)) * OUTER
            cut += OUTER * (train.pp == 1) + (0 if routed else len(layers) * BIAS)
            whole = len(layers) * (2 * 8 + 4 * routed) + sparse * 8 * 8 + 8 * (other == train.pp - 1)
            experts = sparse * 8 * ONE_EXPERT
            if other == stage and train.tp != engine.tp:
                total += cut // train.tp * (train.tp - 1)
            if other != stage:
                total += cut // engine.tp + whole + experts // engine.ranks
                total += experts // train.ep if routed else 0
            # the trainer's rank e has experts e, e + 1, ... of 8 / ep; the engine's rank r wants those of 8 / ranks
            if routed:
                place, each = rank % engine.ranks, 8 // engine.ranks
                of_trainer = rank % train.ep * (8 // train.ep)
                picked = of_trainer + rank // train.ep % (engine.ranks // train.ep) * each
                total += 0 if picked == place * each else experts // engine.ranks
        out.append(total)
    return out


@pytest.mark.parametrize(
    "shape, train, engine",
    [
        (DENSE, Parallel(4, tp=4), EngineParallel(2)),
        (DENSE, Parallel(4, tp=2), EngineParallel(2)),
        (DENSE, Parallel(4, tp=2), EngineParallel(4)),
        (DENSE, Parallel(4, tp=2, pp=2), EngineParallel(1)),
        (ROUTED, Parallel(4, tp=2, ep=4, etp=1), EngineParallel(1, 4)),
        (ROUTED, Parallel(8, tp=2, ep=2, etp=1), EngineParallel(2, 8)),
        (ROUTED, Parallel(16, tp=2, pp=2, ep=4, etp=1), EngineParallel(4, 8)),
    ],
)
def test_bytes_of_its_collectives(shape, train, engine):
    nbytes = received(shape, train, engine, range(train.world))
    np.testing.assert_array_equal(nbytes, 2 * np.array(played(shape, train, engine)))
