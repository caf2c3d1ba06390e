"""Model families as tables: every stored parameter, its names on each side, and how it is split.

A row describes one *stored* parameter (what a Megatron rank or an engine rank holds as one tensor) by
the *canonical* tensors inside it: those of the Hugging Face checkpoint, unsplit and unpadded. A new
family is one entry of `FAMILIES`: its rows, its router, and what its config.json leaves out or calls
otherwise. Nothing else in the package knows a family by name, but for sizes of published models in
`tools/plan/known_models.py`. `family_table.py` has the words of the table, `ModelShape.size` the names of sizes.

Megatron's flags tell families apart:

    Llama        none of these              Qwen2, Qwen2.5   --add-qkv-bias
    Qwen3        --qk-layernorm             Qwen3-MoE        --qk-layernorm --num-experts
    DeepSeek-V3  --qk-layernorm --num-experts --multi-latent-attention

and where these are alike, --moe-router-score-function.

Sources: Megatron core 0.12.1, 0.16.1 and 0.19 (models/gpt/gpt_layer_specs.py, transformer/moe/experts.py,
multi_latent_attention.py), MindSpeed-LLM 2.3.0 (tasks/models/spec), vLLM 0.32 (models/llama.py, qwen2.py,
qwen3.py, qwen3_moe.py, deepseek_v2.py). vllm-ascend loads these models under the same names.
"""

from __future__ import annotations

from mindspeed_rl_plugin.reshard.family_table import (
    ENGINE,
    EXPERTS,
    IMPLS,
    Family,
    HfConfig,
    LayerType,
    Part,
    Router,
    Row,
    Split,
)

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_H = "model.layers.{layer}."
_M = "decoder.layers.{layer}."
_ATTENTION = "self_attention."


def _names(local: str, te: str | None, engine: str | None, mindspeed: str | None) -> dict[str, str]:
    names = dict(zip(IMPLS, (local, te or local, te or local, mindspeed or local), strict=True)) | {ENGINE: engine}
    return {side: name for side, name in names.items() if name}


def _outer(layer_type: LayerType, megatron: str, canonical: str, split: Split, *shape: str) -> Row:
    return Row(layer_type, _names(megatron, None, canonical, None), split, (Part(canonical, shape),))


def _layer(
    local: str,
    engine: str | None,
    split: Split,
    *parts: tuple[str, ...],
    te: str | None = None,
    mindspeed: str | None = None,
    layer_type: LayerType = LayerType.EVERY,
    wide: bool = False,
    buffer: bool = False,
) -> Row:
    """A parameter of a layer; parts: canonical name and sizes. te, mindspeed: their names where they differ."""
    names = _names(local, te, None, mindspeed)
    names = {side: _M + name for side, name in names.items()} | ({ENGINE: _H + engine} if engine else {})
    return Row(layer_type, names, split, tuple(Part(_H + name, tuple(sizes), wide) for name, *sizes in parts), buffer)


def _only(row: Row, *sides: str) -> Row:
    """The row as it is on these sides only; there the engine may store its parts one by one."""
    names = {side: name for side, name in row.names.items() if side in sides}
    unfused = tuple(part.name for part in row.parts) if ENGINE in sides else None
    return Row(row.layer_type, names, row.split, row.parts, row.buffer, unfused)


def _whole(megatron: str, canonical: str, *sizes: str, **more: str | bool | LayerType) -> Row:
    return _layer(megatron, canonical, Split.REPLICATED, (canonical, *sizes), **more)


def _qkv(kind: str, *sizes: str) -> Row:
    """kind: "weight" or "bias"; sizes: behind the rows."""
    parts = ((f"self_attn.{x}_proj.{kind}", "query" if x == "q" else "key", *sizes) for x in "qkv")
    return _layer(f"{_ATTENTION}linear_qkv.{kind}", f"self_attn.qkv_proj.{kind}", Split.QUERY_GROUPS, *parts)


def _gate_up(megatron: str, canonical: str, size: str, layer_type: LayerType) -> Row:
    gate, up = (f"{canonical}.{x}_proj.weight" for x in ("gate", "up"))
    engine = f"{canonical}.gate_up_proj.weight"
    name = f"{megatron}.linear_fc1.weight"
    return _layer(name, engine, Split.GATE_UP, (gate, size, "hidden"), (up, size, "hidden"), layer_type=layer_type)


