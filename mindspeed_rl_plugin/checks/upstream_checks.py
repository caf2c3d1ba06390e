"""Checks of combinations of upstream flags, also with our flags; `refused_flags` has single flags."""

from __future__ import annotations

import importlib.metadata
import math
import sys
from collections.abc import Iterator
from typing import Any

from mindspeed_rl_plugin.algorithms.presets import learns_from_pairs
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.flag import spelt
from mindspeed_rl_plugin.forward.settings import AUXILIARY, length_multiple

# MindSpeed's context parallel algorithms that RL accepts, and those that it refuses, with the reasons.
CONTEXT_ALGORITHMS = ("megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo")
_NO_CONTEXT_ALGORITHMS = {
    "kvallgather_cp_algo": "gathers keys and values in another attention, which was not tested with RL",
    "adaptive_cp_algo": "distributes positions by the attention mask, but RL passes no mask",
    "hybrid_adaptive_cp_algo": "distributes positions by the attention mask, but RL passes no mask",
}
# Types of load balancing that have no loss.
_NO_BALANCE = ("none", "noaux_tc", ["none"])
# Attributes with which a token does not attend to exactly its own ancestors in packed rows, and what they ask for.
_OTHER_ATTENTION = {
    "window_size": "sliding windows",
    "sliding_window": "sliding windows",
    "interleave_sliding_window": "sliding windows",
    "is_hybrid_model": "state-space layers",
    "hybrid_layer_pattern": "state-space layers",
    "experimental_attention_variant": "another attention",
    "softmax_type": "attention sinks",
}
# The same where hooks of layers are needed, by which they know branches of trees and given experts.
OUTSIDE_OF_LAYERS = {
    "moe_fb_overlap": "runs parts of a layer outside of its forward pass",
    "overlap_moe_expert_parallel_comm": "runs parts of a layer outside of its forward pass",
    "moe_zero_memory": "runs parts of a layer outside of its forward pass",
}
_CAPACITY = {"moe_expert_capacity_factor": "experts have places for fewer tokens than the rows have"}
_EXPERTS_OUTSIDE = {
    "swap_attention": "recomputes experts outside of their layer's forward pass",
    "moe_alltoall_overlap_comm": "with --moe-layer-recompute it recomputes experts by itself",
    "moe_allgather_overlap_comm": "with --moe-layer-recompute it recomputes experts by itself",
}
# pai_megatron_aux_loss of mindspeed_llm/tasks/models/common/pai_megatron.py, with the dispatcher allgather.
_GATHERED = {"moe_permutation_async_comm": "pai_megatron_aux_loss then returns experts of the tokens of all ranks"}
_NOT_GIVEN = (None, False, "", "vanilla", "disable")
_ATTENTION_MODULE = "megatron.core.transformer.dot_product_attention"
_ADAPTOR = "mindspeed.core.context_parallel.adaptor"  # of MindSpeed's ulysses


def ranks(args: Any, trainers: str = "") -> Iterator[str]:
    """Refuses parallel sizes that do not divide the number of ranks; Megatron's message only names their product.
    trainers: for the message, how the number of ranks that train is computed."""
    kinds = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    sizes = {kind: getattr(args, f"{kind}_parallel_size", None) or 1 for kind in kinds}
    if getattr(args, "expert_tensor_parallel_size", None) is None:
        sizes["expert_tensor"] = sizes["tensor_model"]
    for of in (kinds[:3], (*kinds[1:2], *kinds[3:]))[: 2 if getattr(args, "num_experts", None) else 1]:
        product, world = math.prod(sizes[kind] for kind in of), getattr(args, "world_size", 0)
        if world % product:
            given = [f"{spelt(kind)}-parallel-size {sizes[kind]}" for kind in of if sizes[kind] > 1]
            made = f"{' x '.join(given)} = {product}" if len(given) > 1 else given[0]
            yield (
                f"{made} does not divide the {world} ranks {'that train' if trainers else 'of this job'}{trainers}; "
                f"start a multiple of {product} ranks (nodes x ranks of a node), or lower one of the sizes"
            )


# Sizes, and the sizes of which they must be multiples. Megatron checks some only when it builds the model.
_MULTIPLES = {
    "num_attention_heads": ("tensor_model_parallel_size", "num_query_groups"),
    "num_experts": ("expert_model_parallel_size", "moe_router_num_groups"),
}


