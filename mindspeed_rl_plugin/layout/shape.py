"""ModelShape: the sizes of a model without its parallel layout, from Megatron's arguments or from a config.json."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from mindspeed_rl_plugin.checks.refused_flags import model_refusals
from mindspeed_rl_plugin.layout.families import FAMILIES, GROUP_LIMITED, family_of, find_family
from mindspeed_rl_plugin.layout.family_rows import HEAD_WEIGHT
from mindspeed_rl_plugin.layout.family_table import Family, LayerType, Part, Row
from mindspeed_rl_plugin.layout.parallel import expert_layers, noop_layers

# Sizes of latent attention, and their names in a config.json.
LATENT_FIELDS = {
    "q_lora": "q_lora_rank",
    "kv_lora": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "value": "v_head_dim",
}


@dataclass(frozen=True)
class Canonical:
    """A canonical tensor: one of the Hugging Face checkpoint, unsplit and unpadded."""

    shape: tuple[int, ...]
    axis: int  # along which trainer and engine split it
    wide: bool = False  # whether it is sent and converted as float32, see `Part`

    @property
    def slices(self) -> int:
        return self.shape[self.axis]

    def slice_bytes(self, itemsize: int) -> int:
        return prod(self.shape) // self.slices * (4 if self.wide else itemsize)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model of one family. Raises ValueError for an unknown family or sizes that do not fit together."""

    family: str
    layers: int
    hidden: int
    heads: int  # number of query heads
    groups: int  # number of key heads (query groups)
    head_dim: int  # size of a query head
    ffn: int  # width of the MLP
    vocab: int  # rows of the canonical embedding
    padded_vocab: int  # rows of Megatron's embedding on all tensor parallel ranks together
    tied: bool = False  # the head shares the embedding's weight
    experts: int = 0  # number of routed experts of a layer
    expert_ffn: int = 0  # width of a routed expert
    shared_ffn: int = 0  # width of the shared experts together
    dense_layers: tuple[int, ...] = ()  # numbers of the layers without experts
    q_lora: int = 0  # rank of latent attention's queries; 0: not compressed
    kv_lora: int = 0  # rank of latent attention's keys and values
    nope: int = 0  # latent attention: size of the part of a head without rotary position
    rope: int = 0  # latent attention: size of the part of a head with rotary position
    value: int = 0  # latent attention: size of a head's value

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"model family {self.family!r} is unknown; known: {', '.join(FAMILIES)}")
        if self.heads % self.groups:
            raise ValueError(f"{self.heads} attention heads do not divide into {self.groups} query groups")
        if self.vocab > self.padded_vocab:
            raise ValueError(
                f"vocabulary of {self.vocab} exceeds Megatron's padded {self.padded_vocab}; "
                "tokenizer and checkpoint belong to different models, or --vocab-size is wrong"
            )
        needed = {size for row in self.table.rows if self._has(row) for part in row.parts for size in part.shape}
        if set(self.dense_layers) - set(range(self.layers)):
            raise ValueError(f"dense layers {self.dense_layers} are not all among the {self.layers} layers")
        unknown = sorted(name for name in needed - {"ffn"} if self._sizes[name] < 1)
        if unknown:
            raise ValueError(f"a model of family {self.family} needs sizes that are not given: {', '.join(unknown)}")

    @property
    def table(self) -> Family:
        return FAMILIES[self.family]

    @property
    def moe_layers(self) -> int:
        return self.layers - len(self.dense_layers) if self.table.experts else 0

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Sizes by the names in `family_table.Part`: the fields, and those below (here `value` is of all heads)."""
        return vars(self) | {
            "query": self.heads * self.head_dim,
            "key": self.groups * self.head_dim,
            "head": self.head_dim,
            "qkv": (self.heads + 2 * self.groups) * self.head_dim,
            "one": 1,
            "kv_down": self.kv_lora + self.rope,
            "q_up": self.heads * (self.nope + self.rope),
            "kv_up": self.heads * (self.nope + self.value),
            "value": self.heads * self.value,
        }

    def shape_of(self, part: Part) -> tuple[int, ...]:
        return tuple(self._sizes[name] for name in part.shape)

    def names_of(self, row: Row, layer: int, expert: int = 0) -> tuple[str, ...]:
        """Canonical names of a row's parts; a tied head has the embedding's name. layer, expert: global numbers."""
        names = (self.table.embedding if self.tied and part.name == HEAD_WEIGHT else part.name for part in row.parts)
        return tuple(name.format(layer=layer, expert=expert) for name in names)

    def rows(self, layer_type: LayerType) -> tuple[Row, ...]:
        """Rows that the model has of a type of layer."""
        return tuple(row for row in self.table.rows if row.layer_type is layer_type and self._has(row))

    def _has(self, row: Row) -> bool:
        """Whether the model has a row: some exist only if queries are compressed, some only if they are not."""
        compressed = any("q_lora" in part.shape for part in row.parts)
        return not (compressed and not self.q_lora) and not (row.without and self._sizes[row.without])

    def rows_in_order(self) -> Iterator[tuple[Row, int]]:
        """All rows with the number of their layer, from the embedding to the head; 0 for rows outside of layers."""
        yield from ((row, 0) for row in self.rows(LayerType.EMBEDDING))
        yield from ((row, layer) for layer in range(self.layers) for row in self.layer_rows(layer))
        yield from ((row, 0) for row in self.rows(LayerType.OUTPUT))

    def layer_rows(self, layer: int) -> tuple[Row, ...]:
        """Rows of a layer, with the rows of one expert. layer: global number."""
        if not self.table.experts or layer in self.dense_layers:
            return self.rows(LayerType.EVERY) + self.rows(LayerType.DENSE)
        return self.rows(LayerType.EVERY) + self.rows(LayerType.MOE) + self.rows(LayerType.EXPERT)

    @classmethod
    def from_megatron_args(cls, args: argparse.Namespace, vocab: int | None = None) -> ModelShape:
        """The shape that Megatron's validated arguments describe.

        vocab: unpadded size of the vocabulary, of the tokenizer or the Hugging Face config; None: `--vocab-size`.
        Raises ValueError with one line per argument that no family supports.
        """
        problems = model_refusals(args)
        if problems:
            raise ValueError("the rollout engine does not support this model:\n  " + "\n  ".join(problems))
        vocab = args.vocab_size if vocab is None else vocab
        if vocab is None:
            raise ValueError("the vocabulary's size is unknown; give --vocab-size or a tokenizer that has one")
        heads, hidden = args.num_attention_heads, args.hidden_size
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        experts, mla = getattr(args, "num_experts", None) or 0, bool(getattr(args, "multi_latent_attention", False))
        more = (_expert_sizes(args) if experts else {}) | (_latent_sizes(args) if mla else {})
        grouped = args.group_query_attention and not mla
        head_dim = more["nope"] + more["rope"] if mla else args.kv_channels or hidden // heads
        family = find_family(
            qkv_bias=bool(args.add_qkv_bias),
            qk_norm=bool(args.qk_layernorm),
            experts=bool(experts),
            mla=mla,
            score=getattr(args, "moe_router_score_function", None) or "softmax",
            partial=(share := rotated_share(args)) != 1.0,
            own_head_dim=head_dim * heads != hidden,
            by_best=GROUP_LIMITED in (getattr(args, "moe_router_load_balancing_type", None) or ()),
        )
        if share != 1.0 and not FAMILIES[family].hf.partial:
            flag = "--partial-rotary-factor" if getattr(args, "partial_rotary_factor", None) else "--rotary-percent"
            raise ValueError(f"{flag} {share}: family {family} rotates complete heads; leave the flag out")
        return cls(
            family=family,
            layers=args.num_layers - len(noop_layers(args)),
            hidden=hidden,
            heads=heads,
            groups=args.num_query_groups if grouped else heads,
            head_dim=head_dim,
            # Megatron's default for gated units: 8/3 of the hidden size, rounded down to a multiple of 64.
            ffn=args.ffn_hidden_size or int(4 * hidden * 2 / 3 / 64) * 64,
            vocab=vocab,
            padded_vocab=getattr(args, "padded_vocab_size", None) or -(-vocab // multiple) * multiple,
            tied=not args.untie_embeddings_and_output_weights,
            **more,
        )

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], padded_vocab: int | None = None) -> ModelShape:
        """The shape that a Hugging Face config.json describes.

        padded_vocab: rows of Megatron's embedding; None: unpadded. Raises ValueError for a model of no family.
        """
        family = family_of(config)
        if not family:
            known = ", ".join(dict.fromkeys(f.model_type or name for name, f in FAMILIES.items()))
            raise ValueError(f"model_type {config.get('model_type')!r} is of no known family; known: {known}")
        table = FAMILIES[family]
        config, hf = same_names(table, config), table.hf
        heads, hidden, more = config["num_attention_heads"], config["hidden_size"], {}
        if table.experts:
            width, first = config[hf.expert_ffn], range(config.get("first_k_dense_replace") or 0)
            shared = (config.get(hf.shared) or 0) * (1 if hf.shared.endswith("size") else width)
            more = dict(
                experts=config.get(hf.experts) or 0,
                expert_ffn=width,
                shared_ffn=shared if table.shared_experts else 0,
                dense_layers=tuple(sorted(config.get("mlp_only_layers") or first)) if hf.dense else (),
            )
        if table.mla:
            more |= {size: config.get(field) or 0 for size, field in LATENT_FIELDS.items()}
        return cls(
            family=table.twin or family,
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            groups=config.get("num_key_value_heads") or heads,
            head_dim=more["nope"] + more["rope"] if "nope" in more else config.get("head_dim") or hidden // heads,
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            padded_vocab=padded_vocab or config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            **more,
        )


def same_names(table: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """A Hugging Face config with one name for each field, and equal fields for files that describe equal models."""
    out = {name: value for name, value in config.items() if value is not None}
    for other, name in table.hf.synonyms.items():
        if other in out:
            out.setdefault(name, out.pop(other))
    if table.hf.window:
        out["use_sliding_window"] = "sliding_window" in out
    step = out.get("decoder_sparse_step", 1)
    if table.experts and step > 1:  # layers between the sparse ones are dense
        dense = {i for i in range(out.get("num_hidden_layers", 0)) if (i + 1) % step}
        out["mlp_only_layers"] = sorted({*out.get("mlp_only_layers", ()), *dense})
        out["decoder_sparse_step"] = 1
    if table.mla:  # with latent attention these two fields have no meaning
        out["head_dim"] = out.get("qk_rope_head_dim")
        out["num_key_value_heads"] = out.get("num_attention_heads")
    return out


def rotated_share(args: argparse.Namespace) -> float:
    """Fraction of a head that is rotated: Megatron's --rotary-percent, MindSpeed-LLM's --partial-rotary-factor."""
    return (getattr(args, "rotary_percent", None) or 1.0) * (getattr(args, "partial_rotary_factor", None) or 1.0)


def _expert_sizes(args: argparse.Namespace) -> dict[str, Any]:
    """Sizes of the experts. MindSpeed-LLM names some of them as DeepSeek does."""
    width = getattr(args, "moe_ffn_hidden_size", None) or getattr(args, "moe_intermediate_size", None)
    shared = getattr(args, "moe_shared_expert_intermediate_size", None)
    if shared is None:
        shared = (getattr(args, "n_shared_experts", None) or 0) * (width or 0)
    return dict(
        experts=args.num_experts,
        expert_ffn=width or args.ffn_hidden_size,
        shared_ffn=shared or 0,
        dense_layers=_dense_layers(args),
    )


def _dense_layers(args: argparse.Namespace) -> tuple[int, ...]:
    """Layers without experts. The numbers do not count no-op layers, but Megatron's do."""
    built = (i + 1 for i in range(args.num_layers) if i not in noop_layers(args))
    experts = expert_layers(args)
    return tuple(number for number, megatrons in enumerate(built) if megatrons not in experts)


def _latent_sizes(args: argparse.Namespace) -> dict[str, Any]:
    nope = getattr(args, "qk_head_dim", None) or args.qk_nope_head_dim
    rope = getattr(args, "qk_pos_emb_head_dim", None) or args.qk_rope_head_dim
    return dict(q_lora=args.q_lora_rank or 0, kv_lora=args.kv_lora_rank, nope=nope, rope=rope, value=args.v_head_dim)
