"""Megatron's arguments for a Hugging Face config: as an imported checkpoint stores them, and as flags that load it."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Any

from mindspeed_rl_plugin.config.flag import spelt
from mindspeed_rl_plugin.engine.hf_config import normalized
from mindspeed_rl_plugin.layout.families import GROUP_LIMITED
from mindspeed_rl_plugin.layout.layout import ModelShape, Parallel

# Attributes without a flag, and attributes whose flag has another name -> that name.
_NO_FLAG = ("add_position_embedding", "world_size", "padded_vocab_size", "hf_tokens")
_OTHER_NAME = {
    "add_bias_linear": "disable_bias_linear",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}


def megatron_arguments(shape: ModelShape, parallel: Parallel, config: Mapping[str, Any]) -> argparse.Namespace:
    """Arguments that describe the model and its layout; `from_megatron_args` of `ModelShape` and `Parallel` read them.
    Fields of the config that have no argument are dropped; `engine.hf_config.compare_configs` finds them."""
    c = normalized(config)
    model = dict(
        num_layers=shape.layers + len(parallel.noop),
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        group_query_attention=shape.groups != shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.value if shape.table.mla else shape.head_dim,
        ffn_hidden_size=shape.ffn,
        vocab_size=shape.vocab,
        padded_vocab_size=shape.padded_vocab,
        make_vocab_size_divisible_by=shape.padded_vocab // parallel.tp,
        max_position_embeddings=c.get("max_position_embeddings", 0),
        untie_embeddings_and_output_weights=not shape.tied,
        add_qkv_bias=shape.table.qkv_bias,
        qk_layernorm=shape.table.qk_norm,
        normalization="RMSNorm",
        norm_epsilon=c["rms_norm_eps"],
        swiglu=True,
        add_bias_linear=False,
        add_position_embedding=True,
        position_embedding_type="rope",
        rotary_base=int(c["rope_theta"]),
    )
    model |= dict(rotary_percent=c["partial_rotary_factor"]) if shape.table.hf.partial else {}
    # Megatron scales RoPE as Llama 3 does, but in another way with latent attention (`_latent`).
    scaling = None if shape.table.mla else c["rope_scaling"]
    model |= dict(use_rope_scaling=True, rope_scaling_factor=scaling.get("factor", 1.0)) if scaling else {}
    model |= _latent(shape, c) if shape.table.mla else {}
    model |= _experts(shape, c, parallel.noop) if shape.experts else {}
    layout = dict(
        world_size=parallel.world,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 and not parallel.folded else None,
        schedules_method="dualpipev" if parallel.folded else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        decoder_first_pipeline_num_layers=parallel.first_layers,
        decoder_last_pipeline_num_layers=parallel.last_layers,
        use_tp_pp_dp_mapping=False,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    layout |= dict(noop_layers=",".join(map(str, parallel.noop))) if parallel.noop else {}
    return argparse.Namespace(**model, **layout)


def flags(args: argparse.Namespace) -> list[str]:
    """Flags of a run that loads the checkpoint, without those for parallel sizes of 1."""
    out = []
    for name, value in sorted(vars(args).items()):
        value = not value if name == "add_bias_linear" else value
        # --expert-tensor-parallel-size is given even if it is 1: its default is the model's tensor parallel size.
        default = value == 1 and name.endswith("parallel_size") and name != "expert_tensor_parallel_size"
        if value and not default and name not in _NO_FLAG:
            out.append(spelt(_OTHER_NAME.get(name, name)))
            if isinstance(value, list):
                out.append("[" + ",".join(map(str, value)) + "]")
            elif value is not True:
                out.append(str(value))
    return out


def _experts(shape: ModelShape, config: Mapping[str, Any], noop: Collection[int]) -> dict[str, Any]:
    pattern = [int(i not in shape.dense_layers) for i in range(shape.layers)]
    for at in sorted(noop):
        pattern.insert(at, 1)
    out = dict(
        num_experts=shape.experts,
        moe_ffn_hidden_size=shape.expert_ffn,
        moe_shared_expert_intermediate_size=shape.shared_ffn or None,
        moe_layer_freq=pattern,
        moe_router_topk=config["num_experts_per_tok"],
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
    )
    if shape.table.shared_gate:
        out["moe_shared_expert_gate"] = True
    router = shape.table.router
    if router.score == "softmax":
        out["moe_router_pre_softmax"] = not config["norm_topk_prob"]
    else:
        out["moe_router_score_function"] = router.score
    if router.bias:
        out["moe_router_enable_expert_bias"] = True
    if router.scaled:
        out["moe_router_topk_scaling_factor"] = config["routed_scaling_factor"]
    if router.by_best:
        # MindSpeed-LLM's layer needs this load-balancing loss. RL does not want it, so its coefficient is nearly 0.
        out |= dict(moe_router_load_balancing_type=GROUP_LIMITED, moe_aux_loss_coeff=1e-9)
    if router.grouped and config["n_group"] > 1:
        out |= dict(moe_router_num_groups=config["n_group"], moe_router_group_topk=config["topk_group"])
    return out


def _latent(shape: ModelShape, config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = config["rope_scaling"] or {}
    out = dict(
        multi_latent_attention=True,
        q_lora_rank=shape.q_lora or None,
        kv_lora_rank=shape.kv_lora,
        qk_head_dim=shape.nope,
        qk_pos_emb_head_dim=shape.rope,
        v_head_dim=shape.value,
    )
    growth = dict(mscale=scaling.get("mscale", 1.0), mscale_all_dim=scaling.get("mscale_all_dim", 0.0))
    turns = {name: int(scaling.get(name, 0)) for name in ("beta_fast", "beta_slow")}
    original = int(scaling.get("original_max_position_embeddings", 0))
    if not scaling:
        return out | dict(rope_type="rope", rotary_scaling_factor=1.0)
    if (*turns.values(), original) == (32, 1, 4096):
        return out | dict(rope_type="yarn", rotary_scaling_factor=scaling["factor"]) | growth
    # Only MindSpeed-LLM has flags for other values (Kimi K2).
    own = {"factor": scaling["factor"], "original_max_position_embeddings": original} | growth
    return out | turns | {"rope_scaling_type": "yarn"} | {f"rope_scaling_{name}": value for name, value in own.items()}
