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
    """

    REPLICATED = "replicated"
    VOCABULARY = "vocabulary"
    ROWS = "rows"
    COLUMNS = "columns"
    GATE_UP = "gate_up"
    QUERY_GROUPS = "query_groups"
    HEAD_PART = "head_part"


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
    """One canonical tensor."""

    name: str
    shape: tuple[str, ...]  # names of sizes that `ModelShape.size` resolves
    wide: bool = False  # it stays float32 whatever the dtype of the model


@dataclass(frozen=True)
class Row:
    """One stored parameter, as each side names and splits it.

    In names "{layer}" is the global layer number (in Megatron's: the one within its chunk), "{expert}" the expert's
    number within the rank (in canonical names: the global one).
    """

    layer_type: LayerType
    # by an entry of IMPLS (EXPERTS in an expert's row) or ENGINE; a side not named stores the parts in another row
    names: Mapping[str, str]
    split: Split
    parts: tuple[Part, ...]  # the canonical tensors inside, in the order in which the split stacks them
    buffer: bool = False  # in Megatron it is a buffer, no parameter
    unfused: bool = False  # whether engines that do not fuse the parts have each by its canonical name
    # sizes, within a head, of what precedes the rows meant ("": nothing) and of these rows
    of_head: tuple[str, str] = ("", "")
    without: str = ""  # a size that must be 0 for a model to have this row


@dataclass(frozen=True)
class Router:
    """How a family routes tokens to experts, as far as families differ."""

    score: str = "softmax"  # "softmax" or "sigmoid" of the logits
    bias: bool = False  # each expert has a bias, updated from its load, that counts in the choice
    grouped: bool = False  # groups of experts are chosen first
    by_best: bool = False  # groups are ranked by their best expert, not by the sum of their best two
    scaled: bool = False  # a factor multiplies the weights of a token's experts


@dataclass(frozen=True)
class HfConfig:
    """What of a family's config.json does not follow from its rows. Keys are fields of config.json."""

    defaults: Mapping[str, Any] = field(default_factory=dict)  # values where a file leaves them out
    # the only value that this family supports; others are refused
    fixed: Mapping[str, Any] = field(default_factory=dict)
    code: Mapping[str, Any] = field(default_factory=dict)  # what the engine's code uses whatever a file says
    written: Mapping[str, Any] = field(default_factory=dict)  # written for the engine too; files may say otherwise
    synonyms: Mapping[str, str] = field(default_factory=dict)  # other name of a field -> its name
    # written instead where the engine runs another family's code
    engine: Mapping[str, Any] = field(default_factory=dict)
    experts: str = "num_experts"  # field of the number of routed experts
    expert_ffn: str = "moe_intermediate_size"  # field of their width
    # field of the number of shared experts, or of their width (`shared_expert_intermediate_size`)
    shared: str = "n_shared_experts"
    # field of the layers without experts: a list of numbers (`mlp_only_layers`) or how many come first
    # (`first_k_dense_replace`); "": all layers have experts
    dense: str = "mlp_only_layers"
    own_head_dim: bool = True  # whether the head size may differ from hidden size / heads
    partial: bool = False  # whether `partial_rotary_factor` says which share of a head is rotated
    window: bool = False  # `sliding_window` holds by itself, without `use_sliding_window`
    mtp: str = ""  # field of the number of multi-token prediction layers; "": none


@dataclass(frozen=True)
class Family:
    """A model family.

    Megatron's flags tell families apart by `qkv_bias`, `qk_norm`, `experts` and `mla`, which say what the rows hold,
    and where these agree by the router's score.
    """

    architecture: str  # its name in a Hugging Face config
    rows: tuple[Row, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    mla: bool = False
    router: Router = Router()
    hf: HfConfig = HfConfig()  # its config.json
    twin: str = ""  # a family with the same numbers throughout, as which its files are read
    model_type: str = ""  # of the config, where it is not the key in `families.FAMILIES`

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
        """Whether a gate weighs the output of the shared experts."""
        return self._has("one")

    def _has(self, size: str) -> bool:
        return any(size in part.shape for row in self.rows for part in row.parts)
