"""Model families as tables: every stored parameter, its names in trainer and engine, and how it is split.

A row describes one *stored* parameter (one tensor on a Megatron rank or an engine rank) by the *canonical* tensors
inside it: those of the Hugging Face checkpoint, unsplit and unpadded. A new family is one entry of `FAMILIES`: its
rows, its router, and the fields that its config.json leaves out or names differently. Other files with names of
families are `tools/layout_args.py` (sizes of published models) and `checkpoints/conversion.py`. `family_table.py`
defines the types of the table, `ModelShape._sizes` the names of sizes.

Megatron's flags tell families apart:

    Llama, Mistral   none of these          Qwen2, Qwen2.5, Seed-OSS   --add-qkv-bias
    Qwen3            --qk-layernorm         Qwen2-MoE, GLM-4.5 Air     --add-qkv-bias --num-experts
    Mixtral          --num-experts          Qwen3-MoE, Ling            --qk-layernorm --num-experts
    GLM-4.5 (355B)                          --add-qkv-bias --qk-layernorm --num-experts
    DeepSeek-V2, DeepSeek-V3, Kimi K2       --qk-layernorm --num-experts --multi-latent-attention

Families with the same flags differ in --moe-router-score-function, --rotary-percent (Ling), --kv-channels (Seed-OSS)
or --moe-router-load-balancing-type (DeepSeek-V2 with groups of experts).

Sources: Megatron core 0.12.1, 0.16.1 and 0.19 (models/gpt/gpt_layer_specs.py, transformer/moe/experts.py,
shared_experts.py, multi_latent_attention.py), MindSpeed-LLM 2.3.0 and 26.1.0 (tasks/models/spec), vLLM 0.32
(models/llama.py, qwen2.py, qwen3.py, mixtral.py, qwen2_moe.py, qwen3_moe.py, glm4_moe.py, bailing_moe.py,
deepseek_v2.py). vllm-ascend loads these models under the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mindspeed_rl_plugin.layout.family_rows import (
    BAILING,
    BAILING_BIAS,
    DEEPSEEK_ROWS,
    DENSE_MLP,
    GATED_EXPERT,
    PLAIN_ATTENTION,
    QK_NORM,
    QKV_BIAS,
    ROUTED,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    routed,
)
from mindspeed_rl_plugin.layout.family_table import Family, HfConfig, Router

GROUP_LIMITED = "group_limited_greedy"  # groups are ranked by their best expert; a name of DeepSeek and MindSpeed-LLM
_GROUPS = {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
_BIASED_ROUTER = Router("sigmoid", bias=True, grouped=True, scaled=True)
# Names of fields that GLM, Ling and DeepSeek have in common.
_OF_DEEPSEEK = HfConfig(
    defaults=_GROUPS,
    written={"num_nextn_predict_layers": 0},
    synonyms={"num_local_experts": "n_routed_experts"},
    experts="n_routed_experts",
    dense="first_k_dense_replace",
    mtp="num_nextn_predict_layers",
)

FAMILIES = {
    "llama": Family("LlamaForCausalLM", PLAIN_ATTENTION + DENSE_MLP),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        PLAIN_ATTENTION + QKV_BIAS + DENSE_MLP,
        qkv_bias=True,
        # The model's code always has the bias; a field of config.json for it, if there is any, is not read.
        hf=HfConfig(code={"attention_bias": True}, own_head_dim=False),
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        PLAIN_ATTENTION + QKV_BIAS + DENSE_MLP,
        qkv_bias=True,
        hf=HfConfig(
            fixed={"attention_bias": True, "attention_out_bias": False},
            written={"residual_dropout": 0.0},
            # Only some versions of vLLM have Seed-OSS. vLLM's Llama adds it if InternLM's field `qkv_bias` is set.
            engine={"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
            | {"attention_bias": False, "qkv_bias": True},
        ),
    ),
    "qwen3": Family("Qwen3ForCausalLM", PLAIN_ATTENTION + QK_NORM + DENSE_MLP, qk_norm=True),
    "mixtral": Family(
        "MixtralForCausalLM",
        PLAIN_ATTENTION + routed("block_sparse_moe", ("w1", "w3"), "w2"),
        experts=True,
        hf=HfConfig(
            code={"norm_topk_prob": True},
            experts="num_local_experts",
            expert_ffn="intermediate_size",
            dense="",
            window=True,
        ),
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        PLAIN_ATTENTION + QKV_BIAS + DENSE_MLP + ROUTED + GATED_EXPERT,
        qkv_bias=True,
        experts=True,
        hf=HfConfig(
            defaults={"norm_topk_prob": False, "mlp_only_layers": []},
            fixed={"decoder_sparse_step": 1, "qkv_bias": True},
            code={"attention_bias": True},
            synonyms={"num_local_experts": "num_experts"},
            shared="shared_expert_intermediate_size",
            own_head_dim=False,
        ),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        PLAIN_ATTENTION + QK_NORM + DENSE_MLP + ROUTED,
        qk_norm=True,
        experts=True,
        hf=HfConfig(
            defaults={"norm_topk_prob": False, "mlp_only_layers": []},
            fixed={"decoder_sparse_step": 1},
            synonyms={"num_local_experts": "num_experts"},
        ),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        PLAIN_ATTENTION + QKV_BIAS + DENSE_MLP + routed(wide=True) + ROUTER_BIAS + SHARED_EXPERTS,
        qkv_bias=True,
        experts=True,
        router=_BIASED_ROUTER,
        hf=replace(
            _OF_DEEPSEEK,
            defaults=_GROUPS | {"partial_rotary_factor": 0.5},
            fixed={"use_qk_norm": False},
            partial=True,
        ),
    ),
    "bailing_moe": Family(  # Ling 2.0
        "BailingMoeV2ForCausalLM",
        BAILING + BAILING_BIAS + SHARED_EXPERTS,
        qk_norm=True,
        experts=True,
        router=_BIASED_ROUTER,
        hf=replace(
            _OF_DEEPSEEK,
            fixed={"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "use_qk_norm": True}
            | {"use_bias": False, "use_qkv_bias": False},
            written={"num_nextn_predict_layers": 0, "use_rmsnorm": True, "norm_head": False}
            | {"embedding_dropout": 0.0, "output_dropout": 0.0},
            synonyms={},
            experts="num_experts",
            shared="num_shared_experts",
            partial=True,
        ),
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        DEEPSEEK_ROWS,
        qk_norm=True,
        experts=True,
        mla=True,
        router=Router(scaled=True),
        hf=replace(
            _OF_DEEPSEEK,
            defaults={"routed_scaling_factor": 1.0},
            fixed={"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1},
            written={"n_group": 1, "topk_group": 1},
            mtp="",
        ),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        DEEPSEEK_ROWS + ROUTER_BIAS,
        qk_norm=True,
        experts=True,
        mla=True,
        router=_BIASED_ROUTER,
        hf=replace(
            _OF_DEEPSEEK,
            fixed={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_interleave": True, "moe_layer_freq": 1},
        ),
    ),
}
# Families with the `model_type` of another family: GLM-4.5 (355B), and DeepSeek-V2 (236B), which has groups of experts.
FAMILIES["glm4_moe_355b"] = replace(
    FAMILIES["glm4_moe"],
    rows=FAMILIES["glm4_moe"].rows + QK_NORM,
    qk_norm=True,
    hf=replace(FAMILIES["glm4_moe"].hf, fixed={"use_qk_norm": True}),
    model_type="glm4_moe",
)
FAMILIES["deepseek_v2_236b"] = replace(
    FAMILIES["deepseek_v2"],
    router=Router(grouped=True, by_best=True, scaled=True),
    hf=replace(
        FAMILIES["deepseek_v2"].hf,
        fixed=FAMILIES["deepseek_v2"].hf.fixed | {"topk_method": GROUP_LIMITED},
        written={},
    ),
    model_type="deepseek_v2",
)
# Families with the rows of another family, and their own `model_type`.
FAMILIES["mistral"] = replace(FAMILIES["llama"], hf=HfConfig(window=True), twin="llama")
FAMILIES["kimi_k2"] = replace(FAMILIES["deepseek_v3"], twin="deepseek_v3")


def family_of(config: Mapping[str, Any]) -> str:
    """Family of a config.json; "" if no family has its `model_type`. If several have it: the family with the fewest
    `fixed` fields whose value in the config differs."""
    named = [n for n, f in FAMILIES.items() if (f.model_type or n) == config.get("model_type")]

    def differ(name: str) -> int:
        return sum(config.get(field, value) != value for field, value in FAMILIES[name].hf.fixed.items())

    return min(named, key=differ, default="")


def find_family(
    *,
    qkv_bias: bool,
    qk_norm: bool,
    experts: bool = False,
    mla: bool = False,
    score: str = "softmax",
    partial: bool = False,
    own_head_dim: bool = False,
    by_best: bool = False,
) -> str:
    """Name of the one family with these traits.

    score: of the router; partial: whether only a part of a head is rotated; own_head_dim: whether the head size is not
    hidden size / heads; by_best: as in `Router`. These four only decide between families that are equal in the rest.
    Raises ValueError if no family has the traits, or several have them.
    """
    wanted = (qkv_bias, qk_norm, experts, mla)
    alike = [n for n, f in FAMILIES.items() if (f.qkv_bias, f.qk_norm, f.experts, f.mla) == wanted and not f.twin]
    fitting = alike if len(alike) == 1 else [n for n in alike if FAMILIES[n].router.score == score]
    for trait, value in (("partial", partial), ("own_head_dim", own_head_dim)):
        fitting = [n for n in fitting if getattr(FAMILIES[n].hf, trait) == value] or fitting
    fitting = [n for n in fitting if FAMILIES[n].router.by_best == by_best] or fitting
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ValueError(f"the families {', '.join(fitting)} all have {_traits(*wanted)}: make them differ in a trait")
    if alike:
        traits = _traits(*wanted) + f" and moe_router_score_function={score!r}"
        raise ValueError(f"of the families {', '.join(alike)} none has {traits}")
    known = "; ".join(f"{n}: {_traits(f.qkv_bias, f.qk_norm, f.experts, f.mla)}" for n, f in FAMILIES.items())
    raise ValueError(
        f"no model family has {_traits(*wanted)}; known families: {known}. "
        "Change the flags, or add a family to mindspeed_rl_plugin/layout/families.py"
    )


def _traits(qkv_bias: bool, qk_norm: bool, experts: bool, mla: bool) -> str:
    more = ", experts" * experts + ", multi-latent attention" * mla
    return f"add_qkv_bias={qkv_bias} with qk_layernorm={qk_norm}{more}"
