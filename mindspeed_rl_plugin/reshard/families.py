"""Model families as tables: every stored parameter, its names on each side, and how it is split.

A row describes one *stored* parameter (what a Megatron rank or an engine rank holds as one tensor) by
the *canonical* tensors inside it: those of the Hugging Face checkpoint, unsplit and unpadded. A new
family is one entry of `FAMILIES`: its rows, its router, and what its config.json leaves out or calls
otherwise. Nothing else in the package knows a family by name, but for sizes of published models in
`tools/plan/known_models.py`. `family_table.py` has the words of the table, `ModelShape.size` the names of sizes.

Megatron's flags tell families apart:

    Llama, Mistral   none of these          Qwen2, Qwen2.5, Seed-OSS   --add-qkv-bias
    Qwen3            --qk-layernorm         Qwen2-MoE, GLM-4.5 Air     --add-qkv-bias --num-experts
    Mixtral          --num-experts          Qwen3-MoE, Ling            --qk-layernorm --num-experts
    DeepSeek-V2, DeepSeek-V3, Kimi K2       --qk-layernorm --num-experts --multi-latent-attention

and where these are alike, --moe-router-score-function, --rotary-percent (Ling) and --kv-channels (Seed-OSS).

Sources: Megatron core 0.12.1, 0.16.1 and 0.19 (models/gpt/gpt_layer_specs.py, transformer/moe/experts.py,
shared_experts.py, multi_latent_attention.py), MindSpeed-LLM 2.3.0 and 26.1.0 (tasks/models/spec), vLLM 0.32
(models/llama.py, qwen2.py, qwen3.py, mixtral.py, qwen2_moe.py, qwen3_moe.py, glm4_moe.py, bailing_moe.py,
deepseek_v2.py). vllm-ascend loads these models under the same names.
"""

from __future__ import annotations

from dataclasses import replace

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

HEAD = "lm_head.weight"

_H = "model.layers.{layer}."
_M = "decoder.layers.{layer}."
_ATTENTION = "self_attention."


def _names(local: str, te: str | None, engine: str | None, mindspeed: str | None) -> dict[str, str]:
    te, mindspeed = te or local, mindspeed or local
    names = dict(zip(IMPLS, (local, te, te, mindspeed, mindspeed), strict=True)) | {ENGINE: engine}
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


def _only(row: Row, *sides: str, **more: str | tuple[str, ...]) -> Row:
    """The row as it is on these sides only."""
    return replace(row, names={side: name for side, name in row.names.items() if side in sides}, **more)


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


def _experts(block: str, canonical: tuple[str, ...], number: int, engine: str, split: Split, *shape: str) -> Row:
    """linear_fc{number} of one routed expert. The engine, and Megatron's grouped GEMM, stack those of a rank."""
    stored = (f"local_experts.{{expert}}.linear_fc{number}.weight", f"linear_fc{number}.weight{{expert}}")
    names = {kind: f"{_M}mlp.experts.{n}" for kind, n in zip(EXPERTS, (*stored, f"weight{number}"), strict=True)}
    parts = tuple(Part(f"{_H}{block}.experts.{{expert}}.{x}.weight", shape) for x in canonical)
    return Row(LayerType.EXPERT, names | {ENGINE: f"{_H}{block}.experts.{{nested}}{engine}"}, split, parts)


def _routed(block: str = "mlp", gate_up: tuple[str, str] = ("gate_proj", "up_proj"), down: str = "down_proj"):
    """Norm, router and routed experts of a layer; block: its MLP's canonical name, gate_up, down: those of a matrix."""
    return (
        _whole(_MLP_NORM, _AFTER_ATTENTION, "hidden", layer_type=LayerType.MOE),
        _whole("mlp.router.weight", f"{block}.gate.weight", "experts", "hidden", layer_type=LayerType.MOE),
        _experts(block, gate_up, 1, "w13_weight", Split.GATE_UP, "expert_ffn", "hidden"),
        _experts(block, (down,), 2, "w2_weight", Split.COLUMNS, "hidden", "expert_ffn"),
    )


def _shared(canonical: str) -> tuple[Row, Row]:
    """The experts to which all tokens go."""
    at = "mlp.shared_experts"
    return (
        _gate_up(at, canonical, "shared_ffn", LayerType.MOE),
        _down(at, canonical, "shared_ffn", LayerType.MOE),
    )


