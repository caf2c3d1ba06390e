"""Random reshards: a model of any family, how its trainer and its engines are cut, and on which ranks they live."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from reshard_reference import engine_weights, megatron_weights

from mindspeed_rl_plugin.layout.families import FAMILIES
from mindspeed_rl_plugin.layout.family_table import EXPERTS, IMPLS
from mindspeed_rl_plugin.layout.layout import EngineParallel, ModelShape, Parallel, engine_layout, megatron_layout

TINY = dict(hidden=4, heads=4, ffn=8, expert_ffn=8, experts=8, groups=4, head_dim=2)
LATENT = dict(q_lora=8, kv_lora=6, nope=4, rope=2, value=2)


class Case(NamedTuple):
    """impl, storage: how the trainer's model is built and stores its experts; ranks: those of the engines."""

    shape: ModelShape
    parallel: Parallel
    engine: EngineParallel
    ranks: range
    impl: str = "local"
    storage: str = "sequential"

    def sources(self):
        return {r: megatron_layout(self.shape, self.parallel, r, self.impl, self.storage) for r in self._world()}

    def destinations(self):
        return {r: engine_layout(self.shape, self.engine, at) for r, at in self._engines()}

    def trainer(self, weights):
        """What each trainer rank stores of a canonical model."""
        each = self.impl, self.storage
        return {r: megatron_weights(self.shape, self.parallel, r, weights, *each) for r in self._world()}

    def engines(self, weights):
        """What each engine rank has to have of it."""
        return {r: engine_weights(self.shape, self.engine, at, weights) for r, at in self._engines()}

    def _world(self):
        return range(self.parallel.world)

    def _engines(self):
        return [(r, i % self.engine.ranks) for i, r in enumerate(self.ranks)]


def holds(params, layout, weights):
    """Segment by segment: a mistake made alike on both sides would still deliver, and mislead digests and exports."""
    assert {name: tuple(t.shape) for name, t in params.items()} == layout.shapes
    for name, segments in layout.items():
        for s in segments:
            held = s.view(params[name], s.start, s.size)
            assert torch.equal(held, weights[s.name].narrow(s.axis, s.start, s.size)), (name, s)


def moved(plan, end, rank, node_size=None):
    """Bytes that a rank sends (end: "source") or receives ("destination"); node_size: only those that cross nodes."""
    mine = [m for m in plan.moves if getattr(m, end) == rank]
    if node_size:
        mine = [m for m in mine if m.source // node_size != m.destination // node_size]
    return sum(m.piece.nbytes for m in mine)


def slices(layout):
    """Every slice that a layout stores, as (tensor, index)."""
    return {(s.name, i) for segments in layout.values() for s in segments for i in range(s.start, s.stop)}


@st.composite
def cases(draw, world_limit=16):
    one_of = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    family = one_of(*FAMILIES)
    moe, mla = FAMILIES[family].experts, FAMILIES[family].mla
    tp, pp = one_of(1, 2, 4), one_of(1, 2, 3)
    ep, etp = (one_of(*(e for e in (1, 2, 4, 8) if e * tp * pp <= 32)), one_of(None, 1, 2)) if moe else (1, None)
    need = pp * max(tp, ep * (tp if etp is None else etp))
    world = need * draw(st.integers(1, max(1, world_limit // need)))
    vpp = one_of(1, 2) if pp > 1 else 1
    uneven = one_of(0, 1) if vpp == 1 and pp > 1 else 0
    built, vocab = pp * vpp * one_of(1, 2) + uneven, draw(st.integers(3, 70))
    noop = tuple(sorted(draw(st.sets(st.integers(0, built - 1), max_size=built - 1))))
    layers = built - len(noop)
    # Fewer groups than ranks too: newer Megatron then cuts inside a group.
    sizes = TINY | dict(heads=8, groups=8 if mla else one_of(1, 2, 4, 8), ffn=one_of(8, 24)) | (LATENT if mla else {})
    sizes |= dict(q_lora=one_of(0, 8)) if mla else {}
    sizes |= dict(shared_ffn=16) if FAMILIES[family].shared_experts else {}
    sizes |= {} if moe else dict(experts=0)
    shape = ModelShape(
        family,
        layers=layers,
        vocab=vocab,
        padded_vocab=-(-vocab // (8 * tp)) * 8 * tp,
        tied=one_of(False, True),
        dense_layers=tuple(range(draw(st.integers(0, layers)))) if FAMILIES[family].hf.dense and moe else (),
        **sizes,
    )
    parallel = Parallel(
        world,
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=1 if moe or world // (tp * pp) % 2 else one_of(1, 2),
        ep=ep,
        etp=etp,
        order="tp-cp-ep-dp-pp" if moe else one_of("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"),
        first_layers=(built - uneven) // pp + uneven if uneven else None,
        noop=noop,
        folded=vpp == 2 and one_of(False, True),
    )
    engine_tp = one_of(1, 2, 4, 8)
    engine_ep = one_of(*(e for e in (1, 2, 4, 8) if e % engine_tp == 0 or e == 1)) if moe else 1
    stored = {way: one_of(False, True) for way in ("nested", "fused_down", "transposed", "whole_shared", "own_head")}
    engine = EngineParallel(engine_tp, engine_ep, **stored)
    # Engines on ranks of the trainer, on some of them and others, or on others.
    first = one_of(0, world // 2, world)
    ranks = range(first, first + draw(st.integers(1, 3)) * engine.ranks)
    return Case(shape, parallel, engine, ranks, one_of(*IMPLS), one_of(*EXPERTS))