def _down(megatron: str, canonical: str, size: str, layer_type: LayerType) -> Row:
    name = f"{canonical}.down_proj.weight"
    return _layer(f"{megatron}.linear_fc2.weight", name, Split.COLUMNS, (name, "hidden", size), layer_type=layer_type)


def _experts(canonical: tuple[str, ...], number: int, engine: str, split: Split, *shape: str) -> Row:
    """linear_fc{number} of one routed expert. The engine, and Megatron's grouped GEMM, stack those of a rank."""
    stored = (f"local_experts.{{expert}}.linear_fc{number}.weight", f"linear_fc{number}.weight{{expert}}")
    names = {kind: f"{_M}mlp.experts.{n}" for kind, n in zip(EXPERTS, (*stored, f"weight{number}"), strict=True)}
    parts = tuple(Part(f"{_H}mlp.experts.{{expert}}.{x}_proj.weight", shape) for x in canonical)
    return Row(LayerType.EXPERT, names | {ENGINE: f"{_H}mlp.experts.{{nested}}{engine}"}, split, parts)


# With tied embeddings the head's row holds the canonical embedding, and exists only where layout.py says so.
_OUTER = (
    _outer(LayerType.EMBEDDING, "embedding.word_embeddings.weight", EMBEDDING, Split.VOCABULARY, "vocab", "hidden"),
    _outer(LayerType.OUTPUT, "decoder.final_layernorm.weight", "model.norm.weight", Split.REPLICATED, "hidden"),
    _outer(LayerType.OUTPUT, "output_layer.weight", HEAD, Split.VOCABULARY, "vocab", "hidden"),
)

_FUSED_NORM = f"{_ATTENTION}linear_qkv.layer_norm_weight"
_OUT = f"{_ATTENTION}linear_proj.weight"

_GROUPED_ATTENTION = (
    _whole("input_layernorm.weight", "input_layernorm.weight", "hidden", te=_FUSED_NORM),
    _qkv("weight", "hidden"),
    _layer(_OUT, "self_attn.o_proj.weight", Split.COLUMNS, ("self_attn.o_proj.weight", "hidden", "query")),
)
_QKV_BIAS = (_qkv("bias"),)
_QK_NORM = tuple(_whole(f"{_ATTENTION}{x}_layernorm.weight", f"self_attn.{x}_norm.weight", "head") for x in "qk")

_MLP_NORM, _AFTER_ATTENTION = "pre_mlp_layernorm.weight", "post_attention_layernorm.weight"
_FUSED_MLP_NORM = "mlp.linear_fc1.layer_norm_weight"
_DENSE_MLP = (
    _whole(_MLP_NORM, _AFTER_ATTENTION, "hidden", te=_FUSED_MLP_NORM, mindspeed=_MLP_NORM, layer_type=LayerType.DENSE),
    _gate_up("mlp", "mlp", "ffn", LayerType.DENSE),
    _down("mlp", "mlp", "ffn", LayerType.DENSE),
)

_ROUTED = (
    _whole(_MLP_NORM, _AFTER_ATTENTION, "hidden", layer_type=LayerType.MOE),
    _whole("mlp.router.weight", "mlp.gate.weight", "experts", "hidden", layer_type=LayerType.MOE),
    _experts(("gate", "up"), 1, "w13_weight", Split.GATE_UP, "expert_ffn", "hidden"),
    _experts(("down",), 2, "w2_weight", Split.COLUMNS, "hidden", "expert_ffn"),
)
# Updated after every step from the load of the experts, so it travels with the weights although no gradient reaches it.
_BIAS = dict(layer_type=LayerType.MOE, wide=True, buffer=True)
_ROUTER_BIAS = (_whole("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", "experts", **_BIAS),)
_SHARED_EXPERTS = (
    _gate_up("mlp.shared_experts", "mlp.shared_experts", "shared_ffn", LayerType.MOE),
    _down("mlp.shared_experts", "mlp.shared_experts", "shared_ffn", LayerType.MOE),
)

