"""The fields of a config.json that only models with experts, or with latent attention, have.

Differences between families are in their tables (`layout.families`). `routing_problems` names arguments with which
trainer and engine would differ; `ModelShape` refuses what no family supports. Sources: Megatron's router
(topk_routing_with_score_function) and MLA (multi_latent_attention.py), transformers' modeling_qwen3_moe.py and
modeling_deepseek_v3.py, vLLM's qwen3_moe.py and deepseek_v2.py.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from mindspeed_rl_plugin.checks.refused_flags import ROUTING, refusals
from mindspeed_rl_plugin.layout.families import GROUP_LIMITED
from mindspeed_rl_plugin.layout.shape import LATENT_FIELDS, ModelShape


def expert_config(args: Namespace, shape: ModelShape) -> dict[str, Any]:
    """Fields of a family with experts. Raises ValueError for `routing_problems` and for a missing --moe-router-topk."""
    problems = list(routing_problems(args, shape))
    if problems:
        raise ValueError("the rollout engine cannot express this model:\n  " + "\n  ".join(problems))
    if not getattr(args, "moe_router_topk", None):
        raise ValueError("--moe-router-topk is not given; it is the number of experts to which a token goes")
    hf, router, dense = shape.table.hf, shape.table.router, shape.dense_layers
    out = {
        hf.experts: shape.experts,
        hf.expert_ffn: shape.expert_ffn,
        "num_experts_per_tok": args.moe_router_topk,
    }
    if hf.dense:
        out[hf.dense] = list(dense) if hf.dense == "mlp_only_layers" else len(dense)
    routing = _routing(args)
    out["norm_topk_prob"] = routing["norm_topk_prob"]
    if shape.table.shared_experts:
        out[hf.shared] = shape.shared_ffn // (1 if hf.shared.endswith("size") else shape.expert_ffn)
    if router.grouped:
        out |= {name: routing[name] for name in ("n_group", "topk_group")}
    if router.scaled:
        out["routed_scaling_factor"] = routing["routed_scaling_factor"]
    if shape.table.mla:
        out |= {field: getattr(shape, size) or None for size, field in LATENT_FIELDS.items()}
        out |= {"head_dim": shape.rope, "num_key_value_heads": shape.heads}
    return out


def routing_problems(args: Namespace, shape: ModelShape) -> Iterator[str]:
    """One line for each argument with which trainer and engine compute experts or latent attention differently."""
    yield from refusals(args, ROUTING)
    yield from _balancing_problems(args, shape)
    yield from _router_problems(args, shape)
    yield from _weight_problems(args, shape)
    yield from _gate_problems(args, shape)
    yield from _layer_problems(shape)


def _balancing_problems(args: Namespace, shape: ModelShape) -> Iterator[str]:
    score, routing = getattr(args, "moe_router_score_function", None) or "softmax", _routing(args)
    # routing_tp_extend_ep of MindSpeed's moe_feature/common.py; MindSpeed-LLM has --norm-topk-prob, and its own router
    plain = (score, routing["n_group"], routing["routed_scaling_factor"]) == ("softmax", 1, 1.0)
    plain = plain or hasattr(args, "norm_topk_prob")
    for kind in _balancing(args):
        if kind == GROUP_LIMITED and shape.table.router.by_best:
            yield from _group_limited_problems(args)
        elif kind not in _BALANCING:
            known = ", ".join(_BALANCING)
            yield f"--moe-router-load-balancing-type {kind}: the engine always chooses the top k; give {known}"
        elif kind in _SOFTMAX_ONLY and score != "softmax":
            yield (
                f"--moe-router-load-balancing-type {kind} ignores --moe-router-score-function {score}, and uses "
                "softmax; give --moe-router-score-function softmax"
            )
        elif kind == "none" and not plain and getattr(args, "moe_tp_extend_ep", False):
            yield (
                "--moe-tp-extend-ep with --moe-router-load-balancing-type none: MindSpeed's router then ignores score "
                f"function ({score}), bias, groups and scaling factor; give --moe-router-load-balancing-type aux_loss "
                "--moe-aux-loss-coeff 0"
            )


def _group_limited_problems(args: Namespace) -> Iterator[str]:
    """Arguments that MindSpeed-LLM's code for group_limited_greedy cannot handle. Source:
    group_limited_greedy_topKgating and moe_layer_forward."""
    rows = getattr(args, "micro_batch_size", 1)
    if rows != 1:
        yield f"--micro-batch-size {rows}: --moe-router-load-balancing-type {GROUP_LIMITED} supports only 1; give 1"
    if not getattr(args, "moe_aux_loss_coeff", 0.0):
        yield (
            f"--moe-aux-loss-coeff 0: with --moe-router-load-balancing-type {GROUP_LIMITED} an expert layer needs a "
            "load balancing loss; give a number above 0, for example 1e-9 if balance should not matter"
        )
    if getattr(args, "moe_alltoall_overlap_comm", False):
        yield (
            f"--moe-alltoall-overlap-comm with --moe-router-load-balancing-type {GROUP_LIMITED}: an expert layer then "
            "needs the load balancing loss also in passes without gradients; leave the first flag out"
        )
    ranks, chosen = getattr(args, "expert_model_parallel_size", 1), getattr(args, "moe_router_group_topk", None)
    if chosen is None or chosen >= ranks:
        yield (
            f"--moe-router-group-topk {chosen}: for {GROUP_LIMITED} it must be less than "
            f"--expert-model-parallel-size {ranks}; change one of them"
        )


def _router_problems(args: Namespace, shape: ModelShape) -> Iterator[str]:
    router, family, routing = shape.table.router, shape.family, _routing(args)
    if (getattr(args, "num_experts", 0) or 0) < (getattr(args, "moe_router_topk", None) or 1):
        yield f"--moe-router-topk {args.moe_router_topk}: there are only {args.num_experts} experts; give fewer"
    score = getattr(args, "moe_router_score_function", None) or "softmax"
    if score != router.score:
        yield f"--moe-router-score-function {score}: family {family} has the function {router.score}; give it"
    if bool(getattr(args, "moe_router_enable_expert_bias", False)) != router.bias:
        verb = "needs" if router.bias else "has no router bias; drop"
        yield f"family {family} {verb} --moe-router-enable-expert-bias"
    n, groups = routing["n_group"], routing["topk_group"]
    if router.grouped and not router.by_best and n > 1 and args.moe_router_topk // groups != 2:
        yield (
            f"--moe-router-group-topk {groups}: the engine ranks a group by its 2 best experts, Megatron by its "
            f"{args.moe_router_topk // groups} best; give half of --moe-router-topk"
        )
    if not router.grouped and n > 1:
        yield f"--moe-router-num-groups {n}: family {family} has no groups of experts; leave it out"


def _weight_problems(args: Namespace, shape: ModelShape) -> Iterator[str]:
    """Arguments that scale the outputs of experts, or the scores of latent attention, differently than the engine."""
    router, family, routing = shape.table.router, shape.family, _routing(args)
    if router.score == "sigmoid" and args.moe_router_topk == 1:
        yield "--moe-router-topk 1: trainer and engine give the only expert of a token different weights; give more"
    if not router.scaled and (scaling := routing["routed_scaling_factor"]) != 1.0:
        yield f"--moe-router-topk-scaling-factor {scaling}: family {family} has no scaling factor; leave it out"
    for name, value in (shape.table.hf.fixed | shape.table.hf.code).items():
        if routing.get(name, value) != value:
            yield (
                f"the weights of a token's experts {'add' if routing[name] else 'do not add'} up to 1, but in family "
                f"{family} they {'do' if value else 'do not'}; change --moe-router-pre-softmax (MindSpeed-LLM: "
                "--norm-topk-prob)"
            )
    rope, scale = getattr(args, "rope_type", None), getattr(args, "rotary_scaling_factor", 1.0)
    if shape.table.mla and rope == "rope" and scale != 1.0 and getattr(args, "mscale_all_dim", 0.0):
        yield f"--rotary-scaling-factor {scale}: with --rope-type rope it scales only attention scores; leave it out"


def _gate_problems(args: Namespace, shape: ModelShape) -> Iterator[str]:
    family, needed = shape.family, shape.table.shared_gate
    gate = any(getattr(args, name, False) for name in ("moe_shared_expert_gate", "shared_expert_gate"))
    if gate != needed:
        flag = "--moe-shared-expert-gate (MindSpeed-LLM: --shared-expert-gate)"
        yield f"family {family} {'needs' if needed else 'has no gate for shared experts; drop'} {flag}"
    width = getattr(args, "shared_expert_gate_output_dimension", 1)
    if gate and width != 1:
        yield f"--shared-expert-gate-output-dimension {width}: in family {family} the gate has 1 output; give 1"


def _layer_problems(shape: ModelShape) -> Iterator[str]:
    """Arguments of dense layers, and of shared experts, that the family's config.json cannot express."""
    dense, table = shape.dense_layers, shape.table
    if dense and not table.hf.dense:
        yield f"--moe-layer-freq with dense layers {list(dense)}: family {shape.family} has experts in every layer"
    if table.hf.dense == "first_k_dense_replace" and dense != tuple(range(len(dense))):
        yield f"--moe-layer-freq with dense layers {list(dense)}: in family {shape.family} dense layers must come first"
    counted = not table.hf.shared.endswith("size")
    if table.shared_experts and (not shape.shared_ffn or counted and shape.shared_ffn % shape.expert_ffn):
        yield (
            f"--moe-shared-expert-intermediate-size {shape.shared_ffn}: family {shape.family} needs shared experts"
            f"{', each of --moe-ffn-hidden-size' * counted}; give a multiple of {shape.expert_ffn}"
        )
    if not table.shared_experts and shape.shared_ffn:
        yield (
            f"--moe-shared-expert-intermediate-size {shape.shared_ffn}: family {shape.family} has no shared experts;"
            " leave out that flag and --n-shared-experts"
        )


