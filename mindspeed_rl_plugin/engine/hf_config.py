"""Derives the engine's Hugging Face config from Megatron's arguments, and compares it with that of --rl-hf-model.

Differences between families are in their tables (`layout.families`). `ModelShape.from_megatron_args` refuses arguments
that change the model in a way that no family has.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.engine.hf_moe import expert_config
from mindspeed_rl_plugin.engine.hf_rope import YARN_TURNS, rope_scaling
from mindspeed_rl_plugin.layout.families import FAMILIES, family_of
from mindspeed_rl_plugin.layout.family_table import Family
from mindspeed_rl_plugin.layout.shape import LATENT_FIELDS, ModelShape, rotated_share, same_names
from mindspeed_rl_plugin.prompts.tokenizer import read_json

# Values, in all families, of fields that are missing in a config.json.
_COMMON_FIELDS = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"}

# Fields that must be equal in two configs of the same model, in addition to those in the family's table.
# max_position_embeddings is not one of them: it limits lengths and changes no result.
COMPARED = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "tie_word_embeddings",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "num_experts_per_tok",
    "partial_rotary_factor",
    *LATENT_FIELDS.values(),
)


def derive_config(args: Namespace, *, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> dict[str, Any]:
    """config.json of the model that Megatron's parsed and validated `args` describe.

    vocab_size: without Megatron's padding (see `model_vocabulary`), so that the engine never samples an id of the
    padding. Raises ValueError that names the flag if the model is of no supported family.
    """
    shape = ModelShape.from_megatron_args(args, vocab_size)
    heads, hidden = shape.heads, shape.hidden
    if not shape.table.hf.own_head_dim and shape.head_dim * heads != hidden:
        raise ValueError(
            f"--kv-channels {shape.head_dim}: in vLLM the head size of {shape.table.architecture} is --hidden-size /"
            f" --num-attention-heads = {hidden}/{heads}; leave --kv-channels out"
        )
    config = {
        "architectures": [shape.table.architecture],
        "model_type": shape.table.model_type or shape.family,
        "hidden_size": hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shape.groups,
        "head_dim": shape.head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": args.max_position_embeddings,
        # The argument of --norm-epsilon is called layernorm_epsilon from core 0.16 on.
        "rms_norm_eps": args.norm_epsilon if hasattr(args, "norm_epsilon") else args.layernorm_epsilon,
        "rope_theta": float(args.rotary_base),
        "rope_scaling": rope_scaling(args),
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "attention_bias": shape.table.qkv_bias,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": list(eos_token_ids) or None,
    }
    hf = shape.table.hf
    config |= {"partial_rotary_factor": rotated_share(args)} if hf.partial else {}
    return config | (expert_config(args, shape) if shape.table.experts else {}) | hf.fixed | hf.code | hf.written


def load_reference(directory: str) -> dict[str, Any]:
    """config.json of a Hugging Face directory. Raises ValueError if it is missing, or not that of a language model."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"--rl-hf-model {directory}: no config.json there; give a Hugging Face model directory")
    config = read_json(path)
    missing = {"model_type", "vocab_size"} - set(config)
    if missing:
        raise ValueError(f"--rl-hf-model {path}: fields {sorted(missing)} are missing; give a text-only language model")
    return config


def compare_configs(derived: Mapping[str, Any], reference: Mapping[str, Any]) -> list[str]:
    """A line for each field in which two configs describe different models; [] if they describe the same model."""
    ours, theirs = normalized(derived), normalized(reference)
    hf = family_table(derived).hf
    names = (hf.experts, hf.expert_ffn, hf.shared, hf.dense, *hf.defaults, *hf.fixed, *hf.code)
    fields = dict.fromkeys(filter(None, (*COMPARED, *names)))
    differ = [f for f in fields if ours.get(f) != theirs.get(f)]
    return [f"{f}: Megatron {ours.get(f)!r}, Hugging Face {theirs.get(f)!r}" for f in differ]


def check_against(derived: Mapping[str, Any], directory: str) -> None:
    """Compare with the config of `--rl-hf-model`. Raises ValueError that lists every difference."""
    differences = compare_configs(derived, load_reference(directory))
    if differences:
        listed = "\n  ".join(differences)
        raise ValueError(f"Megatron's arguments and --rl-hf-model {directory} describe different models:\n  {listed}")


def normalized(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config in the form in which configs are compared: with defaults, and with rope fields as in transformers 4."""
    table = family_table(config)
    out = {**_COMMON_FIELDS, **table.hf.defaults, **table.hf.fixed, **same_names(table, config)}
    rope = {**(out.pop("rope_parameters", None) or {}), **(out.pop("rope_scaling", None) or {})}
    out["rope_theta"] = float(rope.pop("rope_theta", out.get("rope_theta", 10000.0)))
    out["partial_rotary_factor"] = float(rope.pop("partial_rotary_factor", out.get("partial_rotary_factor", 1.0)))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    scaling = {k: float(v) if isinstance(v, int | float) else v for k, v in rope.items()}
    usual = YARN_TURNS if kind == "yarn" else {}
    out["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **usual, **scaling}
    heads = out.get("num_attention_heads", 1)
    out.setdefault("num_key_value_heads", heads)
    out.setdefault("head_dim", out.get("hidden_size", 0) // heads)
    out.setdefault("mlp_bias", False)
    out.setdefault("use_sliding_window", False)
    out["attention_bias"] = bool(out.get("attention_bias", False))
    if table.twin:
        out["model_type"] = table.twin
    return {**out, **table.hf.code}


def for_engine(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json for the engine. For some families it names another family, whose code in vLLM runs the model."""
    return {**config, **family_table(config).hf.engine}


def write_config(config: Mapping[str, Any], directory: str | Path) -> None:
    """Write config.json into an existing directory. Processes that write at the same time need a directory each."""
    (Path(directory) / "config.json").write_text(json.dumps(config, indent=1))


def family_table(config: Mapping[str, Any]) -> Family:
    """The table of a config's family; an empty one for an unknown family."""
    return FAMILIES.get(family_of(config), Family("", ()))
