"""Bytes of MindSpeed-RL's own path, against its collectives added up by hand."""

import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_rl_plugin.layout.layout import EngineParallel, ModelShape, Parallel
from mindspeed_rl_plugin.tools.plan.estimate import weights_by_layer

DENSE = ModelShape("qwen2", 4, 8, 4, 4, 2, 16, 32, 32)
ROUTED = ModelShape("qwen3_moe", 4, 8, 4, 4, 2, 16, 32, 32, experts=8, expert_ffn=4, dense_layers=(0,))
# Numbers of one layer: 256 of attention and 24 of its bias, 384 of the MLP, 16 of norms and 4 of those of heads, 64 of
# a router and 96 of each expert. Outside of them: 256 of the embedding, 256 of the head, 8 of the last norm.
CUT = 4 * (256 + 24 + 384) + 2 * 256
EXPERTS = 3 * 8 * 96
STAGES = (2 * 256 + 384 + 256, 2 * 20 + 64), (2 * 256 + 256, 2 * 20 + 2 * 64 + 8)  # of two of ROUTED: cut, whole

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "resharding"))
import published  # noqa: E402


@pytest.mark.parametrize(
    "shape, train, engine, numbers",
    [
        (DENSE, Parallel(4, tp=4), EngineParallel(2), [CUT // 4 * 3] * 4),
        (DENSE, Parallel(4, tp=2), EngineParallel(2), [0] * 4),
        (DENSE, Parallel(4, tp=2), EngineParallel(4), [CUT // 2] * 4),
        # Half of the own stage, and all of the other with its norms.
        (DENSE, Parallel(4, tp=2, pp=2), EngineParallel(1), [CUT // 4 * 3 + n for n in (40, 40, 32, 32)]),
        (ROUTED, Parallel(4, tp=2, ep=4, etp=1), EngineParallel(1, 4), [(sum(cut for cut, _ in STAGES)) // 2] * 4),
        # Ranks 1 to 6 picked an expert that another rank generates with.
        (ROUTED, Parallel(8, tp=2, ep=2, etp=1), EngineParallel(2, 8), [0, *[EXPERTS // 8] * 6, 0]),
        (
            ROUTED,
            Parallel(16, tp=2, pp=2, ep=4, etp=1),
            EngineParallel(4, 8),
            [  # the other stage's experts twice: for the engine and for picking
                own // 2 + cut // 4 + whole + layers * 8 * 96 // 8 * 3 + moves * EXPERTS // 8
                for (own, _), (cut, whole), layers in ((*STAGES, 2), (*STAGES[::-1], 1))
                for moves in (0, 1, 1, 1, 1, 1, 1, 0)
            ],
        ),
    ],
)
def test_bytes_of_its_collectives(shape, train, engine, numbers):
    moved = published.received(weights_by_layer(shape, 2), shape, train, engine, range(train.world))
    np.testing.assert_array_equal(moved, 2 * np.array(numbers))