def multiples(args: Any) -> Iterator[str]:
    """Refuses heads, query groups and experts that do not divide among ranks or groups."""
    for name, divisors in _MULTIPLES.items():
        total = getattr(args, name, None)
        for divisor in divisors if total else ():
            if total % (size := getattr(args, divisor, None) or 1):
                flag, by = (spelt(each) for each in (name, divisor))
                yield f"{flag} {total} is not a multiple of {by} {size}; change one of them"
    tp, groups = (getattr(args, name, None) or 1 for name in ("tensor_model_parallel_size", "num_query_groups"))
    # Before core 0.13 each rank needs complete groups; from 0.13 on, ranks may share a group.
    whole = getattr(sys.modules.get("megatron.core.package_info"), "MINOR", 99) < 13
    if getattr(args, "group_query_attention", False) and groups % tp and (whole or tp % groups):
        yield (
            f"--num-query-groups {groups} is not a multiple {'' if whole else 'or a divisor '}of "
            f"--tensor-model-parallel-size {tp}; change one of them"
        )


def context_parallel(args: Any, config: RLConfig) -> Iterator[str]:
    """Refuses flags that do not work with `--context-parallel-size` above 1."""
    size = args.context_parallel_size
    if size == 1:
        return
    given, multiple = f"--context-parallel-size {size}", length_multiple(args)
    if args.seq_length % multiple:
        yield (
            f"--seq-length {args.seq_length} is not a multiple of {multiple}, which {given} needs (2 pieces per rank, "
            "each split over --tensor-model-parallel-size under --sequence-parallel); change it"
        )
    algorithm = getattr(args, "context_parallel_algo", None)
    implementation = getattr(args, "transformer_impl", "local")
    if config.forward.pack_sequences and (algorithm, implementation) != ("ulysses_cp_algo", "local"):
        yield (
            f"--rl-pack-sequences with {given}: only MindSpeed's ulysses with its local attention has complete rows; "
            "others would split each packed row, which RL does not support; give --context-parallel-algo "
            "ulysses_cp_algo and --transformer-impl local, or remove --rl-pack-sequences"
        )
    if algorithm not in (None, *CONTEXT_ALGORITHMS):
        why = _NO_CONTEXT_ALGORITHMS.get(algorithm, "is not known under RL")
        yield f"--context-parallel-algo {algorithm} {why}; give one of {', '.join(CONTEXT_ALGORITHMS)}"
    if getattr(args, "attention_mask_type", "causal") != "causal":
        yield f"--attention-mask-type {args.attention_mask_type} with {given}: RL passes no masks; give causal"
    if getattr(args, "hybrid_context_parallel", False):
        yield "--hybrid-context-parallel splits packed rows in different ways, which RL does not support; remove it"
    if hasattr(args, "pre_tockens") and getattr(args, "multi_latent_attention", False):
        yield from _latent_attention(args, algorithm)
    if implementation == "local" and _megatrons_own_attention():
        yield (
            f"{given}: Megatron's own attention lacks support for it; give --transformer-impl transformer_engine, or "
            "run with MindSpeed"
        )


def _latent_attention(args: Any, algorithm: str) -> Iterator[str]:
    """Refuses latent attention with context parallelism that MindSpeed does not support. Its version 2.3.0 adds ulysses
    to an attention class, but latent attention replaces this class."""
    wrapped = hasattr(sys.modules.get(_ADAPTOR), "multi_latent_attention_init_wrapper")
    exchanged = wrapped or hasattr(args, "shape_order")
    if algorithm != "megatron_cp_algo" and not exchanged:
        yield (
            f"--context-parallel-algo {algorithm} with --multi-latent-attention: this MindSpeed does not exchange "
            "heads there, so a token would only attend to tokens of its own rank; give --context-parallel-size 1"
        )


