"""The derived config: families, refusals, agreement with transformers, comparison with a given config."""

import json
import math
from argparse import Namespace

import pytest
import torch
from refusals import VALIDATED
from safetensors import safe_open

from mindspeed_rl_plugin.engine.hf_config import (
    check_against,
    compare_configs,
    derive_config,
    normalized,
    write_config,
)
from mindspeed_rl_plugin.engine.hf_rope import check_rotary, rope_frequencies
from mindspeed_rl_plugin.layout.layout import ModelShape, canonical_tensors

SMALL = dict(
    hidden_size=128, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=192, max_position_embeddings=512
)
SMALL |= dict(padded_vocab_size=256, rotary_base=10000, rotary_percent=1.0, add_qkv_bias=False)
SMALL |= dict(use_rope_scaling=False, rope_scaling_factor=8.0, make_vocab_size_divisible_by=128, num_experts=None)
SMALL |= dict(tensor_model_parallel_size=1, norm_epsilon=1e-5)


def megatron(**changes) -> Namespace:
    """Arguments of a small Llama, as Megatron's validation leaves them."""
    return Namespace(**VALIDATED | SMALL | changes)


MOE = dict(qk_layernorm=True, num_experts=8, moe_ffn_hidden_size=48, moe_router_topk=2, moe_layer_freq=[1, 0])
MOE |= dict(moe_router_load_balancing_type="aux_loss")
DEEPSEEK = MOE | dict(moe_layer_freq=[0, 1], multi_latent_attention=True, group_query_attention=False)
DEEPSEEK |= dict(q_lora_rank=24, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=20)
DEEPSEEK |= dict(rope_type="rope", rotary_scaling_factor=1.0, moe_shared_expert_intermediate_size=96)
DEEPSEEK |= dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
DEEPSEEK |= dict(moe_router_topk_scaling_factor=2.5, moe_router_num_groups=4, moe_router_group_topk=1)
# Without query compression, weighed without adding up to 1.
LITE = DEEPSEEK | dict(q_lora_rank=None, moe_router_score_function=None, moe_router_enable_expert_bias=False)
LITE |= dict(moe_router_pre_softmax=True, moe_router_num_groups=None, moe_router_group_topk=None)
# As MindSpeed-LLM chooses groups of experts: by their best one.
GROUPS = dict(q_lora_rank=24, moe_router_load_balancing_type="group_limited_greedy", moe_router_num_groups=4)
GROUPS |= dict(moe_router_group_topk=1, moe_aux_loss_coeff=0.003, expert_model_parallel_size=2, micro_batch_size=1)
GLM = {name: value for name, value in DEEPSEEK.items() if name in MOE or "router" in name or "shared" in name}
GLM |= {"add_qkv_bias": True, "qk_layernorm": False, "kv_channels": 64, "rotary_percent": 0.5, "rotary_base": 1000000}
MIXTRAL = MOE | {"qk_layernorm": False, "moe_ffn_hidden_size": None, "moe_layer_freq": 1}
QWEN2_MOE = MOE | dict(add_qkv_bias=True, qk_layernorm=False, moe_router_pre_softmax=True)
QWEN2_MOE |= dict(moe_shared_expert_intermediate_size=80, moe_shared_expert_gate=True)
YARN = {"rope_type": None, "rotary_scaling_factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
# As MindSpeed-LLM's parser leaves them: Megatron's own factor is there too, and says nothing.
MINDSPEED_YARN = dict(rope_scaling_type="yarn", rope_type=None, rotary_scaling_factor=1.0, rope_scaling_factor=40.0)
MINDSPEED_YARN |= dict(rope_scaling_mscale=1.0, rope_scaling_mscale_all_dim=1.0, beta_fast=32, beta_slow=1)
MINDSPEED_YARN |= dict(rope_scaling_original_max_position_embeddings=128)
DENSE_YARN = MINDSPEED_YARN | {"rope_scaling_factor": None, "rope_scaling_mscale_all_dim": 0.0}
LLAMA3 = {"use_rope_scaling": True, "rotary_base": 500000}
FAMILIES = {
    "llama": {},
    "llama-scaled": LLAMA3,
    "llama-yarn": DENSE_YARN,
    "qwen2": {"add_qkv_bias": True, "rotary_base": 1000000, "norm_epsilon": 1e-6},
    "qwen3": {"qk_layernorm": True, "kv_channels": 64, "rotary_base": 1000000},
    "qwen3_moe": MOE | {"kv_channels": 64, "rotary_base": 1000000},
    "qwen3_moe-plain-sum": MOE | {"moe_router_pre_softmax": True},
    "seed_oss": {"add_qkv_bias": True, "kv_channels": 64},
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "glm4_moe": GLM,
    "glm4_moe-355b": GLM | {"qk_layernorm": True},
    "mha": {"group_query_attention": False, "num_query_groups": 1},
}
LATENT = {
    "deepseek_v2": LITE | {"q_lora_rank": 24},
    "deepseek_v2-lite": LITE,
    "deepseek_v2-236b": LITE | GROUPS,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3-yarn": DEEPSEEK | YARN,
    "deepseek_v3-mindspeed-yarn": DEEPSEEK | MINDSPEED_YARN,
    "deepseek_v3-kimi-yarn": DEEPSEEK | MINDSPEED_YARN | {"beta_fast": 1, "rotary_base": 50000},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", FAMILIES | LATENT)
def test_transformers_reads_the_same_model(name, tied, tmp_path) -> None:
    """The same fields, the same tensors in the checkpoint that it writes (its modules may stack experts), and the same
    frequencies of its rotary embedding."""
    from transformers import AutoConfig, AutoModelForCausalLM

    args = megatron(**(FAMILIES | LATENT)[name], untie_embeddings_and_output_weights=not tied)
    config = derive_config(args, vocab_size=250, eos_token_ids=(2, 3))
    write_config(config, tmp_path)
    hf = AutoConfig.from_pretrained(tmp_path)
    assert compare_configs(config, hf.to_dict()) == [] == compare_configs(hf.to_dict(), config)
    assert hf.eos_token_id == [2, 3]
    model = AutoModelForCausalLM.from_config(hf)
    model.save_pretrained(tmp_path)
    shape = ModelShape.from_hf_config(json.loads((tmp_path / "config.json").read_text()), padded_vocab=256)
    assert shape == ModelShape.from_megatron_args(args, 250) and type(model).__name__ == shape.table.architecture
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {name: t.shape for name, t in canonical_tensors(shape).items()} == theirs
    if args.num_experts:
        assert hf.norm_topk_prob != getattr(args, "moe_router_pre_softmax", False) and hf.num_experts_per_tok == 2
    if shape.table.mla:
        groups = (getattr(args, "moe_router_num_groups", None) or 1, 1, 2.5)
        assert (hf.n_group, hf.topk_group, hf.routed_scaling_factor) == groups
        # softmax scale as Megatron's latent attention has it: (0.1 mscale_all_dim ln factor + 1)^2 / sqrt(nope + rope)
        grown = 0.1 * math.log(40.0) + 1 if name.endswith("yarn") else 1.0
        assert model.model.layers[0].self_attn.scaling == pytest.approx(grown**2 / math.sqrt(24))
    theirs = model.model.rotary_emb
    torch.testing.assert_close(rope_frequencies(normalized(config)), theirs.inv_freq, rtol=1e-6, atol=0)
    check_rotary(normalized(config), theirs)
    # Cosine and sine are multiplied as MindSpeed-LLM does: by the ratio of two growths with the length.
    assert theirs.attention_scaling == pytest.approx(0.1 * math.log(4.0) + 1 if name == "llama-yarn" else 1.0)


def test_shape_from_arguments() -> None:
    assert ModelShape.from_megatron_args(megatron(vocab_size=250)).vocab == 250
    with pytest.raises(ValueError, match="vocabulary's size is unknown"):
        ModelShape.from_megatron_args(megatron(vocab_size=None))
    # Flags count layers that do nothing, the model does not.
    for noop, first, layers, dense in (
        ({1, 7}, 1, 6, (0,)),
        ("0,1", 3, 6, (0,)),
        ({2}, 3, 7, (0, 1)),
        (None, 3, 8, (0, 1, 2)),
    ):
        more = dict(num_layers=8, moe_layer_freq=1, first_k_dense_replace=first, noop_layers=noop)
        shape = ModelShape.from_megatron_args(megatron(**DEEPSEEK | more), 250)
        assert (shape.layers, shape.dense_layers) == (layers, dense)
    unsaid = dict.fromkeys(("kv_channels", "ffn_hidden_size", "padded_vocab_size"))
    args = megatron(**unsaid, group_query_attention=False, num_query_groups=1, tensor_model_parallel_size=2)
    shape = ModelShape.from_megatron_args(args, 257)
    assert (shape.head_dim, shape.ffn, shape.groups, shape.vocab, shape.padded_vocab) == (32, 320, 4, 257, 512)


def rotary(frequencies, **more) -> torch.nn.Module:
    module = torch.nn.Module()
    module.inv_freq = frequencies
    for name, value in more.items():
        setattr(module, name, value)
    return module


def test_a_built_model_that_scales_otherwise() -> None:
    asked = normalized(derive_config(megatron(**LLAMA3, rope_scaling_factor=32.0), vocab_size=250))
    built = normalized(derive_config(megatron(**LLAMA3), vocab_size=250))
    with pytest.raises(ValueError, match=r"frequency \d+ .* 8"):
        check_rotary(asked, rotary(rope_frequencies(built)))
    with pytest.raises(ValueError, match="8 .* 16"):
        check_rotary(asked, rotary(torch.ones(8)))


def test_megatrons_own_yarn_keeps_what_it_starts_from() -> None:
    """MindSpeed-LLM's keeps the result: a built model of plain rope passes for the first only."""
    config = normalized(derive_config(megatron(**DEEPSEEK | MINDSPEED_YARN), vocab_size=250))
    plain = rope_frequencies(config, scaled=False)
    check_rotary(config, rotary(plain, inv_freq_extra=plain))
    with pytest.raises(ValueError, match="rotary embedding: frequency"):
        check_rotary(config, rotary(plain))
    # Core 0.12.1 takes --max-position-embeddings for the original length.
    with pytest.raises(ValueError, match="YaRN of .*embeddings': 512"):
        check_rotary(config, rotary(plain, inv_freq_extra=plain, original_max_position_embeddings=512))


def test_mindspeed_llm_scaling() -> None:
    given = {"low_freq_factor": 2.0, "high_freq_factor": 8.0, "original_max_position_embeddings": 4096}
    args = megatron(rope_scaling_type="llama3", rope_scaling_factor=4.0, **given)
    expected = {"rope_type": "llama3", "factor": 4.0} | given
    assert derive_config(args, vocab_size=250)["rope_scaling"] == expected


def balanced(kind: str) -> dict[str, str]:
    return {"moe_router_load_balancing_type": kind}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"moe_router_pre_softmax": True}, False),
        # MindSpeed-LLM has the flag, which only balancing with a loss per batch reads.
        ({"norm_topk_prob": False}, True),
        ({"norm_topk_prob": False, "moe_router_pre_softmax": True}, False),
        ({"norm_topk_prob": True, "moe_router_pre_softmax": True}, True),
        ({"norm_topk_prob": True, "moe_router_pre_softmax": True, **balanced("seq_aux_loss")}, False),
        ({"norm_topk_prob": True, **balanced("pai_megatron_aux_loss")}, False),
        ({"moe_router_num_groups": 8, **balanced("pai_megatron_aux_loss")}, False),
        ({"norm_topk_prob": True, **balanced("softmax_topk")}, True),
        ({"norm_topk_prob": False, **balanced("softmax_topk")}, False),
        ({"norm_topk_prob": True, "moe_router_topk_scaling_factor": 2.5}, True),  # what is scaled first adds up to 1
    ],
)
def test_weights_of_experts_add_up_as_in_the_trainer(changes, expected) -> None:
    assert derive_config(megatron(**MOE | changes), vocab_size=250)["norm_topk_prob"] is expected


