"""Megatron arguments that no family expresses, each with the values that are fine and what to do about others."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

_OFF = (False, None, 0, "")
_PLAIN = "the families have no such thing; leave it out"

ARGUMENTS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "normalization": (("RMSNorm",), "give --normalization RMSNorm"),
    "swiglu": ((True,), "give --swiglu; the families have a gated SiLU MLP"),
    "add_bias_linear": ((False,), "give --disable-bias-linear"),
    "position_embedding_type": (("rope",), "give --position-embedding-type rope"),
    "rotary_interleaved": (_OFF, "the families rotate halves; drop --rotary-interleaved"),
    "rotary_percent": ((1.0,), "the families rotate the whole head; drop --rotary-percent"),
    "no_rope_freq": (_OFF, "the families rotate in every layer"),
    "apply_layernorm_1p": (_OFF, "norm weights are stored minus one; drop --apply-layernorm-1p"),
    "layernorm_zero_centered_gamma": (_OFF, "norm weights are stored minus one; drop --apply-layernorm-1p"),
    "qk_l2_norm": (_OFF, "the families have no L2 norm of q and k"),
    "squared_relu": (_OFF, "the families have a gated SiLU MLP"),
    "quick_geglu": (_OFF, "the families have a gated SiLU MLP"),
    "openai_gelu": (_OFF, "the families have a gated SiLU MLP"),
    "geglu": (_OFF, "the families have a gated SiLU MLP"),
    "attention_output_gate": (_OFF, "the families have no gate on the attention output"),
    "experimental_attention_variant": (_OFF, "the families have plain attention"),
    "softmax_type": (("vanilla", None), "the families have no learned softmax offset"),
    "is_hybrid_model": (_OFF, "hybrid models are not supported"),
    "hybrid_layer_pattern": (_OFF, "hybrid models are not supported"),
    "heterogeneous_layers_config_path": (_OFF, "all layers must be alike"),
    "heterogeneous_layers_config_encoded_json": (_OFF, "all layers must be alike"),
    "use_legacy_models": (_OFF, "only Megatron core models are supported; drop --use-legacy-models"),
    "use_megatron_fsdp": (_OFF, "parameters must be whole on each rank; use the distributed optimizer instead"),
    "use_torch_fsdp2": (_OFF, "parameters must be whole on each rank; use the distributed optimizer instead"),
    "gtp_weight_remat_size": ((1, None), "drop --tensor-parallel-num-weight-shards; weights must be whole"),
    "apply_residual_connection_post_layernorm": (_OFF, _PLAIN),
    "glu_linear_offset": ((0.0,), _PLAIN),
    "activation_func_clamp_value": ((None,), _PLAIN),
    "rotary_seq_len_interpolation_factor": ((None, 1), _PLAIN),
    "window_size": ((None,), _PLAIN),
    "softmax_scale": ((None,), _PLAIN),
    "hybrid_override_pattern": ((None,), "hybrid models are not supported"),
    "use_mup": (_OFF, _PLAIN),
    # MindSpeed and MindSpeed-LLM
    "noop_layers": (_OFF, "layers that do nothing are not supported; drop --noop-layers"),
    "tp_2d": (_OFF, "2-D tensor parallelism is not supported; drop --tp-2d"),
    "use_nd_matmul": (_OFF, "N-D matmul is not supported; drop --use-nd-matmul"),
    "post_norm": (_OFF, "the families have no norm after attention and MLP"),
    "input_embeds_norm": (_OFF, "the families do not scale embeddings"),
    "embedding_multiplier_scale": ((1.0, None), "the families do not scale embeddings"),
    "output_multiplier_scale": ((None, 1.0), "the families do not scale logits"),
    "output_logit_softcapping": (_OFF, "the families do not cap logits"),
    "attn_logit_softcapping": (_OFF, "the families do not cap attention logits"),
    "scale_depth": (_OFF, "the families do not scale residuals"),
    "dim_model_base": (_OFF, "the families do not scale logits"),
    "add_dense_bias": (_OFF, _PLAIN),
    "add_output_layer_bias": (_OFF, _PLAIN),
    "add_rmsnorm_offset": (_OFF, _PLAIN),
    "no_post_layer_norm": (_OFF, _PLAIN),
    "gelu_tanh": (_OFF, "the families have a gated SiLU MLP"),
    "fc_type": ((None,), _PLAIN),
    "share_kvstates": (_OFF, _PLAIN),
    "cla_share_factor": ((1,), _PLAIN),
    "full_attention_interval": (_OFF, "the families have plain attention"),
    "scale_emb": ((None,), "the families do not scale embeddings"),
    "query_pre_attn_scalar": ((None,), _PLAIN),
    "sliding_window": ((None,), "the families have plain attention"),
    "interleave_sliding_window": ((None,), "the families have plain attention"),
    "partial_rotary_factor": ((0.0,), "the families rotate the whole head"),
    "dynamic_factor": ((1.0,), _PLAIN),
    "use_glm_rope": (_OFF, "the families rotate halves"),
}

# What else a model with experts, or with multi-latent attention, must not have.
EXPERTS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "moe_shared_expert_gate": (_OFF, "the families' shared experts have no gate"),
    "use_shared_expert_gate": (_OFF, "the families' shared experts have no gate"),
    "moe_latent_size": (_OFF, "the families' experts work on the whole hidden state"),
}
LATENT: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "mla_mm_split": (_OFF, "up projections that are split are not supported; drop --mla-mm-split"),
    "enable_dsa_indexer": (_OFF, "the families have no sparse attention"),
}

# Of these, what training itself cannot work with, engine or not: weights that are not whole, or other groups of ranks.
TRAINING = ("use_legacy_models", "use_megatron_fsdp", "use_torch_fsdp2", "gtp_weight_remat_size", "tp_2d")


def refused_in_training(args: argparse.Namespace) -> list[str]:
    """One line per argument with which no algorithm can train, also one that generates nothing."""
    return _refused(args, {name: ARGUMENTS[name] for name in TRAINING})


def refused(args: argparse.Namespace) -> list[str]:
    """One line per argument that no family expresses."""
    tables = [ARGUMENTS]
    if getattr(args, "num_experts", None):
        tables.append(EXPERTS)
    if getattr(args, "multi_latent_attention", None):
        tables.append(LATENT)
    return [line for table in tables for line in _refused(args, table)]


def _refused(args: argparse.Namespace, table: Mapping[str, tuple[tuple[Any, ...], str]]) -> list[str]:
    # Where an argument is unknown to a Megatron version, its first allowed value is assumed.
    given = {name: getattr(args, name, allowed[0]) for name, (allowed, _) in table.items()}
    return [f"{name} is {given[name]!r}: {fix}" for name, (allowed, fix) in table.items() if given[name] not in allowed]
