"""Model families as tables: every stored parameter, its names on each side, and how it is split.

A row describes one *stored* parameter (what a Megatron rank or an engine rank holds as one tensor) by
the *canonical* tensors inside it: those of the Hugging Face checkpoint, unsplit and unpadded. A new
family is one entry of `FAMILIES`; nothing else in the package knows a model by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Split(Enum):
    """How a stored parameter is cut over tensor parallel ranks, in Megatron and in the engine.

    REPLICATED    whole on every rank
    VOCABULARY    rows of the padded vocabulary; each side pads to a size of its own
    COLUMNS       even shares of axis 1
    GATE_UP       every rank stacks its share of gate on its share of up
    QUERY_GROUPS  Megatron interleaves q, k and v per query group and cuts the rows evenly; the engine
                  stacks its shares of q, k and v, and repeats key heads when it has more ranks than groups
    """

    REPLICATED = "replicated"
    VOCABULARY = "vocabulary"
    COLUMNS = "columns"
    GATE_UP = "gate_up"
    QUERY_GROUPS = "query_groups"


class Stage(Enum):
    """Where in the pipeline a parameter lives: before the first layer, in every layer, after the last."""

    FIRST = "first"
    LAYER = "layer"
    LAST = "last"


@dataclass(frozen=True)
class Part:
    """One canonical tensor: its name and its shape in the sizes that `ModelShape.size` resolves.

    Sizes: vocab, hidden, query (heads x head_dim), key (groups x head_dim), head (head_dim), ffn.
    """

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One stored parameter. "{layer}" is the global layer number, but in Megatron's names the one within its chunk.

    local, te: name in Megatron's local and TransformerEngine specs; engine: name in vLLM;
    parts: the canonical tensors inside, in the order in which the split stacks them.
    """

    stage: Stage
    local: str
    te: str
    engine: str
    split: Split
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Family:
    """A model family. architecture: what a Hugging Face config calls it; qkv_bias, qk_norm: what its rows hold."""

    architecture: str
    qkv_bias: bool
    qk_norm: bool
    rows: tuple[Row, ...]


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def _row(stage: Stage, local: str, te: str, engine: str, split: Split, *parts: Part) -> Row:
    if stage is Stage.LAYER:
        local, te, engine = f"decoder.layers.{{layer}}.{local}", f"decoder.layers.{{layer}}.{te}", f"{_H}{engine}"
    return Row(stage, local, te, engine, split, parts)


_H = "model.layers.{layer}."
_ATTENTION = "self_attention."

_OUTER = (
    _row(
        Stage.FIRST,
        "embedding.word_embeddings.weight",
        "embedding.word_embeddings.weight",
        EMBEDDING,
        Split.VOCABULARY,
        Part(EMBEDDING, ("vocab", "hidden")),
    ),
    _row(
        Stage.LAST,
        "decoder.final_layernorm.weight",
        "decoder.final_layernorm.weight",
        "model.norm.weight",
        Split.REPLICATED,
        Part("model.norm.weight", ("hidden",)),
    ),
    # With tied embeddings this row holds the canonical embedding, and exists only where layout.py says so.
    _row(
        Stage.LAST,
        "output_layer.weight",
        "output_layer.weight",
        HEAD,
        Split.VOCABULARY,
        Part(HEAD, ("vocab", "hidden")),
    ),
)

_LAYER = (
    _row(
        Stage.LAYER,
        "input_layernorm.weight",
        f"{_ATTENTION}linear_qkv.layer_norm_weight",
        "input_layernorm.weight",
        Split.REPLICATED,
        Part(f"{_H}input_layernorm.weight", ("hidden",)),
    ),
    _row(
        Stage.LAYER,
        f"{_ATTENTION}linear_qkv.weight",
        f"{_ATTENTION}linear_qkv.weight",
        "self_attn.qkv_proj.weight",
        Split.QUERY_GROUPS,
        Part(f"{_H}self_attn.q_proj.weight", ("query", "hidden")),
        Part(f"{_H}self_attn.k_proj.weight", ("key", "hidden")),
        Part(f"{_H}self_attn.v_proj.weight", ("key", "hidden")),
    ),
    _row(
        Stage.LAYER,
        f"{_ATTENTION}linear_proj.weight",
        f"{_ATTENTION}linear_proj.weight",
        "self_attn.o_proj.weight",
        Split.COLUMNS,
        Part(f"{_H}self_attn.o_proj.weight", ("hidden", "query")),
    ),
)

_DENSE_MLP = (
    _row(
        Stage.LAYER,
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "post_attention_layernorm.weight",
        Split.REPLICATED,
        Part(f"{_H}post_attention_layernorm.weight", ("hidden",)),
    ),
    _row(
        Stage.LAYER,
        "mlp.linear_fc1.weight",
        "mlp.linear_fc1.weight",
        "mlp.gate_up_proj.weight",
        Split.GATE_UP,
        Part(f"{_H}mlp.gate_proj.weight", ("ffn", "hidden")),
        Part(f"{_H}mlp.up_proj.weight", ("ffn", "hidden")),
    ),
    _row(
        Stage.LAYER,
        "mlp.linear_fc2.weight",
        "mlp.linear_fc2.weight",
        "mlp.down_proj.weight",
        Split.COLUMNS,
        Part(f"{_H}mlp.down_proj.weight", ("hidden", "ffn")),
    ),
)

_QKV_BIAS = (
    _row(
        Stage.LAYER,
        f"{_ATTENTION}linear_qkv.bias",
        f"{_ATTENTION}linear_qkv.bias",
        "self_attn.qkv_proj.bias",
        Split.QUERY_GROUPS,
        Part(f"{_H}self_attn.q_proj.bias", ("query",)),
        Part(f"{_H}self_attn.k_proj.bias", ("key",)),
        Part(f"{_H}self_attn.v_proj.bias", ("key",)),
    ),
)

_QK_NORM = tuple(
    _row(
        Stage.LAYER,
        f"{_ATTENTION}{x}_layernorm.weight",
        f"{_ATTENTION}{x}_layernorm.weight",
        f"self_attn.{x}_norm.weight",
        Split.REPLICATED,
        Part(f"{_H}self_attn.{x}_norm.weight", ("head",)),
    )
    for x in "qk"
)

FAMILIES = {
    "llama": Family("LlamaForCausalLM", False, False, _OUTER + _LAYER + _DENSE_MLP),
    "qwen2": Family("Qwen2ForCausalLM", True, False, _OUTER + _LAYER + _QKV_BIAS + _DENSE_MLP),
    "qwen3": Family("Qwen3ForCausalLM", False, True, _OUTER + _LAYER + _QK_NORM + _DENSE_MLP),
}


def find_family(*, qkv_bias: bool, qk_norm: bool) -> str:
    """Name of the family with these traits. Raises ValueError when no table has them."""
    for name, family in FAMILIES.items():
        if (family.qkv_bias, family.qk_norm) == (qkv_bias, qk_norm):
            return name
    known = "; ".join(f"{n}: add_qkv_bias={f.qkv_bias}, qk_layernorm={f.qk_norm}" for n, f in FAMILIES.items())
    raise ValueError(
        f"no model family has add_qkv_bias={qkv_bias} with qk_layernorm={qk_norm}; known families: {known}. "
        "Change the flags, or add a family to mindspeed_rl_plugin/reshard/families.py"
    )
