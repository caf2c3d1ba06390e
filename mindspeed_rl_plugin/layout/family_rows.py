"""Groups of rows, of which families are made. A row is a stored parameter: its names in trainer and engine, its split.

`family_table.py` defines the types of the table, `ModelShape._sizes` the names of sizes. Sources: see `families.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from mindspeed_rl_plugin.layout.family_table import ENGINE, EXPERTS, IMPLS, LayerType, Part, Row, Split

HEAD_WEIGHT = "lm_head.weight"

_CANONICAL, _MEGATRON = "model.layers.{layer}.", "decoder.layers.{layer}."
_CORE, _MINDSPEED = IMPLS[:3], IMPLS[3:]
_SIDES = (*IMPLS, ENGINE)


def _row(
    layer_type: LayerType,
    split: Split,
    trainer: str,
    *parts: str,
    te: str = "",
    engine: str = "",
    sides: Collection[str] = _SIDES,
    wide: bool = False,
    **more: Any,
) -> Row:
    """A stored parameter. trainer: its name in Megatron; parts: the canonical tensors in it, each "NAME SIZE SIZE"; te:
    its name with TransformerEngine, if that differs; engine: its name in the engine, by default that of the first part;
    sides: entries of _SIDES that have the parameter; wide: as in `Part`; more: fields of `Row`."""
    in_layer = layer_type not in (LayerType.EMBEDDING, LayerType.OUTPUT)
    before, own = (_CANONICAL, _MEGATRON) if in_layer else ("", "")
    tensors = tuple(Part(before + name, tuple(sizes), wide) for name, *sizes in map(str.split, parts))
    names = dict.fromkeys(IMPLS, own + trainer) | {ENGINE: before + engine if engine else tensors[0].name}
    names |= dict.fromkeys(("te", "te_sharded"), own + te) if te else {}
    return Row(layer_type, {side: names[side] for side in _SIDES if side in sides}, split, tensors, **more)


_every, _moe = partial(_row, LayerType.EVERY), partial(_row, LayerType.MOE)


def _outer(embedding: str) -> tuple[Row, ...]:
    """Rows before the first layer and after the last. With tied embeddings the canonical tensor of the head is the
    embedding, and layout.py decides which ranks have the head's row."""
    first = "embedding.word_embeddings.weight"
    return (
        _row(LayerType.EMBEDDING, Split.VOCABULARY, first, f"{embedding} vocab hidden"),
        _row(LayerType.OUTPUT, Split.REPLICATED, "decoder.final_layernorm.weight", "model.norm.weight hidden"),
        _row(LayerType.OUTPUT, Split.VOCABULARY, "output_layer.weight", f"{HEAD_WEIGHT} vocab hidden"),
    )


def _qkv(kind: str, size: str = "") -> Row:
    """kind: "weight" or "bias"; size: name of the size of a weight's axis 1; "" for a bias."""
    parts = (f"self_attn.{x}_proj.{kind} {'query' if x == 'q' else 'key'} {size}" for x in "qkv")
    trainer, engine = f"self_attention.linear_qkv.{kind}", f"self_attn.qkv_proj.{kind}"
    return _every(Split.QUERY_GROUPS, trainer, *parts, engine=engine)


def _mlp(layer_type: LayerType, trainer: str, canonical: str, width: str) -> tuple[Row, Row]:
    gate, up, down = (f"{canonical}.{x}_proj.weight" for x in ("gate", "up", "down"))
    parts, engine = (f"{gate} {width} hidden", f"{up} {width} hidden"), f"{canonical}.gate_up_proj.weight"
    return (
        _row(layer_type, Split.GATE_UP, f"{trainer}.linear_fc1.weight", *parts, engine=engine),
        _row(layer_type, Split.COLUMNS, f"{trainer}.linear_fc2.weight", f"{down} hidden {width}"),
    )


def _shared(canonical: str) -> tuple[Row, Row]:
    """The experts to which all tokens go."""
    return _mlp(LayerType.MOE, "mlp.shared_experts", canonical, "shared_ffn")


def _experts(block: str, canonical: tuple[str, ...], number: int, engine: str, split: Split, *shape: str) -> Row:
    """linear_fc{number} of one routed expert. The engine and Megatron's grouped GEMM stack the experts of a rank."""
    stored = (f"local_experts.{{expert}}.linear_fc{number}.weight", f"linear_fc{number}.weight{{expert}}")
    names = {kind: f"{_MEGATRON}mlp.experts.{n}" for kind, n in zip(EXPERTS, (*stored, f"weight{number}"), strict=True)}
    parts = tuple(Part(f"{_CANONICAL}{block}.experts.{{expert}}.{x}.weight", shape) for x in canonical)
    return Row(LayerType.EXPERT, names | {ENGINE: f"{_CANONICAL}{block}.experts.{{nested}}{engine}"}, split, parts)


def routed(
    block: str = "mlp",
    gate_up: tuple[str, str] = ("gate_proj", "up_proj"),
    down: str = "down_proj",
    wide: bool = False,
) -> tuple[Row, ...]:
    """Norm, router and routed experts of a layer. block, gate_up, down: canonical names of the MLP and of an expert's
    matrices; wide: the engine keeps the router in float32."""
    return (
        _moe(Split.REPLICATED, "pre_mlp_layernorm.weight", "post_attention_layernorm.weight hidden"),
        _moe(Split.REPLICATED, "mlp.router.weight", f"{block}.gate.weight experts hidden", wide=wide),
        _experts(block, gate_up, 1, "w13_weight", Split.GATE_UP, "expert_ffn", "hidden"),
        _experts(block, (down,), 2, "w2_weight", Split.COLUMNS, "hidden", "expert_ffn"),
    )