def _outer_rows(embedding: str) -> tuple[Row, ...]:
    """Before the first layer and after the last. With tied embeddings the head's row holds the canonical embedding, and
    exists only where layout.py says so."""
    first = "embedding.word_embeddings.weight"
    return (
        _outer(LayerType.EMBEDDING, first, embedding, Split.VOCABULARY, "vocab", "hidden"),
        _outer(LayerType.OUTPUT, "decoder.final_layernorm.weight", "model.norm.weight", Split.REPLICATED, "hidden"),
        _outer(LayerType.OUTPUT, "output_layer.weight", HEAD, Split.VOCABULARY, "vocab", "hidden"),
    )


_OUTER = _outer_rows("model.embed_tokens.weight")

_FUSED_NORM = f"{_ATTENTION}linear_qkv.layer_norm_weight"
_OUT = f"{_ATTENTION}linear_proj.weight"

_GROUPED_ATTENTION = (
    _whole("input_layernorm.weight", "input_layernorm.weight", "hidden", te=_FUSED_NORM),
    _qkv("weight", "hidden"),
    _layer(_OUT, "self_attn.o_proj.weight", Split.COLUMNS, ("self_attn.o_proj.weight", "hidden", "query")),
)
_QKV_BIAS = (_qkv("bias"),)
# One tensor of queries, keys and values.
_STACKED_ATTENTION = (
    _GROUPED_ATTENTION[0],
    _layer(
        f"{_ATTENTION}linear_qkv.weight",
        "attention.query_key_value.weight",
        Split.QUERY_GROUPS,
        ("attention.query_key_value.weight", "qkv", "hidden"),
    ),
    _layer(_OUT, "attention.dense.weight", Split.COLUMNS, ("attention.dense.weight", "hidden", "query")),
    *(
        _whole(f"{_ATTENTION}{x[0]}_layernorm.weight", f"attention.{x}_layernorm.weight", "head")
        for x in ("query", "key")
    ),
)
_QK_NORM = tuple(_whole(f"{_ATTENTION}{x}_layernorm.weight", f"self_attn.{x}_norm.weight", "head") for x in "qk")

_MLP_NORM, _AFTER_ATTENTION = "pre_mlp_layernorm.weight", "post_attention_layernorm.weight"
_FUSED_MLP_NORM = "mlp.linear_fc1.layer_norm_weight"
_DENSE_MLP = (
    _whole(_MLP_NORM, _AFTER_ATTENTION, "hidden", te=_FUSED_MLP_NORM, mindspeed=_MLP_NORM, layer_type=LayerType.DENSE),
    _gate_up("mlp", "mlp", "ffn", LayerType.DENSE),
    _down("mlp", "mlp", "ffn", LayerType.DENSE),
)

# Updated after every step from the load of the experts, so it travels with the weights although no gradient reaches it.
_BIAS = dict(layer_type=LayerType.MOE, wide=True, buffer=True)
_ROUTER_BIAS = (_whole("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", "experts", **_BIAS),)
_BAILING_BIAS = (_whole("mlp.router.expert_bias", "mlp.gate.expert_bias", "experts", **_BIAS),)
_ROUTED, _SHARED_EXPERTS = _routed(), _shared("mlp.shared_experts")
_GATED_EXPERT = (
    *_shared("mlp.shared_expert"),
    _whole(
        "mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", "one", "hidden", layer_type=LayerType.MOE
    ),
)

_Q = ("self_attn.q_proj.weight", "q_up", "hidden")
_Q_DOWN = ("self_attn.q_a_proj.weight", "q_lora", "hidden")
_KV_DOWN = ("self_attn.kv_a_proj_with_mqa.weight", "kv_down", "hidden")
_UP = {x: (f"self_attn.{x}_b_proj.weight", f"{x}_up", f"{x}_lora") for x in ("q", "kv")}
_CORE, _MINDSPEED = IMPLS[:3], IMPLS[3:]
_QKV_DOWN = _layer(
    f"{_ATTENTION}linear_qkv.weight", "self_attn.fused_qkv_a_proj.weight", Split.REPLICATED, _Q_DOWN, _KV_DOWN
)


def _split_up(name: str, part: tuple[str, ...], *of_head: str) -> Row:
    """One of MindSpeed-LLM's split up projections (--mla-mm-split): a part of every head."""
    row = _layer(f"{_ATTENTION}{name}.weight", None, Split.HEAD_PART, part)
    return _only(row, "mindspeed_split", of_head=of_head)


