"""What a family's table is made of: rows of stored parameters, their names and cuts, and what its config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

# Names that a trainer can have, by who built the model. te_sharded: TransformerEngine up to core 0.12, which
# cuts MLA's down projections over tensor parallel ranks; mindspeed: the layer specs of MindSpeed-LLM, which with
# --mla-mm-split also split MLA's up projections.
IMPLS = ("local", "te", "te_sharded", "mindspeed", "mindspeed_split")
# How a trainer stores its experts: one module each; TransformerEngine's grouped GEMM, one parameter each;
# Megatron's grouped GEMM (core up to 0.16, MindSpeed), one flat parameter with all experts of the rank.
EXPERTS = ("sequential", "te_grouped", "grouped")
ENGINE = "engine"


class Split(Enum):
    """How a stored parameter is cut over tensor parallel ranks, in Megatron and in the engine.

    REPLICATED    whole on every rank; several parts are stacked
    VOCABULARY    rows of the padded vocabulary; each side pads to a size of its own
    ROWS          even shares of axis 0
    COLUMNS       even shares of axis 1
    GATE_UP       every rank stacks its share of gate on its share of up
    QUERY_GROUPS  Megatron interleaves q, k and v per query group and cuts the rows evenly; the engine
                  stacks its shares of q, k and v, and repeats key heads when it has more ranks than groups;
                  one part has q, k and v stacked
    HEAD_PART     of the rows of each of a rank's heads only those that `Row.of_head` names
    DOWN          MLA's down projections: even rows in "local" and "te_sharded", whole elsewhere
    """

    REPLICATED = "replicated"
    VOCABULARY = "vocabulary"
    ROWS = "rows"
    COLUMNS = "columns"
    GATE_UP = "gate_up"
    QUERY_GROUPS = "query_groups"
    HEAD_PART = "head_part"
    DOWN = "down"


class LayerType(Enum):
    """In which layers a parameter lives: before the first, in every one, in those with a dense MLP, in those with
    experts, in every routed expert of these, after the last."""

    EMBEDDING = "embedding"
    EVERY = "every"
    DENSE = "dense"
    MOE = "moe"
    EXPERT = "expert"
    OUTPUT = "output"


@dataclass(frozen=True)
class Part:
    """One canonical tensor: its name and its shape in the sizes that `ModelShape.size` resolves.

    wide: it stays float32 whatever the dtype of the model.
    """

    name: str
    shape: tuple[str, ...]
    wide: bool = False


@dataclass(frozen=True)
class Row:
    """One stored parameter. names: by an entry of IMPLS (of EXPERTS in an expert's row) or ENGINE; a side without a
    name stores the parts in another row.

    In names "{layer}" is the global layer number, but in Megatron's the one within its chunk; "{expert}" is the
    number within the rank, and in canonical names the global one. parts: the canonical tensors inside, in the order
    in which the split stacks them. buffer: in Megatron it is no parameter; unfused: the engine's names of the single
    parts where its version does not fuse them. of_head: sizes of what comes before in a head ("": nothing), and of what
    is meant; without: a size of which a model has none where it has this row.
    """

    layer_type: LayerType
    names: Mapping[str, str]
    split: Split
    parts: tuple[Part, ...]
    buffer: bool = False
    unfused: tuple[str, ...] | None = None
    of_head: tuple[str, str] = ("", "")
    without: str = ""


@dataclass(frozen=True)
class Router:
    """How a family sends tokens to experts, as far as families differ.

    score: "softmax" or "sigmoid" of the logits; bias: a bias for each expert, updated from its load, counts in the
    choice; grouped: groups of experts are chosen first; by_best: these are ranked by their best expert, not by the sum
    of their best two; scaled: a factor multiplies the weights of a token's experts.
    """

    score: str = "softmax"
    bias: bool = False
    grouped: bool = False
    by_best: bool = False
    scaled: bool = False


@dataclass(frozen=True)
class HfConfig:
    """What of a family's config.json does not follow from its rows. Fields by name.

    defaults: what they are where a file leaves them out; fixed: the one value with which the model is this family's
    (another is refused); code: what the engine's code takes whatever a file says; written: what the engine's file has
    besides, and another's may have otherwise; synonyms: other name of a field -> its name.
    engine: what the engine's file has instead, where the engine computes the family by the code of another.
    experts: the field with the number of routed experts; expert_ffn: that with their width; shared: that with the
    number of shared experts, or with their width (`shared_expert_intermediate_size`); dense: that of the layers without
    experts, a list of their numbers (`mlp_only_layers`) or how many come first (`first_k_dense_replace`), "" where all
    have experts; own_head_dim: whether the head's size may be another than hidden size / heads; partial: whether
    `partial_rotary_factor` says which share of a head is rotated; window: whether a `sliding_window` that is there is
    one, and not only where `use_sliding_window` says so; mtp: the field of the layers for multi-token prediction, ""
    where the family has none.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    code: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    synonyms: Mapping[str, str] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    experts: str = "num_experts"
    expert_ffn: str = "moe_intermediate_size"
    shared: str = "n_shared_experts"
    dense: str = "mlp_only_layers"
    own_head_dim: bool = True
    partial: bool = False
    window: bool = False
    mtp: str = ""


@dataclass(frozen=True)
class Family:
    """A model family; its key in `families.FAMILIES` is the config's `model_type`, where this field is empty.

    architecture: what a Hugging Face config calls it; qkv_bias, qk_norm, experts, mla: what its rows hold, by which
    Megatron's flags tell families apart, and the router's score where these do not; hf: its config.json.
    twin: the family that it is in every number, so that its files are read as that one's.
    """

    architecture: str
    rows: tuple[Row, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    mla: bool = False
    router: Router = Router()
    hf: HfConfig = HfConfig()
    twin: str = ""
    model_type: str = ""

    @property
    def embedding(self) -> str:
        """Canonical name of the embedding."""
        return next(row.parts[0].name for row in self.rows if row.layer_type is LayerType.EMBEDDING)

    @property
    def shared_experts(self) -> bool:
        """Whether it has experts to which all tokens go."""
        return self._has("shared_ffn")

    @property
    def shared_gate(self) -> bool:
        """Whether a gate weighs what the shared experts say."""
        return self._has("one")

    def _has(self, size: str) -> bool:
        return any(size in part.shape for row in self.rows for part in row.parts)