_SOFTMAX_ONLY = ("pai_megatron_aux_loss", "softmax_topk")  # of MindSpeed-LLM
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none", "noaux_tc", *_SOFTMAX_ONLY)


def _balancing(args: Namespace) -> list[str]:
    kinds = getattr(args, "moe_router_load_balancing_type", None) or "aux_loss"
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _routing(args: Namespace) -> dict[str, Any]:
    """Fields of a config.json that describe the trainer's routing of tokens.

    In MindSpeed-LLM they also depend on the kind of load balancing. Sources: topk_softmax_with_capacity of Megatron's
    moe_utils.py; topk_router_routing of MindSpeed-LLM's router.py, and its pai_megatron.py.
    """
    kinds, normalize = _balancing(args), getattr(args, "norm_topk_prob", False)
    out = {
        "norm_topk_prob": not getattr(args, "moe_router_pre_softmax", False),
        "routed_scaling_factor": float(getattr(args, "moe_router_topk_scaling_factor", None) or 1.0),
        "n_group": getattr(args, "moe_router_num_groups", None) or 1,
        "topk_group": getattr(args, "moe_router_group_topk", None) or 1,
    }
    if getattr(args, "moe_router_score_function", None) == "sigmoid":
        out["norm_topk_prob"] = args.moe_router_topk > 1
    if out["n_group"] == 1:
        out["topk_group"] = 1
    if kinds == ["aux_loss"] and normalize:  # weights are normalized after the scaling, so scaling has no effect
        out |= {"norm_topk_prob": True, "routed_scaling_factor": 1.0}
    if kinds == [GROUP_LIMITED]:  # weights are scaled only if they are not normalized
        summed = bool(normalize and args.moe_router_topk > 1)
        groups = args.moe_router_num_groups or args.expert_model_parallel_size
        out |= {"norm_topk_prob": summed, "n_group": groups, "topk_group": args.moe_router_group_topk}
        out |= {"routed_scaling_factor": 1.0} if summed else {}
    if kinds == ["softmax_topk"]:
        out |= {"norm_topk_prob": normalize, "n_group": 1, "topk_group": 1}
    if kinds == ["pai_megatron_aux_loss"]:
        out |= {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
    return out
