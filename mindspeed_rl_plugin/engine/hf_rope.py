"""Rotary embeddings: `rope_scaling` of the engine's config, and a comparison of its frequencies with the built model's.

Sources: rotary_pos_embedding.py and yarn_rotary_pos_embedding.py of Megatron core, rotary_pos_embedding.py and
mla_dot_product_attention.py of MindSpeed-LLM, modeling_rope_utils.py of transformers.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

YARN_TURNS = {"beta_fast": 32.0, "beta_slow": 1.0}  # YaRN's defaults, if a config.json or the arguments lack them


def rope_scaling(args: Namespace) -> dict[str, Any] | None:
    """`rope_scaling` of the model that Megatron's arguments describe; None for plain rope.

    Raises ValueError for a kind that no supported family has, and for YaRN with missing or unsupported values.
    """
    kind = getattr(args, "rope_scaling_type", None)  # MindSpeed-LLM
    if kind not in (None, "llama3", "yarn"):
        raise ValueError(
            f"--rope-scaling-type {kind}: no supported model family has it (known: llama3, yarn). The families with "
            "longrope (Phi-3.5) and plm (PLM) are not supported"
        )
    if kind == "yarn":
        return _mindspeeds_yarn(args)
    if kind is None and getattr(args, "multi_latent_attention", False):
        return _megatrons_yarn(args)
    if kind is None and not getattr(args, "use_rope_scaling", False):
        return None
    # In core the last three values are constants (rotary_pos_embedding.py, _apply_scaling); MindSpeed-LLM has flags.
    flags = kind == "llama3"
    return {
        "rope_type": "llama3",
        "factor": float(args.rope_scaling_factor),
        "low_freq_factor": float(args.low_freq_factor) if flags else 1.0,
        "high_freq_factor": float(args.high_freq_factor) if flags else 4.0,
        "original_max_position_embeddings": int(args.original_max_position_embeddings) if flags else 8192,
    }


def _megatrons_yarn(args: Namespace) -> dict[str, Any] | None:
    """`rope_scaling` of latent attention: DeepSeek's YaRN, or None for plain rope."""
    kind = getattr(args, "rope_type", None) or "yarn"
    if kind == "rope" or float(args.rotary_scaling_factor) == 1.0:
        return None
    return _yarn(
        args,
        float(args.rotary_scaling_factor),
        getattr(args, "original_max_position_embeddings", None) or 4096,
        float(getattr(args, "mscale", 1.0)),
        float(getattr(args, "mscale_all_dim", 0.0)),
    )


def _mindspeeds_yarn(args: Namespace) -> dict[str, Any]:
    """`rope_scaling` of `--rope-scaling-type yarn`. Without latent attention MindSpeed-LLM computes the factor itself,
    and scales cosine and sine as transformers does for a config without mscale."""
    original = args.rope_scaling_original_max_position_embeddings
    if not original:
        raise ValueError("--rope-scaling-type yarn needs --rope-scaling-original-max-position-embeddings")
    mscale, all_dim = float(args.rope_scaling_mscale), float(args.rope_scaling_mscale_all_dim or 0.0)
    if getattr(args, "multi_latent_attention", False):
        if not args.rope_scaling_factor:
            raise ValueError("--rope-scaling-type yarn with --multi-latent-attention needs --rope-scaling-factor")
        return _yarn(args, float(args.rope_scaling_factor), original, mscale, all_dim)
    if (mscale, all_dim) != (1.0, 0.0):
        raise ValueError(
            f"--rope-scaling-mscale {mscale} --rope-scaling-mscale-all-dim {all_dim}: the engine uses them only in "
            "multi-latent attention; leave them out"
        )
    scaling = _yarn(args, args.max_position_embeddings / original, original, mscale, all_dim)
    return {name: value for name, value in scaling.items() if not name.startswith("mscale")}


def _yarn(args: Namespace, factor: float, original: float, mscale: float, mscale_all_dim: float) -> dict[str, Any]:
    turns = {name: float(getattr(args, name, usual)) for name, usual in YARN_TURNS.items()}
    names = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": int(original)}
    return names | turns | {"mscale": mscale, "mscale_all_dim": mscale_all_dim}


def rope_frequencies(config: Mapping[str, Any], *, scaled: bool = True) -> Tensor:
    """Inverse frequencies that the engine computes from a normalized config: float32 `[D / 2]`; D entries of a head are
    rotated.

    scaled: False for the frequencies before scaling. Low frequencies are divided by `factor`, high ones are kept. Those
    between are interpolated: in Llama 3 linearly in the frequency, in YaRN linearly in its index.
    """
    dim = int(config["head_dim"] * config["partial_rotary_factor"])
    base, scaling = config["rope_theta"], config["rope_scaling"]
    inverse = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if scaling is None or not scaled:
        return inverse
    original = scaling["original_max_position_embeddings"]
    if scaling["rope_type"] == "yarn":
        fast, slow = (
            dim * math.log(original / (scaling[name] * 2 * math.pi)) / (2 * math.log(base)) for name in YARN_TURNS
        )
        first, last = max(math.floor(fast), 0), min(math.ceil(slow), dim - 1)
        keep = 1 - ((torch.arange(dim // 2) - first) / max(last - first, 0.001)).clamp(0, 1)
    else:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((original * inverse / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return inverse * keep + inverse / scaling["factor"] * (1 - keep)


def check_rotary(config: Mapping[str, Any], rotary: torch.nn.Module) -> None:
    """Compare a normalized config with the rotary embedding of the built Megatron model, which may differ from the
    flags: core's pretrain_gpt.py, for example, ignores `--rope-scaling-factor`. `inv_freq` holds unscaled frequencies
    in Megatron's own YaRN, otherwise scaled ones. Raises ValueError for a relative difference above 1e-5."""
    megatrons = hasattr(rotary, "inv_freq_extra")
    if megatrons and (scaling := config["rope_scaling"]):
        named = {"factor": "scaling_factor"}
        built = {name: getattr(rotary, named.get(name, name), value) for name, value in scaling.items()}
        if built != scaling:
            raise ValueError(f"rotary embedding: Megatron's model has YaRN of {built}, the engine of {scaling}")
    ours = rope_frequencies(config, scaled=not megatrons)
    theirs = rotary.inv_freq.detach().float().cpu().flatten()
    if ours.shape != theirs.shape:
        sizes = f"{theirs.numel()} frequencies, the engine {ours.numel()}"
        raise ValueError(f"rotary embedding: Megatron's model has {sizes}")
    wrong = ((ours - theirs).abs() > 1e-5 * theirs.abs()).nonzero().flatten().tolist()
    if wrong:
        i = wrong[0]
        raise ValueError(
            f"rotary embedding: frequency {i} is {theirs[i]:.6g} in Megatron's model and {ours[i]:.6g} in the engine"
            f" ({len(wrong)} of {ours.numel()} differ); the launch script and its arguments disagree on"
            " --rotary-base, --use-rope-scaling or --rope-scaling-factor (pretrain_gpt.py always scales by 8)"
        )