def packed_rows(args: Any, config: RLConfig) -> Iterator[str]:
    """Refuses flags with which tokens of packed rows, or of a tree, would not see exactly their own ancestors, at their
    own positions. Dropout and other embeddings than rope are refused with and without them."""
    flag = config.forward.packed_by
    out, mindspeed = f"or remove {flag}", hasattr(args, "pre_tockens")
    engine = getattr(args, "transformer_impl", "local") == "transformer_engine"
    shared, experts = config.forward.share_prompts, getattr(args, "num_experts", None)
    hooked = shared or config.forward.router_replay is not None  # attention gets boundaries from hooks of layers
    if not flag:
        return
    names = _OTHER_ATTENTION | (OUTSIDE_OF_LAYERS | _CAPACITY if shared else {})
    if engine and not (shared or mindspeed):  # TransformerEngine has windows and sinks of packed rows
        names = {name: what for name, what in names.items() if "window" not in what and "sink" not in what}
    yield from do_not_fit(args, flag, names | (_experts_outside(args) if shared and experts else {}))
    balance, coefficient = (getattr(args, name, None) for name in ("moe_router_load_balancing_type", AUXILIARY[0]))
    if experts and "seq_aux_loss" in (balance if isinstance(balance, list) else [balance]) and coefficient:
        yield (
            f"{flag} with --moe-router-load-balancing-type seq_aux_loss: all rows of a micro-batch would be balanced "
            f"as one sequence; give aux_loss, --moe-aux-loss-coeff 0, {out}"
        )
    if mindspeed and engine and (hooked or not getattr(args, "use_flash_attn", False)):
        fix = "" if hooked else "--use-flash-attn, or "
        yield (
            f"{flag} with MindSpeed's --transformer-impl transformer_engine was not tested; give {fix}"
            f"--transformer-impl local, {out}"
        )
    if not hooked:
        return
    if shared and (size := args.context_parallel_size) > 1:
        yield f"{flag} with --context-parallel-size {size} would split tree rows; give --context-parallel-size 1, {out}"
    yarn = getattr(args, "multi_latent_attention", False) and getattr(args, "rope_type", None) != "rope"
    if shared and yarn and getattr(args, "apply_rope_fusion", False):
        # From core 0.16.1 on it takes cached angles by position (multi_latent_attention.py), which no hook replaces.
        yield f"{flag} with YaRN in latent attention needs positions that RL gives: give --no-rope-fusion, {out}"
    backend = getattr(getattr(args, "attention_backend", None), "name", "auto")
    if engine and not mindspeed and backend in ("unfused", "local"):
        yield (
            f"{flag}: --attention-backend {backend} cannot align a causal mask at the ends of packed rows; give "
            f"--attention-backend flash, {out}"
        )
    if engine and not mindspeed and (version := _transformer_engine()) and int(version.split(".")[0]) < 2:
        yield f"{flag} aligns attention at the ends of rows: install TransformerEngine 2.0 (here: {version}), {out}"


def router_replay(args: Any, config: RLConfig) -> Iterator[str]:
    """Refuses flags with which routers would not choose the experts that --rl-router-replay gives them."""
    flag, size = f"--rl-router-replay {config.forward.router_replay}", args.context_parallel_size
    if config.forward.router_replay is None:
        return
    if not getattr(args, "num_experts", None):
        yield f"{flag}: the model has no experts (--num-experts is not given); remove it"
        return
    if size > 1:
        yield f"{flag} with --context-parallel-size {size} would split rows; give --context-parallel-size 1"
    if getattr(args, "moe_router_fusion", False):
        yield f"{flag}: --moe-router-fusion chooses experts inside a kernel; remove one of them"
    hybrid = {name: what for name, what in _OTHER_ATTENTION.items() if "state" in what}
    yield from do_not_fit(args, flag, hybrid | OUTSIDE_OF_LAYERS | _experts_outside(args))


def _experts_outside(args: Any) -> dict[str, str]:
    """Attributes with which experts are recomputed, or routed, where hooks do not run, and the reasons."""
    again = getattr(args, "moe_layer_recompute", False)
    names = {name: what for name, what in _EXPERTS_OUTSIDE.items() if again or not name.endswith("_overlap_comm")}
    kinds = getattr(args, "moe_router_load_balancing_type", None), getattr(args, "moe_token_dispatcher_type", None)
    return names | (_GATHERED if kinds == ("pai_megatron_aux_loss", "allgather") else {})


def do_not_fit(args: Any, flag: str, names: dict[str, str]) -> Iterator[str]:
    """A message for each of the attributes that is given. names: attribute -> the reason."""
    for name, what in names.items():
        if (value := getattr(args, name, None)) not in _NOT_GIVEN:
            given = spelt(name) if value is True else f"{spelt(name)} {value}"
            yield f"{flag} does not fit {given} ({what}); remove {spelt(name)}, or remove {flag}"


def _transformer_engine() -> str | None:
    """Its version; None: it is not installed."""
    try:
        return importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return None


