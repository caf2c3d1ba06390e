"""Rows of stored parameters, in groups that families are made of: names on each side, and how each is split.

`family_table.py` has the words of the table, `ModelShape` the names of sizes. Sources: see `families.py`.
"""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl_plugin.layout.family_table import ENGINE, EXPERTS, IMPLS, LayerType, Part, Row, Split

HEAD_WEIGHT = "lm_head.weight"

_H = "model.layers.{layer}."
_M = "decoder.layers.{layer}."
_SELF_ATTN = "self_attention."


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
    return _layer(f"{_SELF_ATTN}linear_qkv.{kind}", f"self_attn.qkv_proj.{kind}", Split.QUERY_GROUPS, *parts)


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


def routed(
    block: str = "mlp",
    gate_up: tuple[str, str] = ("gate_proj", "up_proj"),
    down: str = "down_proj",
    wide: bool = False,
) -> tuple[Row, ...]:
    """Norm, router and routed experts of a layer; block: its MLP's canonical name, gate_up, down: those of a matrix.
    wide: the engine keeps the router in float32."""
    return (
        _whole(_MLP_NORM, _AFTER_ATTENTION, "hidden", layer_type=LayerType.MOE),
        _whole("mlp.router.weight", f"{block}.gate.weight", "experts", "hidden", layer_type=LayerType.MOE, wide=wide),
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
        _outer(LayerType.OUTPUT, "output_layer.weight", HEAD_WEIGHT, Split.VOCABULARY, "vocab", "hidden"),
    )


_OUTER = _outer_rows("model.embed_tokens.weight")

_FUSED_NORM = f"{_SELF_ATTN}linear_qkv.layer_norm_weight"
_OUT = f"{_SELF_ATTN}linear_proj.weight"

_GROUPED_ATTENTION = (
    _whole("input_layernorm.weight", "input_layernorm.weight", "hidden", te=_FUSED_NORM),
    _qkv("weight", "hidden"),
    _layer(_OUT, "self_attn.o_proj.weight", Split.COLUMNS, ("self_attn.o_proj.weight", "hidden", "query")),
)
QKV_BIAS = (_qkv("bias"),)
# One tensor of queries, keys and values.
_STACKED_ATTENTION = (
    _GROUPED_ATTENTION[0],
    _layer(
        f"{_SELF_ATTN}linear_qkv.weight",
        "attention.query_key_value.weight",
        Split.QUERY_GROUPS,
        ("attention.query_key_value.weight", "qkv", "hidden"),
    ),
    _layer(_OUT, "attention.dense.weight", Split.COLUMNS, ("attention.dense.weight", "hidden", "query")),
    *(
        _whole(f"{_SELF_ATTN}{x[0]}_layernorm.weight", f"attention.{x}_layernorm.weight", "head")
        for x in ("query", "key")
    ),
)
QK_NORM = tuple(_whole(f"{_SELF_ATTN}{x}_layernorm.weight", f"self_attn.{x}_norm.weight", "head") for x in "qk")

_MLP_NORM, _AFTER_ATTENTION = "pre_mlp_layernorm.weight", "post_attention_layernorm.weight"
_FUSED_MLP_NORM = "mlp.linear_fc1.layer_norm_weight"
DENSE_MLP = (
    _whole(_MLP_NORM, _AFTER_ATTENTION, "hidden", te=_FUSED_MLP_NORM, mindspeed=_MLP_NORM, layer_type=LayerType.DENSE),
    _gate_up("mlp", "mlp", "ffn", LayerType.DENSE),
    _down("mlp", "mlp", "ffn", LayerType.DENSE),
)

# Updated after every step from the load of the experts, so it travels with the weights although no gradient reaches it.
_BIAS = dict(layer_type=LayerType.MOE, wide=True, buffer=True)
ROUTER_BIAS = (_whole("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", "experts", **_BIAS),)
BAILING_BIAS = (_whole("mlp.router.expert_bias", "mlp.gate.expert_bias", "experts", **_BIAS),)
ROUTED, SHARED_EXPERTS = routed(), _shared("mlp.shared_experts")
GATED_EXPERT = (
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
    f"{_SELF_ATTN}linear_qkv.weight", "self_attn.fused_qkv_a_proj.weight", Split.REPLICATED, _Q_DOWN, _KV_DOWN
)


def _split_up(name: str, part: tuple[str, ...], *of_head: str) -> Row:
    """One of MindSpeed-LLM's split up projections (--mla-mm-split): a part of every head."""
    row = _layer(f"{_SELF_ATTN}{name}.weight", None, Split.HEAD_PART, part)
    return _only(row, "mindspeed_split", of_head=of_head)


_LATENT_ATTENTION = (
    _whole("input_layernorm.weight", "input_layernorm.weight", "hidden"),
    *(
        _only(_layer(f"{_SELF_ATTN}linear_{x}_down_proj.weight", None, split, part), *sides)
        for x, part in (("q", _Q_DOWN), ("kv", _KV_DOWN))
        for split, sides in ((Split.REPLICATED, ("te",)), (Split.ROWS, ("local", "te_sharded")))
    ),
    _only(_QKV_DOWN, *_MINDSPEED, ENGINE, unfused=tuple(part.name for part in _QKV_DOWN.parts)),
    # Without --q-lora-rank queries are not compressed; MindSpeed-LLM stacks them with keys and values, uncut.
    _only(_layer(f"{_SELF_ATTN}linear_q_proj.weight", _Q[0], Split.ROWS, _Q), *_CORE, ENGINE, without="q_lora"),
    _only(_whole(f"{_SELF_ATTN}linear_kv_down_proj.weight", *_KV_DOWN), ENGINE, without="q_lora"),
    _only(
        _layer(f"{_SELF_ATTN}linear_qkv.weight", None, Split.REPLICATED, _Q, _KV_DOWN), *_MINDSPEED, without="q_lora"
    ),
    *(
        _whole(
            f"{_SELF_ATTN}{x}_layernorm.weight",
            f"self_attn.{x}_a_layernorm.weight",
            f"{x}_lora",
            te=f"{_SELF_ATTN}linear_{x}_up_proj.layer_norm_weight",
            mindspeed=f"{_SELF_ATTN}{x}_layernorm.weight",
        )
        for x in ("q", "kv")
    ),
    *(
        _only(_layer(f"{_SELF_ATTN}linear_{x}_up_proj.weight", part[0], Split.ROWS, part), *_CORE, "mindspeed", ENGINE)
        for x, part in _UP.items()
    ),
    _split_up("linear_qk_nope", _UP["q"], "", "nope"),
    _split_up("linear_qk_rope", _UP["q"], "nope", "rope"),
    _split_up("linear_kv_nope", _UP["kv"], "", "nope"),
    _split_up("linear_v", _UP["kv"], "nope", "value"),
    _layer(_OUT, "self_attn.o_proj.weight", Split.COLUMNS, ("self_attn.o_proj.weight", "hidden", "value")),
)

PLAIN_ATTENTION = _OUTER + _GROUPED_ATTENTION
DEEPSEEK_ROWS = _OUTER + _LATENT_ATTENTION + DENSE_MLP + ROUTED + SHARED_EXPERTS
BAILING = _outer_rows("model.word_embeddings.weight") + _STACKED_ATTENTION + DENSE_MLP + ROUTED
