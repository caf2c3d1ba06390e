"""Random reshards: a model of any family, how its trainer and its engines are cut, and on which ranks they live."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from reshard_reference import engine_weights, megatron_weights

from mindspeed_rl_plugin.reshard.family_table import EXPERTS, IMPLS
from mindspeed_rl_plugin.reshard.layout import (
    EngineParallel,
    ModelShape,
    Parallel,
    engine_layout,
    engine_shapes,
    megatron_layout,
    megatron_shapes,
)

TINY = dict(hidden=4, heads=4, ffn=8, expert_ffn=8, experts=8, groups=4, head_dim=2)
LATENT = dict(q_lora=8, kv_lora=6, nope=4, rope=2, value=2, shared_ffn=16)


class Case(NamedTuple):
    """impl, storage: how the trainer's model is built and stores its experts; ranks: those of the engines."""

    shape: ModelShape
    parallel: Parallel
    engine: EngineParallel
    ranks: range
    impl: str = "local"
    storage: str = "sequential"
    own_head: bool | None = None

    def sources(self):
        return {r: megatron_layout(self.shape, self.parallel, r, self.impl, self.storage) for r in self._world()}

    def stored(self):
        """Shapes of what each trainer rank stores."""
        return {r: megatron_shapes(self.shape, self.parallel, r, self.impl, self.storage) for r in self._world()}

    def destinations(self):
        return {r: engine_layout(self.shape, self.engine, at, self.own_head) for r, at in self._engines()}

    def wanted(self):
        """Shapes of what each engine rank stores."""
        return {r: engine_shapes(self.shape, self.engine, at, self.own_head) for r, at in self._engines()}

    def trainer(self, weights):
        """What each trainer rank stores of a canonical model."""
        each = self.impl, self.storage
        return {r: megatron_weights(self.shape, self.parallel, r, weights, *each) for r in self._world()}

    def engines(self, weights):
        """What each engine rank has to have of it."""
        return {r: engine_weights(self.shape, self.engine, at, weights, self.own_head) for r, at in self._engines()}

    def _world(self):
        return range(self.parallel.world)

    def _engines(self):
        return [(r, i % self.engine.ranks) for i, r in enumerate(self.ranks)]


def holds(params, shapes, layout, weights):
    """Segment by segment: a mistake made alike on both sides would still deliver, and mislead digests and exports."""
    assert {name: tuple(t.shape) for name, t in params.items()} == dict(shapes)
    for name, segments in layout.items():
        for s in segments:
            held = s.view(params[name], s.start, s.size)
            assert torch.equal(held, weights[s.name].narrow(s.axis, s.start, s.size)), (name, s)


def slices(layout):
    """Every slice that a layout stores, as (tensor, index)."""
    return {(s.name, i) for segments in layout.values() for s in segments for i in range(s.start, s.stop)}


@st.composite
def dense(draw, world_limit=16):
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    dp = draw(st.integers(1, max(1, world_limit // (tp * pp))))
    shape = ModelShape(
        family=draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        layers=pp * vpp * draw(st.sampled_from([1, 2])),
        hidden=6,
        heads=8,
        groups=draw(st.sampled_from([1, 2, 4, 8])),  # fewer than tp too: newer Megatron then cuts inside a group
        head_dim=2,
        ffn=8 * draw(st.sampled_from([1, 3])),
        vocab=(vocab := draw(st.integers(3, 70))),
        padded_vocab=-(-vocab // (8 * tp)) * 8 * tp,
        tied=draw(st.booleans()),
    )
    order = draw(st.sampled_from(["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]))
    cp = draw(st.sampled_from([1, 2])) if dp % 2 == 0 else 1
    parallel = Parallel(tp * pp * dp, tp=tp, pp=pp, vpp=vpp, cp=cp, order=order)
    engine = EngineParallel(draw(st.sampled_from([1, 2, 4, 8])))
    ranks = draw(places(parallel.world, engine, replicas=3))
    return Case(shape, parallel, engine, ranks, draw(st.sampled_from(IMPLS)), own_head=draw(st.booleans()) or None)


@st.composite
def experts(draw, world_limit=16):
    tp, pp, ep = (draw(st.sampled_from(sizes)) for sizes in ([1, 2, 4], [1, 2], [1, 2, 4, 8]))
    etp = draw(st.sampled_from([None, 1, 2]))
    need = pp * max(tp, ep * (tp if etp is None else etp))
    world = need * draw(st.integers(1, max(1, world_limit // need)))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    family = draw(st.sampled_from(["qwen3_moe", "deepseek_v3"]))
    layers = pp * vpp + (uneven := draw(st.integers(0, 1)) if vpp == 1 and pp > 1 else 0)
    vocab = draw(st.integers(3, 70))
    shape = ModelShape(
        family,
        layers=layers,
        vocab=vocab,
        padded_vocab=-(-vocab // (8 * tp)) * 8 * tp,
        tied=draw(st.booleans()),
        dense_layers=tuple(range(draw(st.integers(0, layers)))),
        **TINY | (LATENT if family == "deepseek_v3" else {"groups": draw(st.sampled_from([1, 2, 4]))}),
    )
    first = layers // pp + uneven if pp > 1 and uneven else None
    parallel = Parallel(world, tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, first_layers=first)
    engine_tp = draw(st.sampled_from([1, 2, 4]))
    engine = EngineParallel(
        engine_tp,
        draw(st.sampled_from([e for e in (1, 2, 4, 8) if e % engine_tp == 0 or e == 1])),
        nested=draw(st.booleans()),
        fused_down=draw(st.booleans()),
        transposed=draw(st.booleans()),
    )
    ranks = draw(places(world, engine, replicas=2))
    return Case(shape, parallel, engine, ranks, draw(st.sampled_from(IMPLS)), draw(st.sampled_from(EXPERTS)))


@st.composite
def places(draw, world, engine, replicas):
    """Ranks of some engines: those of the trainer, some of them and others, or others."""
    first = draw(st.sampled_from([0, world // 2, world]))
    return range(first, first + draw(st.integers(1, replicas)) * engine.ranks)


def cases(world_limit=16):
    return st.one_of(dense(world_limit), experts(world_limit))