def _router_bias(name: str) -> tuple[Row]:
    """The router's expert bias. Every step changes it, by the load of the experts and not by a gradient; so it is sent
    with the weights."""
    return (_moe(Split.REPLICATED, "mlp.router.expert_bias", f"mlp.gate.{name} experts", wide=True, buffer=True),)


_ATTENTION = "self_attention."
_NORM = partial(_every, Split.REPLICATED, "input_layernorm.weight", "input_layernorm.weight hidden")
_NORM_IN_QKV = _NORM(te=f"{_ATTENTION}linear_qkv.layer_norm_weight")
_OUT = partial(_every, Split.COLUMNS, f"{_ATTENTION}linear_proj.weight")

_GROUPED_ATTENTION = (_NORM_IN_QKV, _qkv("weight", "hidden"), _OUT("self_attn.o_proj.weight hidden query"))
QKV_BIAS = (_qkv("bias"),)
QK_NORM = tuple(
    _every(Split.REPLICATED, f"{_ATTENTION}{x}_layernorm.weight", f"self_attn.{x}_norm.weight head") for x in "qk"
)
# Attention with one canonical tensor of queries, keys and values.
_STACKED_ATTENTION = (
    _NORM_IN_QKV,
    _every(Split.QUERY_GROUPS, f"{_ATTENTION}linear_qkv.weight", "attention.query_key_value.weight qkv hidden"),
    _OUT("attention.dense.weight hidden query"),
    *(
        _every(Split.REPLICATED, f"{_ATTENTION}{x[0]}_layernorm.weight", f"attention.{x}_layernorm.weight head")
        for x in ("query", "key")
    ),
)

DENSE_MLP = (
    _row(
        LayerType.DENSE,
        Split.REPLICATED,
        "pre_mlp_layernorm.weight",
        "post_attention_layernorm.weight hidden",
        te="mlp.linear_fc1.layer_norm_weight",
    ),
    *_mlp(LayerType.DENSE, "mlp", "mlp", "ffn"),
)
ROUTER_BIAS, BAILING_BIAS = _router_bias("e_score_correction_bias"), _router_bias("expert_bias")
ROUTED, SHARED_EXPERTS = routed(), _shared("mlp.shared_experts")
GATED_EXPERT = (
    *_shared("mlp.shared_expert"),
    _moe(Split.REPLICATED, "mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight one hidden"),
)

_Q = "self_attn.q_proj.weight q_up hidden"
_DOWN = {"q": "self_attn.q_a_proj.weight q_lora hidden", "kv": "self_attn.kv_a_proj_with_mqa.weight kv_down hidden"}
_UP = {x: f"self_attn.{x}_b_proj.weight {x}_up {x}_lora" for x in ("q", "kv")}
# With --mla-mm-split MindSpeed-LLM splits the up projections: (name, canonical tensor, `Row.of_head`).
_PARTS_OF_HEADS = (
    ("qk_nope", _UP["q"], ("", "nope")),
    ("qk_rope", _UP["q"], ("nope", "rope")),
    ("kv_nope", _UP["kv"], ("", "nope")),
    ("v", _UP["kv"], ("nope", "value")),
)
_LATENT_ATTENTION = (
    _NORM(),
    *(
        _every(split, f"{_ATTENTION}linear_{x}_down_proj.weight", part, sides=sides)
        for x, part in _DOWN.items()
        for split, sides in ((Split.REPLICATED, ("te",)), (Split.ROWS, ("local", "te_sharded")))
    ),
    _every(
        Split.REPLICATED,
        f"{_ATTENTION}linear_qkv.weight",
        *_DOWN.values(),
        engine="self_attn.fused_qkv_a_proj.weight",
        sides=(*_MINDSPEED, ENGINE),
        unfused=True,
    ),
    # Without --q-lora-rank there is no q_a_proj. MindSpeed-LLM stacks q_proj and kv_a_proj, complete on every rank.
    _every(Split.ROWS, f"{_ATTENTION}linear_q_proj.weight", _Q, sides=(*_CORE, ENGINE), without="q_lora"),
    _every(Split.REPLICATED, "", _DOWN["kv"], sides=(ENGINE,), without="q_lora"),
    _every(Split.REPLICATED, f"{_ATTENTION}linear_qkv.weight", _Q, _DOWN["kv"], sides=_MINDSPEED, without="q_lora"),
    *(
        _every(
            Split.REPLICATED,
            f"{_ATTENTION}{x}_layernorm.weight",
            f"self_attn.{x}_a_layernorm.weight {x}_lora",
            te=f"{_ATTENTION}linear_{x}_up_proj.layer_norm_weight",
        )
        for x in ("q", "kv")
    ),
    *(
        _every(Split.ROWS, f"{_ATTENTION}linear_{x}_up_proj.weight", part, sides=(*_CORE, "mindspeed", ENGINE))
        for x, part in _UP.items()
    ),
    *(
        _every(Split.HEAD_PART, f"{_ATTENTION}linear_{x}.weight", part, sides=("mindspeed_split",), of_head=of_head)
        for x, part, of_head in _PARTS_OF_HEADS
    ),
    _OUT("self_attn.o_proj.weight hidden value"),
)

_OUTER = _outer("model.embed_tokens.weight")
PLAIN_ATTENTION = _OUTER + _GROUPED_ATTENTION
DEEPSEEK_ROWS = _OUTER + _LATENT_ATTENTION + DENSE_MLP + ROUTED + SHARED_EXPERTS
BAILING = _outer("model.word_embeddings.weight") + _STACKED_ATTENTION + DENSE_MLP + ROUTED