def test_a_head_size_that_vllm_takes_from_other_sizes() -> None:
    """What else is refused, is at a start: tests/launch/refusals.py."""
    with pytest.raises(ValueError, match="--kv-channels 64: .*Qwen2MoeForCausalLM"):
        derive_config(megatron(**QWEN2_MOE, kv_channels=64), vocab_size=250)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        derive_config(megatron(normalization="LayerNorm", swiglu=False, squared_relu=True), vocab_size=250)
    assert len(str(caught.value).splitlines()) == 4


# The published config.json of Qwen2.5-7B, as far as it names the model.
QWEN25_7B = dict(model_type="qwen2", hidden_act="silu", rms_norm_eps=1e-06, rope_theta=1000000.0, vocab_size=152064)
QWEN25_7B |= dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28)
QWEN25_7B |= dict(num_key_value_heads=4, tie_word_embeddings=False, use_sliding_window=False)
QWEN25_7B_ARGS = dict(num_layers=28, hidden_size=3584, ffn_hidden_size=18944, num_attention_heads=28, kv_channels=128)
QWEN25_7B_ARGS |= dict(num_query_groups=4, padded_vocab_size=152064, rotary_base=1000000, norm_epsilon=1e-6)
QWEN25_7B_ARGS |= dict(add_qkv_bias=True)


