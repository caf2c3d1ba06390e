"""What a config.json of a model with experts, or with latent attention, has besides the fields of a dense one.

What differs between families stands in their tables (`reshard.families`). `routing_problems` names what trainer and
engine would do differently; the rest is refused by `ModelShape`.
Sources: Megatron's router (topk_routing_with_score_function) and MLA (multi_latent_attention.py), transformers'
modeling_qwen3_moe.py and modeling_deepseek_v3.py, vLLM's qwen3_moe.py and deepseek_v2.py.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from mindspeed_rl_plugin.config.upstream import ROUTING, refusals
from mindspeed_rl_plugin.reshard.shape import LATENT_FIELDS, ModelShape


def expert_config(args: Namespace, shape: ModelShape) -> dict[str, Any]:
    """Fields of a family with experts. Raises ValueError that lists what the engine would route otherwise."""
    problems = list(routing_problems(args, shape))
    if problems:
        raise ValueError("the rollout engine cannot express this model:\n  " + "\n  ".join(problems))
    if not getattr(args, "moe_router_topk", None):
        raise ValueError("--moe-router-topk is not given: how many experts does a token go to?")
    hf, router, dense = shape.table.hf, shape.table.router, shape.dense_layers
    out = {
        hf.experts: shape.experts,
        hf.dense: list(dense) if hf.dense == "mlp_only_layers" else len(dense),
        "num_experts_per_tok": args.moe_router_topk,
        "moe_intermediate_size": shape.expert_ffn,
        "norm_topk_prob": _normalized(args),
    }
    if shape.table.shared_experts:
        out["n_shared_experts"] = shape.shared_ffn // shape.expert_ffn
    if router.grouped:
        out["n_group"] = getattr(args, "moe_router_num_groups", None) or 1
        out["topk_group"] = getattr(args, "moe_router_group_topk", None) or 1
    if router.scaled:
        out["routed_scaling_factor"] = float(_scaling(args))
    if shape.table.mla:
        out |= {field: getattr(shape, size) for size, field in LATENT_FIELDS.items()}
        out |= {"head_dim": shape.rope, "num_key_value_heads": shape.heads}
    return out


def routing_problems(args: Namespace, shape: ModelShape) -> Iterator[str]:
    """One line for each argument with which trainer and engine would send tokens to different experts."""
    yield from refusals(args, ROUTING)
    kinds = getattr(args, "moe_router_load_balancing_type", None) or "aux_loss"
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in _BALANCING:
            known = ", ".join(_BALANCING)
            yield f"--moe-router-load-balancing-type {kind}: the engine takes the top k; give {known}"
    if (getattr(args, "num_experts", 0) or 0) < (getattr(args, "moe_router_topk", None) or 1):
        yield f"--moe-router-topk {args.moe_router_topk}: there are {args.num_experts} experts; give fewer"
    score = getattr(args, "moe_router_score_function", None) or "softmax"
    router, family = shape.table.router, shape.family
    if score != router.score:
        yield f"--moe-router-score-function {score}: family {family} has {router.score}; give it"
    if bool(getattr(args, "moe_router_enable_expert_bias", False)) != router.bias:
        verb = "needs" if router.bias else "has no bias of the router; drop"
        yield f"family {family} {verb} --moe-router-enable-expert-bias"
    if router.score == "sigmoid" and args.moe_router_topk == 1:
        yield "--moe-router-topk 1: with one expert per token, trainer and engine weigh it differently; give more"
    if not router.scaled and _scaling(args) != 1.0:
        yield f"--moe-router-topk-scaling-factor {_scaling(args)}: family {family} does not scale; leave it out"
    groups = getattr(args, "moe_router_group_topk", None)
    if router.grouped and groups and args.moe_router_topk // groups != 2:
        yield (
            f"--moe-router-group-topk {groups}: the engine ranks groups by their two best experts, Megatron by"
            f" {args.moe_router_topk} // {groups}; give half of --moe-router-topk"
        )
    if not router.grouped and (getattr(args, "moe_router_num_groups", None) or 1) > 1:
        groups = args.moe_router_num_groups
        yield f"--moe-router-num-groups {groups}: family {family} has no groups of experts; leave it out"
    rope, scale = getattr(args, "rope_type", None), getattr(args, "rotary_scaling_factor", 1.0)
    if shape.table.mla and rope == "rope" and scale != 1.0 and getattr(args, "mscale_all_dim", 0.0):
        yield f"--rotary-scaling-factor {scale}: with --rope-type rope it scales attention only; leave it out"
    yield from _layer_problems(shape)


def _layer_problems(shape: ModelShape) -> Iterator[str]:
    """Layers without experts, and shared experts, that the family's config.json has no words for."""
    dense, table = shape.dense_layers, shape.table
    if table.hf.dense == "first_k_dense_replace" and dense != tuple(range(len(dense))):
        yield f"--moe-layer-freq with dense layers {list(dense)}: family {shape.family} has them before all others"
    if table.shared_experts and (not shape.shared_ffn or shape.shared_ffn % shape.expert_ffn):
        yield (
            f"--moe-shared-expert-intermediate-size {shape.shared_ffn}: family {shape.family} has whole shared experts"
            f" of --moe-ffn-hidden-size {shape.expert_ffn}; give a multiple of it"
        )
    if not table.shared_experts and shape.shared_ffn:
        yield (
            f"--moe-shared-expert-intermediate-size {shape.shared_ffn}: family {shape.family} has no shared experts;"
            " leave it out"
        )


_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none", "noaux_tc")


def _normalized(args: Namespace) -> bool:
    """Whether the weights of a token's experts add up to 1. MindSpeed-LLM has a flag for it."""
    if getattr(args, "moe_router_score_function", None) == "sigmoid":
        return args.moe_router_topk > 1
    own = getattr(args, "norm_topk_prob", None)
    return not getattr(args, "moe_router_pre_softmax", False) if own is None else bool(own)


def _scaling(args: Namespace) -> float:
    return getattr(args, "moe_router_topk_scaling_factor", None) or 1.0


def latent_scaling(args: Namespace) -> dict[str, Any] | None:
    """rope_scaling of multi-latent attention: None for plain rope, else DeepSeek's YaRN.

    Raises ValueError for what it cannot say.
    """
    kind = getattr(args, "rope_type", None) or "yarn"
    if kind == "rope" or float(args.rotary_scaling_factor) == 1.0:
        return None
    low, high = (float(getattr(args, n, d)) for n, d in (("beta_slow", 1.0), ("beta_fast", 32.0)))
    length = getattr(args, "original_max_position_embeddings", None) or 4096
    return {
        "rope_type": "yarn",
        "factor": float(args.rotary_scaling_factor),
        "original_max_position_embeddings": int(length),
        "beta_fast": high,
        "beta_slow": low,
        "mscale": float(getattr(args, "mscale", 1.0)),
        "mscale_all_dim": float(getattr(args, "mscale_all_dim", 0.0)),
    }
