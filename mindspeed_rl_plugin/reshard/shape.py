"""ModelShape: the sizes of a model, apart from any parallel layout, and how they follow from Megatron's arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_rl_plugin.reshard.families import EMBEDDING, FAMILIES, HEAD, Family, Part, Row, find_family


@dataclass(frozen=True)
class Canonical:
    """A canonical tensor: its shape, and the axis along which both sides cut it."""

    shape: tuple[int, ...]
    axis: int

    @property
    def slices(self) -> int:
        """Slices along `axis`."""
        return self.shape[self.axis]

    @property
    def slice_numel(self) -> int:
        """Elements of one slice."""
        count = 1
        for size in self.shape:
            count *= size
        return count // self.slices


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model of one family.

    hidden: H; heads, groups: query heads and key heads; head_dim: size of one head; ffn: MLP width;
    vocab: rows of the canonical embedding; padded_vocab: rows of Megatron's, all tensor parallel
    ranks together; tied: the head shares the embedding's weight.
    Raises ValueError for an unknown family or sizes that do not fit together.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    padded_vocab: int
    tied: bool = False

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

    @property
    def table(self) -> Family:
        return FAMILIES[self.family]

    @property
    def qkv_bias(self) -> bool:
        return self.table.qkv_bias

    @property
    def qk_norm(self) -> bool:
        return self.table.qk_norm

    def size(self, name: str) -> int:
        """A named size of `families.Part` as a number."""
        return {
            "vocab": self.vocab,
            "hidden": self.hidden,
            "query": self.heads * self.head_dim,
            "key": self.groups * self.head_dim,
            "head": self.head_dim,
            "ffn": self.ffn,
        }[name]

    def shape_of(self, part: Part) -> tuple[int, ...]:
        """Canonical shape of a part."""
        return tuple(self.size(name) for name in part.shape)

    def canonical_name(self, part: Part, layer: int) -> str:
        """Canonical name of a part at a global layer; a tied head is the embedding."""
        if self.tied and part.name == HEAD:
            return EMBEDDING
        return part.name.format(layer=layer)

    def rows(self, stage: Any) -> tuple[Row, ...]:
        """Rows of the family that live at a pipeline stage."""
        return tuple(row for row in self.table.rows if row.stage is stage)

    @classmethod
    def from_megatron_args(cls, args: argparse.Namespace, vocab: int | None = None) -> ModelShape:
        """The shape that Megatron's validated arguments describe.

        vocab: real vocabulary, as the tokenizer or the Hugging Face config says; None takes `--vocab-size`.
        Raises ValueError with one line per argument that no family expresses.
        """
        problems = [text for check in _REFUSED if (text := check(args))]
        if problems:
            raise ValueError("the rollout engine cannot express this model:\n  " + "\n  ".join(problems))
        vocab = args.vocab_size if vocab is None else vocab
        if vocab is None:
            raise ValueError("the vocabulary's size is unknown; give --vocab-size or a tokenizer that has one")
        heads, hidden = args.num_attention_heads, args.hidden_size
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        return cls(
            family=find_family(qkv_bias=bool(args.add_qkv_bias), qk_norm=bool(args.qk_layernorm)),
            layers=args.num_layers,
            hidden=hidden,
            heads=heads,
            groups=args.num_query_groups if args.group_query_attention else heads,
            head_dim=args.kv_channels or hidden // heads,
            # Megatron's own default for gated units: 8/3 of the hidden size, down to a multiple of 64.
            ffn=args.ffn_hidden_size or int(4 * hidden * 2 / 3 / 64) * 64,
            vocab=vocab,
            padded_vocab=getattr(args, "padded_vocab_size", None) or -(-vocab // multiple) * multiple,
            tied=not args.untie_embeddings_and_output_weights,
        )


def _must_be(name: str, allowed: tuple[Any, ...], fix: str) -> Callable[[argparse.Namespace], str | None]:
    def check(args: argparse.Namespace) -> str | None:
        value = getattr(args, name, allowed[0])
        return None if value in allowed else f"{name} is {value!r}: {fix}"

    return check


_OFF = (False, None, 0, "")
_PLAIN = "the families have no such thing; leave it out"

# Where an argument is unknown to a Megatron version, its first allowed value is assumed.
_ARGUMENTS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "normalization": (("RMSNorm",), "give --normalization RMSNorm"),
    "swiglu": ((True,), "give --swiglu; the families have a gated SiLU MLP"),
    "add_bias_linear": ((False,), "give --disable-bias-linear"),
    "position_embedding_type": (("rope",), "give --position-embedding-type rope"),
    "rotary_interleaved": (_OFF, "the families rotate halves; drop --rotary-interleaved"),
    "rotary_percent": ((1.0,), "the families rotate the whole head; drop --rotary-percent"),
    "no_rope_freq": (_OFF, "the families rotate in every layer"),
    "apply_layernorm_1p": (_OFF, "norm weights are stored minus one; drop --apply-layernorm-1p"),
    "layernorm_zero_centered_gamma": (_OFF, "norm weights are stored minus one; drop --apply-layernorm-1p"),
    "qk_l2_norm": (_OFF, "the families have no L2 norm of q and k"),
    "squared_relu": (_OFF, "the families have a gated SiLU MLP"),
    "quick_geglu": (_OFF, "the families have a gated SiLU MLP"),
    "openai_gelu": (_OFF, "the families have a gated SiLU MLP"),
    "geglu": (_OFF, "the families have a gated SiLU MLP"),
    "num_experts": (_OFF, "mixture-of-experts models are not supported in this version"),
    "multi_latent_attention": (_OFF, "multi-latent attention is not supported in this version"),
    "mtp_num_layers": (_OFF, "multi-token prediction is not supported in this version"),
    "attention_output_gate": (_OFF, "the families have no gate on the attention output"),
    "experimental_attention_variant": (_OFF, "the families have plain attention"),
    "softmax_type": (("vanilla", None), "the families have no learned softmax offset"),
    "is_hybrid_model": (_OFF, "hybrid models are not supported"),
    "hybrid_layer_pattern": (_OFF, "hybrid models are not supported"),
    "heterogeneous_layers_config_path": (_OFF, "all layers must be alike"),
    "heterogeneous_layers_config_encoded_json": (_OFF, "all layers must be alike"),
    "use_legacy_models": (_OFF, "only Megatron core models are supported; drop --use-legacy-models"),
    "use_megatron_fsdp": (_OFF, "parameters must be whole on each rank; use the distributed optimizer instead"),
    "use_torch_fsdp2": (_OFF, "parameters must be whole on each rank; use the distributed optimizer instead"),
    "gtp_weight_remat_size": ((1, None), "drop --tensor-parallel-num-weight-shards; weights must be whole"),
    "apply_residual_connection_post_layernorm": (_OFF, _PLAIN),
    "glu_linear_offset": ((0.0,), _PLAIN),
    "activation_func_clamp_value": ((None,), _PLAIN),
    "rotary_seq_len_interpolation_factor": ((None, 1), _PLAIN),
    "window_size": ((None,), _PLAIN),
    "softmax_scale": ((None,), _PLAIN),
    "hybrid_override_pattern": ((None,), "hybrid models are not supported"),
    "use_mup": (_OFF, _PLAIN),
    # MindSpeed and MindSpeed-LLM
    "noop_layers": (_OFF, "layers that do nothing are not supported; drop --noop-layers"),
    "tp_2d": (_OFF, "2-D tensor parallelism is not supported; drop --tp-2d"),
    "use_nd_matmul": (_OFF, "N-D matmul is not supported; drop --use-nd-matmul"),
    "post_norm": (_OFF, "the families have no norm after attention and MLP"),
    "input_embeds_norm": (_OFF, "the families do not scale embeddings"),
    "embedding_multiplier_scale": ((1.0, None), "the families do not scale embeddings"),
    "output_multiplier_scale": ((None, 1.0), "the families do not scale logits"),
    "output_logit_softcapping": (_OFF, "the families do not cap logits"),
    "attn_logit_softcapping": (_OFF, "the families do not cap attention logits"),
    "scale_depth": (_OFF, "the families do not scale residuals"),
    "dim_model_base": (_OFF, "the families do not scale logits"),
    "add_dense_bias": (_OFF, _PLAIN),
    "add_output_layer_bias": (_OFF, _PLAIN),
    "add_rmsnorm_offset": (_OFF, _PLAIN),
    "no_post_layer_norm": (_OFF, _PLAIN),
    "gelu_tanh": (_OFF, "the families have a gated SiLU MLP"),
    "fc_type": ((None,), _PLAIN),
    "share_kvstates": (_OFF, _PLAIN),
    "cla_share_factor": ((1,), _PLAIN),
    "full_attention_interval": (_OFF, "the families have plain attention"),
    "scale_emb": ((None,), "the families do not scale embeddings"),
    "query_pre_attn_scalar": ((None,), _PLAIN),
    "sliding_window": ((None,), "the families have plain attention"),
    "interleave_sliding_window": ((None,), "the families have plain attention"),
    "partial_rotary_factor": ((0.0,), "the families rotate the whole head"),
    "dynamic_factor": ((1.0,), _PLAIN),
    "use_glm_rope": (_OFF, "the families rotate halves"),
}

_REFUSED = tuple(_must_be(name, allowed, fix) for name, (allowed, fix) in _ARGUMENTS.items())
