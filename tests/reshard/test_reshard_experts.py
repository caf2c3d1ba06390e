"""Experts and latent attention: layouts of every storage on both sides, and plans between them, over random sizes."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.reshard.family_table import EXPERTS, IMPLS
from mindspeed_rl_plugin.reshard.layout import (
    EngineParallel,
    ModelShape,
    Parallel,
    canonical_tensors,
    engine_layout,
    engine_shapes,
    megatron_layout,
    megatron_shapes,
)
from mindspeed_rl_plugin.reshard.plan import make_plan

sys.path.insert(0, str(Path(__file__).parent))
from expert_reference import engine_weights, megatron_weights, random_weights  # noqa: E402
from reshard_reference import deliver  # noqa: E402

TINY = dict(hidden=4, heads=4, ffn=8, expert_ffn=8, experts=8, groups=4, head_dim=2)
LATENT = dict(q_lora=8, kv_lora=6, nope=4, rope=2, value=2, shared_ffn=16)


@st.composite
def cases(draw, world_limit=16):
    """A shape, a trainer, how its model is built and stored, an engine, and which ranks the engines live on."""
    tp, pp, ep = (draw(st.sampled_from(sizes)) for sizes in ([1, 2, 4], [1, 2], [1, 2, 4, 8]))
    etp = draw(st.sampled_from([None, 1, 2]))
    need = pp * max(tp, ep * (tp if etp is None else etp))
    world = need * draw(st.integers(1, max(1, world_limit // need)))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    family = draw(st.sampled_from(["qwen3_moe", "deepseek_v3"]))
    layers = pp * vpp + (uneven := draw(st.integers(0, 1)) if vpp == 1 and pp > 1 else 0)
    vocab = draw(st.integers(3, 70))
    sizes = TINY | (LATENT if family == "deepseek_v3" else {"groups": draw(st.sampled_from([1, 2, 4]))})
    shape = ModelShape(
        family,
        layers=layers,
        vocab=vocab,
        padded_vocab=-(-vocab // (8 * tp)) * 8 * tp,
        tied=draw(st.booleans()),
        dense_layers=tuple(range(draw(st.integers(0, layers)))),
        **sizes,
    )
    first = layers // pp + uneven if pp > 1 and uneven else None
    parallel = Parallel(world, tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, first_layers=first)
    engine_tp = draw(st.sampled_from([1, 2, 4]))
    engine = EngineParallel(
        engine_tp,
        draw(st.sampled_from([e for e in (1, 2, 4, 8, 12) if e % engine_tp == 0 or e == 1])),
        nested=draw(st.booleans()),
        fused_down=draw(st.booleans()),
        transposed=draw(st.booleans()),
    )
    low = draw(st.sampled_from([0, world // 2, world]))  # equal, overlapping, disjoint sets
    ranks = range(low, low + draw(st.integers(1, 2)) * engine.ranks)
    storage = draw(st.sampled_from(EXPERTS))
    return shape, parallel, draw(st.sampled_from(IMPLS)), storage, engine, ranks


def fits(case):
    """Twelve ranks get experts only in vLLM's uneven way; eight experts then leave four without any."""
    shape, _, _, _, engine, _ = case
    return engine.ep <= shape.experts


@settings(max_examples=40, deadline=None)
@given(cases().filter(fits))
def test_weights_arrive_bitwise(case):
    shape, parallel, impl, storage, engine, ranks = case
    weights = random_weights(shape)
    assert {n: t.shape for n, t in canonical_tensors(shape).items()} == {n: tuple(t.shape) for n, t in weights.items()}
    source, sources = {}, {}
    for r in range(parallel.world):
        source[r] = megatron_weights(shape, parallel, r, weights, impl, storage)
        sources[r] = megatron_layout(shape, parallel, r, impl, storage)
        shapes = megatron_shapes(shape, parallel, r, impl, storage)
        assert {n: tuple(t.shape) for n, t in source[r].items()} == dict(shapes)
        holds(source[r], sources[r], weights)
    expected, destinations = {}, {}
    for i, r in enumerate(ranks):
        expected[r] = engine_weights(shape, engine, i % engine.ranks, weights)
        destinations[r] = engine_layout(shape, engine, i % engine.ranks)
        shapes = engine_shapes(shape, engine, i % engine.ranks)
        assert {n: tuple(t.shape) for n, t in expected[r].items()} == dict(shapes)
        holds(expected[r], destinations[r], weights)
    live = {r: {n: torch.zeros_like(t) for n, t in params.items()} for r, params in expected.items()}
    tensors = canonical_tensors(shape)
    plan = make_plan(sources, destinations, tensors, itemsize=4, bucket_bytes=1024, node_size=4)
    deliver(plan, source, live)
    for r, params in expected.items():
        for name, tensor in params.items():
            assert torch.equal(live[r][name], tensor), (r, name)
    assert plan.unused == ()
    for r in ranks:
        lacking = slices(destinations[r]) - slices(sources.get(r, {}))
        assert plan.traffic[r].received == sum(tensors[name].slice_bytes(4) for name, _ in lacking)