def _megatrons_own_attention() -> bool:
    """Whether the local attention is still Megatron's. MindSpeed replaces it when MindSpeed is imported."""
    module = sys.modules.get(_ATTENTION_MODULE)
    return module is None or module.DotProductAttention.__init__.__module__ == _ATTENTION_MODULE


def flash_attention(args: Any, config: RLConfig) -> Iterator[str]:
    """Refuses flags with which MindSpeed's flash attention would differ from the engine.

    With latent attention RL passes complete masks (--sparse-mode 0); else the kernel's mode is 2: it ignores windows.
    Sources: custom_dot_product_attention.py of MindSpeed-LLM, flash_attention/adaptor.py of MindSpeed.
    """
    if not hasattr(args, "pre_tockens") or not getattr(args, "use_flash_attn", False):
        return
    if getattr(args, "apply_query_key_layer_scaling", False):
        yield (
            "--apply-query-key-layer-scaling with --use-flash-attn: scores are divided by the layer's number, and only "
            "Megatron's own attention multiplies them by it again; leave it out"
        )
    latent, window = getattr(args, "multi_latent_attention", False), args.pre_tockens
    if latent and getattr(args, "next_tockens", 0) < 0:
        yield f"--next-tockens {args.next_tockens}: a token would not attend to itself; leave it out"
    if latent and window is not None and window < args.seq_length:
        yield (
            f"--pre-tockens {window} with --seq-length {args.seq_length}: a token would attend only to the {window} "
            "tokens before it, but in the engine to all; leave it out"
        )
    if latent and (mode := getattr(args, "sparse_mode", 0)):
        yield f"--sparse-mode {mode}: RL passes a complete mask, which needs mode 0; leave it out"


def gradients(args: Any, config: RLConfig) -> Iterator[str]:
    """Refuses flags with which gradients would be wrong or missing."""
    # With these, MindSpeed's schedules lose the number of tokens by which Megatron divides gradients.
    for name in ("recompute_in_bubble", "recompute_in_advance"):
        if getattr(args, name, False) and getattr(args, "calculate_per_token_loss", False):
            yield f"{spelt(name)} with --calculate-per-token-loss scales gradients wrongly; remove one of the two"
    if getattr(args, "defer_embedding_wgrad_compute", False) and config.forward.logprob_chunk_tokens != 0:
        yield (
            "--defer-embedding-wgrad-compute keeps inputs of the output layer, which RL replaces; remove it, or give "
            "--rl-logprob-chunk-tokens 0"
        )
    stages, tied = getattr(args, "pipeline_model_parallel_size", 1), not args.untie_embeddings_and_output_weights
    if getattr(args, "mtp_num_layers", None) and stages > 1 and tied:
        yield (
            f"--mtp-num-layers {args.mtp_num_layers} with {stages} pipeline stages and tied embeddings: the last stage "
            "would compute log-probs with an embedding that only the frozen MTP layers use; give "
            "--untie-embeddings-and-output-weights, or one stage"
        )


def folded_pipeline(args: Any, config: RLConfig) -> Iterator[str]:
    """Refuses flags that do not work with MindSpeed's dualpipev.

    Source: core/pipeline_parallel/dualpipev of MindSpeed 26.1.0.
    """
    if not getattr(args, "schedules_method", None):
        return
    given, budget = "--schedules-method dualpipev", config.forward.max_tokens_per_microbatch
    if budget is not None:
        yield (
            f"--rl-max-tokens-per-microbatch {budget} with {given}: its stages only pass micro-batches of one length; "
            "remove one of the two flags"
        )
    if (ckpt_format := getattr(args, "ckpt_format", "torch")) != "torch":
        yield (
            f"--ckpt-format {ckpt_format} with {given}: MindSpeed numbers the layers of a stage's first chunk as if "
            "they were in its second chunk; give --ckpt-format torch"
        )


def latent_attention(args: Any, config: RLConfig) -> Iterator[str]:
    """Refuses flags that do not work with MindSpeed-LLM's latent attention.

    Source: CustomMLASelfAttention of mindspeed_llm/tasks/models/transformer/multi_latent_attention.py.
    """
    tp, latent = args.tensor_model_parallel_size, getattr(args, "multi_latent_attention", False)
    if latent and tp > 1 and getattr(args, "spec", None) and not args.q_lora_rank:
        yield (
            f"--tensor-model-parallel-size {tp} without --q-lora-rank: MindSpeed-LLM then keeps the complete query "
            "projection on every rank, and cannot split it; give 1"
        )