_Q_DOWN = ("self_attn.q_a_proj.weight", "q_lora", "hidden")
_KV_DOWN = ("self_attn.kv_a_proj_with_mqa.weight", "kv_down", "hidden")
_LATENT_ATTENTION = (
    _whole("input_layernorm.weight", "input_layernorm.weight", "hidden"),
    _only(_layer(f"{_ATTENTION}linear_q_down_proj.weight", None, Split.DOWN, _Q_DOWN), *IMPLS[:3]),
    _only(_layer(f"{_ATTENTION}linear_kv_down_proj.weight", None, Split.DOWN, _KV_DOWN), *IMPLS[:3]),
    _only(
        _layer(
            f"{_ATTENTION}linear_qkv.weight", "self_attn.fused_qkv_a_proj.weight", Split.REPLICATED, _Q_DOWN, _KV_DOWN
        ),
        "mindspeed",
        ENGINE,
    ),
    *(
        _whole(
            f"{_ATTENTION}{x}_layernorm.weight",
            f"self_attn.{x}_a_layernorm.weight",
            f"{x}_lora",
            te=f"{_ATTENTION}linear_{x}_up_proj.layer_norm_weight",
            mindspeed=f"{_ATTENTION}{x}_layernorm.weight",
        )
        for x in ("q", "kv")
    ),
    *(
        _layer(
            f"{_ATTENTION}linear_{x}_up_proj.weight",
            f"self_attn.{x}_b_proj.weight",
            Split.ROWS,
            (f"self_attn.{x}_b_proj.weight", f"{x}_up", f"{x}_lora"),
        )
        for x in ("q", "kv")
    ),
    _layer(_OUT, "self_attn.o_proj.weight", Split.COLUMNS, ("self_attn.o_proj.weight", "hidden", "value")),
)

_PLAIN = _OUTER + _GROUPED_ATTENTION
_DEEPSEEK = _OUTER + _LATENT_ATTENTION + _DENSE_MLP + _ROUTED + _ROUTER_BIAS + _SHARED_EXPERTS

_DEEPSEEK_CONFIG = HfConfig(
    defaults={"norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1},
    fixed={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_interleave": True, "moe_layer_freq": 1},
    written={"num_nextn_predict_layers": 0},
    synonyms={"num_local_experts": "n_routed_experts"},
    experts="n_routed_experts",
    dense="first_k_dense_replace",
    mtp="num_nextn_predict_layers",
)

FAMILIES = {
    "llama": Family("LlamaForCausalLM", _PLAIN + _DENSE_MLP),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _PLAIN + _QKV_BIAS + _DENSE_MLP,
        qkv_bias=True,
        # Its bias is part of its code: its config has no field for it, or one that nobody reads.
        hf=HfConfig(code={"attention_bias": True}, own_head_dim=False),
    ),
    "qwen3": Family("Qwen3ForCausalLM", _PLAIN + _QK_NORM + _DENSE_MLP, qk_norm=True),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _PLAIN + _QK_NORM + _DENSE_MLP + _ROUTED,
        qk_norm=True,
        experts=True,
        hf=HfConfig(
            defaults={"norm_topk_prob": False, "mlp_only_layers": []},
            fixed={"decoder_sparse_step": 1},
            synonyms={"num_local_experts": "num_experts"},
        ),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        _DEEPSEEK,
        qk_norm=True,
        experts=True,
        mla=True,
        router=Router("sigmoid", bias=True, grouped=True, scaled=True),
        hf=_DEEPSEEK_CONFIG,
    ),
}


def find_family(
    *, qkv_bias: bool, qk_norm: bool, experts: bool = False, mla: bool = False, score: str = "softmax"
) -> str:
    """Name of the one family with these traits.

    score: of the router, which decides between families that are else alike. Raises ValueError when no table has them,
    or several have.
    """
    wanted = (qkv_bias, qk_norm, experts, mla)
    alike = [n for n, f in FAMILIES.items() if (f.qkv_bias, f.qk_norm, f.experts, f.mla) == wanted]
    fitting = alike if len(alike) == 1 else [n for n in alike if FAMILIES[n].router.score == score]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ValueError(f"the families {', '.join(fitting)} all have {_traits(*wanted)}: give each a trait of its own")
    if alike:
        traits = _traits(*wanted) + f" and moe_router_score_function={score!r}"
        raise ValueError(f"of the families {', '.join(alike)} none has {traits}")
    known = "; ".join(f"{n}: {_traits(f.qkv_bias, f.qk_norm, f.experts, f.mla)}" for n, f in FAMILIES.items())
    raise ValueError(
        f"no model family has {_traits(*wanted)}; known families: {known}. "
        "Change the flags, or add a family to mindspeed_rl_plugin/reshard/families.py"
    )


def _traits(qkv_bias: bool, qk_norm: bool, experts: bool, mla: bool) -> str:
    more = ", experts" * experts + ", multi-latent attention" * mla
    return f"add_qkv_bias={qkv_bias} with qk_layernorm={qk_norm}{more}"