_LATENT_ATTENTION = (
    _whole("input_layernorm.weight", "input_layernorm.weight", "hidden"),
    _only(_layer(f"{_ATTENTION}linear_q_down_proj.weight", None, Split.DOWN, _Q_DOWN), *_CORE),
    _only(_layer(f"{_ATTENTION}linear_kv_down_proj.weight", None, Split.DOWN, _KV_DOWN), *_CORE),
    _only(_QKV_DOWN, *_MINDSPEED, ENGINE, unfused=tuple(part.name for part in _QKV_DOWN.parts)),
    # Without --q-lora-rank queries are not compressed; MindSpeed-LLM keeps them whole beside the keys and values.
    _only(_layer(f"{_ATTENTION}linear_q_proj.weight", _Q[0], Split.ROWS, _Q), *_CORE, ENGINE, without="q_lora"),
    _only(_whole(f"{_ATTENTION}linear_kv_down_proj.weight", *_KV_DOWN), ENGINE, without="q_lora"),
    _only(
        _layer(f"{_ATTENTION}linear_qkv.weight", None, Split.REPLICATED, _Q, _KV_DOWN), *_MINDSPEED, without="q_lora"
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
        _only(_layer(f"{_ATTENTION}linear_{x}_up_proj.weight", part[0], Split.ROWS, part), *_CORE, "mindspeed", ENGINE)
        for x, part in _UP.items()
    ),
    _split_up("linear_qk_nope", _UP["q"], "", "nope"),
    _split_up("linear_qk_rope", _UP["q"], "nope", "rope"),
    _split_up("linear_kv_nope", _UP["kv"], "", "nope"),
    _split_up("linear_v", _UP["kv"], "nope", "value"),
    _layer(_OUT, "self_attn.o_proj.weight", Split.COLUMNS, ("self_attn.o_proj.weight", "hidden", "value")),
)

_PLAIN = _OUTER + _GROUPED_ATTENTION
_DEEPSEEK = _OUTER + _LATENT_ATTENTION + _DENSE_MLP + _ROUTED + _SHARED_EXPERTS
_BAILING = _outer_rows("model.word_embeddings.weight") + _STACKED_ATTENTION + _DENSE_MLP + _ROUTED

_GROUPS = {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
_BIASED_ROUTER = Router("sigmoid", bias=True, grouped=True, scaled=True)
# What GLM, Ling and DeepSeek call alike.
_OF_DEEPSEEK = HfConfig(
    defaults=_GROUPS,
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
    "seed_oss": Family(
        "SeedOssForCausalLM",
        _PLAIN + _QKV_BIAS + _DENSE_MLP,
        qkv_bias=True,
        hf=HfConfig(
            fixed={"attention_bias": True, "attention_out_bias": False},
            written={"residual_dropout": 0.0},
            # Its code came and went in vLLM, whose Llama has the same bias under a name of InternLM's.
            engine={"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
            | {"attention_bias": False, "qkv_bias": True},
        ),
    ),
    "qwen3": Family("Qwen3ForCausalLM", _PLAIN + _QK_NORM + _DENSE_MLP, qk_norm=True),
    "mixtral": Family(
        "MixtralForCausalLM",
        _PLAIN + _routed("block_sparse_moe", ("w1", "w3"), "w2"),
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
        _PLAIN + _QKV_BIAS + _DENSE_MLP + _ROUTED + _GATED_EXPERT,
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
        _PLAIN + _QK_NORM + _DENSE_MLP + _ROUTED,
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
        _PLAIN + _QKV_BIAS + _DENSE_MLP + _ROUTED + _ROUTER_BIAS + _SHARED_EXPERTS,
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
        _BAILING + _BAILING_BIAS + _SHARED_EXPERTS,
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
        _DEEPSEEK,
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
        _DEEPSEEK + _ROUTER_BIAS,
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
# The same models in every number under names of their own.
FAMILIES["mistral"] = replace(FAMILIES["llama"], hf=HfConfig(window=True), twin="llama")
FAMILIES["kimi_k2"] = replace(FAMILIES["deepseek_v3"], twin="deepseek_v3")


def find_family(
    *,
    qkv_bias: bool,
    qk_norm: bool,
    experts: bool = False,
    mla: bool = False,
    score: str = "softmax",
    partial: bool = False,
    own_head_dim: bool = False,
) -> str:
    """Name of the one family with these traits.

    score: of the router; partial: whether only a part of a head is rotated; own_head_dim: whether the head's size is
    another than hidden size / heads. These decide between families that are else alike. Raises ValueError when no table
    has them, or several have.
    """
    wanted = (qkv_bias, qk_norm, experts, mla)
    alike = [n for n, f in FAMILIES.items() if (f.qkv_bias, f.qk_norm, f.experts, f.mla) == wanted and not f.twin]
    fitting = alike if len(alike) == 1 else [n for n in alike if FAMILIES[n].router.score == score]
    for trait, value in (("partial", partial), ("own_head_dim", own_head_dim)):
        fitting = [n for n in fitting if getattr(FAMILIES[n].hf, trait) == value] or fitting
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
