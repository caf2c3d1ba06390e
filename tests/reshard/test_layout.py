"""Shapes, parallel layouts and tables against transformers and Megatron themselves, and what they refuse."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from mindspeed_rl_plugin.reshard.families import FAMILIES, find_family
from mindspeed_rl_plugin.reshard.layout import (
    EngineParallel,
    ModelShape,
    Parallel,
    canonical_tensors,
    engine_layout,
    megatron_layout,
)

sys.path.insert(0, str(Path(__file__).parent))
from plan_cases import LATENT, TINY  # noqa: E402

SHAPE = ModelShape("qwen2", 4, 64, 8, 4, 8, 96, 250, 256)
MOE = ModelShape("qwen3_moe", layers=2, vocab=60, padded_vocab=64, **TINY)
V3 = ModelShape("deepseek_v3", layers=3, vocab=60, padded_vocab=64, dense_layers=(0,), **TINY | LATENT)


EXPERTS = dict(moe_intermediate_size=48, num_experts_per_tok=2)
CONFIGS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS | dict(num_experts=4, decoder_sparse_step=1, mlp_only_layers=[1]),
    "deepseek_v3": EXPERTS
    | dict(n_routed_experts=4, n_shared_experts=2, first_k_dense_replace=1, n_group=1, topk_group=1)
    | dict(q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_canonical_tensors_are_those_of_transformers(family, tied, tmp_path):
    """Names and shapes as in the checkpoint that transformers writes (its modules may stack experts)."""
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=250,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8 if family == "deepseek_v3" else 4,
        tie_word_embeddings=tied,
        **CONFIGS[family] | ({} if family == "deepseek_v3" else {"head_dim": 8}),
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    shape = ModelShape.from_hf_config(json.loads((tmp_path / "config.json").read_text()), padded_vocab=256)
    assert {name: t.shape for name, t in canonical_tensors(shape).items()} == theirs
    assert model.__class__.__name__ == shape.table.architecture
    assert (shape.padded_vocab, shape.tied) == (256, tied)


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
        (lambda: engine_layout(SHAPE, 3, 0), "do not divide over 3 tensor parallel ranks"),
        (lambda: engine_layout(SHAPE, 2, 2), "engine rank 2 is outside its tensor parallel group of 2"),
        (lambda: ModelShape("gpt2", 1, 8, 2, 1, 4, 8, 8, 8), "model family 'gpt2' is unknown; known: llama"),
        (lambda: ModelShape("llama", 1, 8, 3, 2, 4, 8, 8, 8), "3 attention heads do not divide into 2 query groups"),
        (lambda: ModelShape("llama", 1, 8, 2, 1, 4, 8, 9, 8), "vocabulary of 9 exceeds Megatron's padded 8"),
        (lambda: EngineParallel(4, 2), "engine with tp=4 cannot spread experts over ep=2 ranks"),
        (lambda: EngineParallel(0), "engine sizes must be at least 1, got tp=0 ep=1"),
        (lambda: engine_layout(MOE, EngineParallel(2, 4), 4), "engine rank 4 is outside an engine of 4"),
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


def megatron_args(**changes):
    base = dict(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=2,
        kv_channels=32,
        ffn_hidden_size=256,
        vocab_size=250,
        padded_vocab_size=256,
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=2,
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=True,
        qk_layernorm=False,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        num_experts=None,
    )
    return argparse.Namespace(**base | changes)


def test_shape_from_arguments():
    expected = ModelShape("qwen2", 4, 128, 4, 2, 32, 256, 250, 256)
    assert ModelShape.from_megatron_args(megatron_args()) == expected
    derived = megatron_args(
        kv_channels=None, ffn_hidden_size=None, padded_vocab_size=None, group_query_attention=False, num_query_groups=1
    )
    shape = ModelShape.from_megatron_args(derived, vocab=257)
    assert (shape.head_dim, shape.ffn, shape.groups, shape.vocab, shape.padded_vocab) == (32, 320, 4, 257, 512)
    assert ModelShape.from_megatron_args(megatron_args(add_qkv_bias=False)).family == "llama"
    qwen3 = megatron_args(add_qkv_bias=False, qk_layernorm=True, untie_embeddings_and_output_weights=False)
    assert ModelShape.from_megatron_args(qwen3) == ModelShape("qwen3", 4, 128, 4, 2, 32, 256, 250, 256, tied=True)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(apply_layernorm_1p=True), "--apply-layernorm-1p"),
        (dict(use_torch_fsdp2=True), "use --use-distributed-optimizer instead"),
        (dict(noop_layers={3}), "--noop-layers"),
        (dict(vocab_size=None), "vocabulary's size is unknown"),
    ],
)
def test_arguments_refused(changes, message):
    """And those in tests/engine/test_hf_config.py."""
    with pytest.raises(ValueError, match=message):
        ModelShape.from_megatron_args(megatron_args(**changes))


def test_all_problems_come_at_once():
    with pytest.raises(ValueError) as caught:
        ModelShape.from_megatron_args(megatron_args(normalization="LayerNorm", swiglu=False, squared_relu=True))
    assert len(str(caught.value).splitlines()) == 4


def test_families_have_traits_of_their_own(monkeypatch):
    """Megatron's flags must tell them apart; a second family with the traits of one is an error, not the first."""
    for name, family in FAMILIES.items():
        traits = dict(qkv_bias=family.qkv_bias, qk_norm=family.qk_norm, experts=family.experts, mla=family.mla)
        assert find_family(**traits, score=family.router.score) == name
    monkeypatch.setitem(FAMILIES, "other", FAMILIES["llama"])
    with pytest.raises(ValueError, match="the families llama, other all have add_qkv_bias=False"):
        find_family(qkv_bias=False, qk_norm=False)