@settings(max_examples=20, deadline=None)
@given(cases(world_limit=64).filter(fits), st.integers(0, 4))
def test_every_rank_finds_the_same_plan(case, first):
    """Each alone, without a word from the others: whole where it is asked for, its own share where it is not."""
    shape, parallel, impl, storage, engine, ranks = case
    sources = {r: megatron_layout(shape, parallel, r, impl, storage) for r in range(parallel.world)}
    destinations = {r: engine_layout(shape, engine, i % engine.ranks) for i, r in enumerate(ranks)}
    options = dict(tensors=canonical_tensors(shape), itemsize=2, bucket_bytes=1024, node_size=4)
    whole = make_plan(sources, destinations, **options)
    everyone = sorted({*sources, *destinations})
    for rank in {everyone[0], everyone[-1], *everyone[first::5]}:
        mine = make_plan(sources, destinations, rank=rank, **options)
        assert mine.fingerprint == whole.fingerprint and mine.buckets == whole.buckets
        assert mine.traffic == whole.traffic
        assert mine.moves == tuple(m for m in whole.moves if rank in (m.source, m.destination))
        assert mine.copies == tuple(c for c in whole.copies if c.rank == rank)


def holds(params, layout, weights):
    """Segment by segment: a mistake made alike on both sides would still deliver."""
    for name, segments in layout.items():
        for s in segments:
            held = s.view(params[name], s.start, s.size)
            assert torch.equal(held, weights[s.name].narrow(s.axis, s.start, s.size)), (name, s)
        assert sum(s.view(params[name], s.start, s.size).numel() for s in segments) == sum(
            weights[s.name].narrow(s.axis, s.start, s.size).numel() for s in segments
        )


def slices(layout):
    return {(s.name, i) for segments in layout.values() for s in segments for i in range(s.start, s.stop)}


MOE = ModelShape("qwen3_moe", layers=2, vocab=60, padded_vocab=64, **TINY)
V3 = ModelShape("deepseek_v3", layers=3, vocab=60, padded_vocab=64, dense_layers=(0,), **TINY | LATENT)


def test_engine_experts_are_dealt_as_vllm_does():
    """The remainder goes to the first ranks, as determine_expert_map has it."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    for total, ep in [(8, 4), (10, 4), (7, 7), (5, 1), (256, 64)]:
        for rank in range(ep):
            count, places, _ = determine_expert_map(ep, rank, total)
            mine = range(total) if places is None else (places >= 0).nonzero().flatten().tolist()
            assert list(EngineParallel(1, ep).experts(total, rank)) == list(mine) and len(mine) == count


def test_wide_tensors_keep_their_bytes():
    tensors = canonical_tensors(V3)
    bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.wide and bias.slice_bytes(2) == 4
    assert tensors["model.layers.1.mlp.gate.weight"].slice_bytes(2) == 2 * V3.hidden
    assert sum(t.wide for t in tensors.values()) == V3.moe_layers == 2


def test_ranks_that_store_the_same_share_one_layout():
    parallel = Parallel(16, tp=2, pp=2, ep=4, etp=1)
    assert megatron_layout(MOE, parallel, 0) is megatron_layout(MOE, parallel, 4)
    assert megatron_layout(MOE, parallel, 0) is not megatron_layout(MOE, parallel, 2)  # other experts
    dense = ModelShape("qwen3", 2, 4, 4, 4, 2, 8, 60, 64)
    assert megatron_layout(dense, parallel, 0) is megatron_layout(dense, parallel, 2)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: EngineParallel(4, 2), "engine with tp=4 cannot spread experts over ep=2 ranks"),
        (lambda: EngineParallel(0), "engine sizes must be at least 1, got tp=0 ep=1"),
        (lambda: engine_layout(MOE, EngineParallel(2, 4), 4), "engine rank 4 is outside an engine of 4"),
        (lambda: megatron_layout(MOE, Parallel(3, ep=3), 0), "8 experts do not divide over 3 expert parallel ranks"),
        (lambda: megatron_layout(MOE, Parallel(1), 0, "local", "gg"), "storage of experts 'gg' is unknown; known: seq"),
        (lambda: megatron_layout(MOE, Parallel(16, tp=16), 0), "do not divide over 16 tensor parallel ranks"),
        (lambda: ModelShape("qwen3_moe", 2, 4, 4, 4, 2, 8, 60, 64), "of family qwen3_moe has experts; their number is"),
        (
            lambda: ModelShape("deepseek_v3", 3, vocab=60, padded_vocab=64, **TINY),
            "needs sizes that are not given: kv_down, .*shared_ffn",
        ),
        (
            lambda: ModelShape("qwen3_moe", 2, vocab=6, padded_vocab=8, dense_layers=(2,), **TINY),
            r"dense layers \(2,\) are not all among the 2 layers",
        ),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
