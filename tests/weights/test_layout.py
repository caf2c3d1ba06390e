"""Layouts of both sides against vLLM, and what they refuse. Shapes: tests/engine/test_hf_config.py."""

import pytest
from plan_cases import LATENT, TINY

from mindspeed_rl_plugin.layout.families import FAMILIES, find_family
from mindspeed_rl_plugin.layout.layout import EngineParallel, ModelShape, Parallel, engine_layout, megatron_layout

SHAPE = ModelShape("qwen2", 4, 64, 8, 4, 8, 96, 250, 256)
MOE = ModelShape("qwen3_moe", layers=2, vocab=60, padded_vocab=64, **TINY)
V3 = ModelShape("deepseek_v3", layers=3, vocab=60, padded_vocab=64, dense_layers=(0,), shared_ffn=16, **TINY | LATENT)


def test_engine_experts_are_dealt_as_vllm_does():
    """The remainder goes to the first ranks, as determine_expert_map has it."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    for total, ep in [(8, 4), (10, 4), (7, 7), (5, 1), (256, 64)]:
        for rank in range(ep):
            count, places, _ = determine_expert_map(ep, rank, total)
            mine = range(total) if places is None else (places >= 0).nonzero().flatten().tolist()
            assert list(EngineParallel(1, ep).experts(total, rank)) == list(mine) and len(mine) == count


def test_ranks_that_store_the_same_share_one_layout():
    parallel = Parallel(8, tp=2, pp=2)
    assert megatron_layout(SHAPE, parallel, 1) is megatron_layout(SHAPE, parallel, 3)
    assert megatron_layout(SHAPE, parallel, 1) is not megatron_layout(SHAPE, parallel, 2)
    parallel = Parallel(16, tp=2, pp=2, ep=4, etp=1)
    assert megatron_layout(MOE, parallel, 0) is megatron_layout(MOE, parallel, 4)
    assert megatron_layout(MOE, parallel, 0) is not megatron_layout(MOE, parallel, 2)  # other experts
    dense = ModelShape("qwen3", 2, 4, 4, 4, 2, 8, 60, 64)
    assert megatron_layout(dense, parallel, 0) is megatron_layout(dense, parallel, 2)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: megatron_layout(SHAPE, Parallel(3, tp=3), 0), "do not divide over 3 tensor parallel ranks"),
        (lambda: engine_layout(SHAPE, EngineParallel(3), 0), "do not divide over 3 tensor parallel ranks"),
        (lambda: engine_layout(SHAPE, EngineParallel(2), 2), "engine rank 2 "),
        (lambda: ModelShape("gpt2", 1, 8, 2, 1, 4, 8, 8, 8), "model family 'gpt2' is unknown; known: llama"),
        (lambda: ModelShape("llama", 1, 8, 3, 2, 4, 8, 8, 8), "3 attention heads do not divide into 2 query groups"),
        (lambda: ModelShape("llama", 1, 8, 2, 1, 4, 8, 9, 8), "vocabulary of 9 exceeds Megatron's padded 8"),
        (lambda: EngineParallel(4, 2), "tp=4 .* ep=2"),
        (lambda: EngineParallel(0), "tp=0 ep=1"),
        (lambda: engine_layout(MOE, EngineParallel(2, 4), 4), "engine rank 4 "),
        (lambda: megatron_layout(MOE, Parallel(3, ep=3), 0), "8 experts do not divide over 3 expert parallel ranks"),
        (lambda: megatron_layout(MOE, Parallel(16, tp=16), 0), "do not divide over 16 tensor parallel ranks"),
        (
            lambda: ModelShape("qwen3_moe", 2, 4, 4, 4, 2, 8, 60, 64),
            "sizes that are not given: expert_ffn, experts",
        ),
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


def test_families_have_traits_of_their_own(monkeypatch):
    """Megatron's flags must tell them apart; a second family with the traits of one is an error, not the first."""
    for name, family in FAMILIES.items():
        traits = dict(qkv_bias=family.qkv_bias, qk_norm=family.qk_norm, experts=family.experts, mla=family.mla)
        finer = dict(score=family.router.score, partial=family.hf.partial, own_head_dim=family.hf.own_head_dim)
        finer |= dict(by_best=family.router.by_best)
        assert find_family(**traits, **finer) == (family.twin or name)
    monkeypatch.setitem(FAMILIES, "other", FAMILIES["llama"])
    with pytest.raises(ValueError, match="llama, other .* add_qkv_bias=False"):
        find_family(qkv_bias=False, qk_norm=False)