def test_a_published_config(tmp_path) -> None:
    derived = derive_config(megatron(**QWEN25_7B_ARGS), vocab_size=152064)
    assert compare_configs(derived, QWEN25_7B) == []
    wrong = derive_config(megatron(**{**QWEN25_7B_ARGS, "norm_epsilon": 1e-5, "rotary_base": 10000}), vocab_size=152000)
    assert compare_configs(wrong, QWEN25_7B) == [
        "vocab_size: Megatron 152000, Hugging Face 152064",
        "rms_norm_eps: Megatron 1e-05, Hugging Face 1e-06",
        "rope_theta: Megatron 10000.0, Hugging Face 1000000.0",
    ]
    write_config(QWEN25_7B, tmp_path)
    check_against(derived, str(tmp_path))
    with pytest.raises(ValueError, match="(?s)rms_norm_eps.*1e-05.*1e-06"):
        check_against(wrong, str(tmp_path))


def test_both_spellings_of_rope() -> None:
    derived = derive_config(megatron(**LLAMA3), vocab_size=250)
    sizes = {k: v for k, v in derived.items() if not k.startswith("rope")}
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    for factor, differs in ((8, 0), (32.0, 1)):
        scaling = {"factor": factor, **more}
        four = {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **scaling}}
        five = {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", **scaling}}
        assert [len(compare_configs(derived, {**sizes, **rope})) for rope in (four, five)] == [differs] * 2


def test_a_directory_without_config(tmp_path) -> None:
    for says in ("config.json", "vocab_size"):
        with pytest.raises(ValueError, match=says):
            check_against({}, str(tmp_path))
        (tmp_path / "config.json").write_text('{"model_type": "clip"}')
