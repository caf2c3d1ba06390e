"""The types of a family's table: rows of stored parameters with names and splits, and fields of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

# Layer specs, which decide the names of a trainer's parameters. te: TransformerEngine; te_sharded: the same up to core
# 0.12, which splits MLA's down projections over tensor parallel ranks; mindspeed: MindSpeed-LLM; mindspeed_split:
# MindSpeed-LLM with --mla-mm-split, which splits MLA's up projections into two parameters each.
IMPLS = ("local", "te", "te_sharded", "mindspeed", "mindspeed_split")
# How a trainer stores experts. sequential: a module for each; te_grouped: TransformerEngine's grouped GEMM, a parameter
# for each; grouped: Megatron's grouped GEMM (core up to 0.16, MindSpeed), one matrix for all experts of the rank.
EXPERTS = ("sequential", "te_grouped", "grouped")
ENGINE = "engine"


class Split(Enum):
    """How a stored parameter is cut over tensor parallel ranks, in Megatron and in the engine.

    REPLICATED    complete on every rank; if a `Row` has several canonical tensors, they are stacked
    VOCABULARY    rows of the padded vocabulary; trainer and engine pad to different sizes
    ROWS          even shares of axis 0
    COLUMNS       even shares of axis 1
    GATE_UP       every rank stacks its share of the rows of gate, then that of up
    QUERY_GROUPS  q, k and v; a `Row` has a canonical tensor for each, or one in which they are stacked. Megatron
                  interleaves them per query group, and cuts the rows evenly. An engine rank stacks its shares of q, k
                  and v; with more ranks than groups, several ranks have the same key and value head
    HEAD_PART     of each head of a rank, only the rows that `Row.of_head` chooses
    """

    REPLICATED = "replicated"
    VOCABULARY = "vocabulary"
    ROWS = "rows"
    COLUMNS = "columns"
    GATE_UP = "gate_up"
    QUERY_GROUPS = "query_groups"
    HEAD_PART = "head_part"


class LayerType(Enum):
    """Where a parameter is: before the first layer, in every layer, in layers with a dense MLP, in layers with experts,
    in every routed expert, after the last layer."""

    EMBEDDING = "embedding"
    EVERY = "every"
    DENSE = "dense"
    MOE = "moe"
    EXPERT = "expert"
    OUTPUT = "output"


@dataclass(frozen=True)
class Part:
    """One canonical tensor inside a stored parameter: a tensor of the Hugging Face checkpoint, unsplit and unpadded."""

    name: str
    shape: tuple[str, ...]  # names of sizes, see `ModelShape._sizes`
    wide: bool = False  # it is sent and converted as float32, whatever the dtype of the model


@dataclass(frozen=True)
class Row:
    """One stored parameter: how trainer and engine name and split it.

    "{layer}" in a name is the global number of the layer; in Megatron's names, its number within the chunk. "{expert}"
    is the number of the expert within the rank; in canonical names, its global number.
    """

    layer_type: LayerType
    # entry of IMPLS (of EXPERTS for experts) or ENGINE -> name; if an entry is missing, other rows have its parts
    names: Mapping[str, str]
    split: Split
    parts: tuple[Part, ...]  # the canonical tensors inside, in the order in which the split stacks them
    buffer: bool = False  # in Megatron it is a buffer, no parameter
    unfused: bool = False  # in some engines each part is a parameter, with its canonical name
    # for HEAD_PART, names of two sizes: rows of each head to skip ("": none), and rows after them that are stored
    of_head: tuple[str, str] = ("", "")
    without: str = ""  # name of a size; only models in which it is 0 have the row


@dataclass(frozen=True)
class Router:
    """How a family routes tokens to experts, as far as families differ."""

    score: str = "softmax"  # "softmax" or "sigmoid" of the logits
    bias: bool = False  # each expert has a bias, updated from its load, that is added to its score for the choice
    grouped: bool = False  # groups of experts are chosen first, then experts of these groups
    by_best: bool = False  # groups are ranked by their best expert, not by the sum of their best two
    scaled: bool = False  # the weights of a token's experts are multiplied by a factor


@dataclass(frozen=True)
class HfConfig:
    """What a family's config.json has that does not follow from its rows. Keys are fields of config.json."""

    defaults: Mapping[str, Any] = field(default_factory=dict)  # values of fields that a file leaves out
    fixed: Mapping[str, Any] = field(default_factory=dict)  # the only value that this family supports
    code: Mapping[str, Any] = field(default_factory=dict)  # what the engine's code uses, whatever value a file has
    written: Mapping[str, Any] = field(default_factory=dict)  # values that RL writes; a file that it reads may differ
    synonyms: Mapping[str, str] = field(default_factory=dict)  # other name of a field -> its name
    # replaces fields in the config for an engine that runs this family with another family's code
    engine: Mapping[str, Any] = field(default_factory=dict)
    experts: str = "num_experts"  # field of the number of routed experts
    expert_ffn: str = "moe_intermediate_size"  # field of the width of a routed expert
    # field of the number of shared experts, or of their width (`shared_expert_intermediate_size`)
    shared: str = "n_shared_experts"
    # field of the layers without experts: a list of numbers (`mlp_only_layers`) or how many come first
    # (`first_k_dense_replace`); "": all layers have experts
    dense: str = "mlp_only_layers"
    own_head_dim: bool = True  # whether the head size may differ from hidden size / heads
    partial: bool = False  # whether only a part of a head is rotated, by `partial_rotary_factor`
    window: bool = False  # whether `sliding_window` is in force without `use_sliding_window`
    mtp: str = ""  # field of the number of multi-token prediction layers; "": none


@dataclass(frozen=True)
class Family:
    """A model family.

    `qkv_bias`, `qk_norm`, `experts` and `mla` say what rows there are. `families.find_family` finds a family by these;
    if several families are equal in them, by fields of `router` and `hf`.
    """

    architecture: str  # its name in a Hugging Face config
    rows: tuple[Row, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    mla: bool = False
    router: Router = Router()
    hf: HfConfig = HfConfig()  # its config.json
    twin: str = ""  # a family with equal rows and sizes; files of this family are read as files of the twin
    model_type: str = ""  # `model_type` of config.json, if it is not the key in `families.FAMILIES`

    @property
    def embedding(self) -> str:
        """Canonical name of the embedding."""
        return next(row.parts[0].name for row in self.rows if row.layer_type is LayerType.EMBEDDING)

    @property
    def shared_experts(self) -> bool:
        """Whether the family has experts to which all tokens go."""
        return self._has("shared_ffn")

    @property
    def shared_gate(self) -> bool:
        """Whether a gate weighs the output of the shared experts."""
        return self._has("one")

    def _has(self, size: str) -> bool:
        return any(size in part.shape for row in self.rows for part in row.parts)