def sequence_balance(args: Any, config: RLConfig) -> Iterator[str]:
    """Refuses MindSpeed-LLM's sequence-wise balance loss, which assumes `--micro-batch-size` rows in every micro-batch.

    Source: apply_seq_aux_loss of mindspeed_llm/core/transformer/moe/router.py.
    """
    budget, coefficient = config.forward.max_tokens_per_microbatch, getattr(args, "moe_aux_loss_coeff", 0.0)
    if budget is not None and getattr(args, "seq_aux", False) and coefficient:
        yield (
            f"--rl-max-tokens-per-microbatch {budget} with --seq-aux --moe-aux-loss-coeff {coefficient}: MindSpeed-LLM "
            "balances experts over micro-batches of --micro-batch-size rows, but these have any number of rows; remove "
            "--rl-max-tokens-per-microbatch, or give --moe-aux-loss-coeff 0"
        )


def swapped_memory(args: Any, config: RLConfig) -> Iterator[str]:
    """Refuses --rl-swap for memory that cannot be offloaded."""
    names = config.reshard.swap_names
    if "none" in names and len(names) > 1:
        yield f"--rl-swap {' '.join(names)}: 'none' cannot be combined with other words; remove one"
    if "optimizer" in names and getattr(args, "virtual_optimizer", None):
        yield "--virtual-optimizer keeps Adam's moments in other host memory; give --rl-swap params grads"
    if "none" not in names and getattr(args, "use_nccl_ub", False):
        yield "--use-nccl-ub never lets Megatron's buffers be freed; remove it, or give --rl-swap none"


def shared_memory(args: Any, config: RLConfig) -> Iterator[str]:
    """Refuses checkpoint formats in which MindSpeed omits the lower halves of main parameters: with --reuse-fp32-param
    the weights are only the upper halves."""
    ckpt_format = getattr(args, "ckpt_format", "torch")
    if getattr(args, "reuse_fp32_param", False) and ckpt_format != "torch":
        yield (
            f"--ckpt-format {ckpt_format} with --reuse-fp32-param: MindSpeed saves the lower halves of main parameters "
            "in the format torch only; give --ckpt-format torch"
        )


def remarks(args: Any, config: RLConfig) -> Iterator[str]:
    """Notes on valid arguments."""
    if getattr(args, "swap_optimizer", False) and "optimizer" in config.reshard.swap_names:
        yield "--swap-optimizer already keeps the optimizer's state on the host, so --rl-swap optimizer does nothing"
    split = getattr(args, "context_parallel_size", 1) > 1
    if split and hasattr(args, "shape_order") and getattr(args, "multi_latent_attention", False):
        yield (
            f"--context-parallel-size {args.context_parallel_size} with --multi-latent-attention of MindSpeed-LLM: "
            "untested; compare with a short run without it"
        )
    if config.forward.share_prompts and not config.forward.pack_sequences:
        yield "--rl-share-prompts: rows are packed, as with --rl-pack-sequences"
    experts, generates = getattr(args, "num_experts", None), not learns_from_pairs(config.algorithm.algorithm)
    if experts and generates and not split and getattr(args, "bf16", False) and config.forward.router_replay is None:
        yield (
            "experts in bfloat16: for some tokens engine and trainer choose other ones, and log-probs differ; with "
            "--rl-router-replay rollout the trainer takes the engine's"
        )
    if added := " ".join(_auxiliary(args)):
        yield f"{added}: added to the policy's loss in each micro-batch, for prompt tokens too; with 0 it is not added"


def _auxiliary(args: Any) -> Iterator[str]:
    """Flags, with values, of the auxiliary losses that Megatron adds for a model with experts, unless they are 0."""
    balances = getattr(args, "moe_router_load_balancing_type", None) not in _NO_BALANCE
    balances = balances or getattr(args, "seq_aux", False)  # of MindSpeed-LLM, in addition to noaux_tc
    for name in AUXILIARY if getattr(args, "num_experts", None) else ():
        value = getattr(args, name, None)
        values = value if isinstance(value, list) else [value]
        if any(values) and (balances or name == "moe_z_loss_coeff"):
            yield f"{spelt(name)} {' '.join(map(str, values))}"
