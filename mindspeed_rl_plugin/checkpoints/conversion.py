"""MindSpeed-LLM's conversions: of Hugging Face weights in `--load`, before a start; to Hugging Face, after a save.

MindSpeed-LLM converts `--load` whenever it initialises process groups, also for a resume, which seldom needs these
weights; so our hook checks `needless` first. Sources: features_manager/convert_checkpoint, training/initialize.py and
training/checkpointing.py of MindSpeed-LLM 2.3.0 and 26.1.0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.checkpoints import checkpoint_files as files
from mindspeed_rl_plugin.checkpoints import disk
from mindspeed_rl_plugin.config.flag import spelt
from mindspeed_rl_plugin.environment import launch_env
from mindspeed_rl_plugin.prompts.tokenizer import read_if_there

ITERATION = 1  # iteration of the converter's output
# Sizes that the converter does not compare: with a wrong model, the run would fail only after the conversion.
_UNCOMPARED_SIZES = ("hidden_size", "num_attention_heads")
# model_type of config.json -> names of --model-type-hf that convert it.
_MODEL_TYPES = {
    "llama": ("llama2",),
    "qwen3": ("qwen3",),
    "qwen3_moe": ("qwen3-moe",),
    "deepseek_v3": ("deepseek3",),
    "glm4_moe": ("glm45-air", "glm45", "glm45-moe"),
    "seed_oss": ("seed-oss",),
    "deepseek_v2": ("deepseek2-lite",),
    "bailing_moe": ("bailing_mini",),
    "mistral": ("magistral", "llama2"),
}


def converts(args: Any) -> bool:
    """Whether MindSpeed-LLM converts `--load`: with --enable-hf2mg-convert; from 26.1.0 on also if `--load` has Hugging
    Face weights and --enable-mg2hf-convert is not given."""
    asked = getattr(args, "enable_hf2mg_convert", None)
    return bool(asked) or (getattr(args, "enable_mg2hf_convert", True) is False and bool(_weights(args.load)))


def converted_to(args: Any) -> str:
    """Directory of the converted checkpoint, which need not exist yet."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    tp, pp, ep = (getattr(args, name, None) or 1 for name in sizes)
    return _place(args)[1] or os.path.join(args.load, f"megatron_cache_tp{tp}pp{pp}ep{ep}")


def problems(args: Any) -> Iterator[str]:
    """Reasons why MindSpeed-LLM cannot convert. Called before MindSpeed-LLM's own validation, which only asserts."""
    if getattr(args, "enable_mg2hf_convert", False) and not args.save:
        yield "--enable-mg2hf-convert converts the checkpoints in --save, which is not given: give --save"
    if not converts(args):
        return
    folder = args.load
    config = read_if_there(Path(folder, "config.json")) if folder else {}
    if not config or not _weights(folder):
        yield (
            f"--enable-hf2mg-convert: --load {folder} lacks files of a Hugging Face model (config.json, and "
            "*.safetensors or pytorch_model*.bin); give one, or remove the flag to load a Megatron checkpoint"
        )
        return
    if args.enable_hf2mg_convert and getattr(args, "ckpt_format", None) == "torch_dist":
        yield "--enable-hf2mg-convert writes the format torch, --ckpt-format is torch_dist; give --ckpt-format torch"
    if getattr(args, "ckpt_step", None):
        yield f"--ckpt-step {args.ckpt_step}: converting --load {folder} writes only one step; remove --ckpt-step"
    if launch_env()["rank"] == 0 and files.read_tracker(args.save) is None:  # this rank converts
        yield from _no_place(args)
        yield from _other_model(args, config)


def notes(args: Any) -> Iterator[str]:
    """Notes on the conversions, one a line."""
    if converts(args):
        yield (
            "--enable-hf2mg-convert: the first rank converts at each start that is no resume; the other ranks wait for "
            f"it, at most --distributed-timeout-minutes {args.distributed_timeout_minutes}"
        )
    if not getattr(args, "enable_mg2hf_convert", False):
        return
    if getattr(args, "ckpt_format", None) == "torch_dist":
        yield "--enable-mg2hf-convert does nothing with --ckpt-format torch_dist: MindSpeed-LLM only converts torch"
    elif not args.only_convert_last_checkpoint:
        yield (
            "--enable-mg2hf-convert: after each save the first rank converts the checkpoint while the others wait; the "
            "disk must have room for this copy of the weights. --only-convert-last-checkpoint converts only the last"
        )


def needless(args: Any) -> str | None:
    """Why this start needs no weights of `--load`; None: it needs them. Reads files.

    A resume needs them if the reference's checkpoint was removed and the conversion makes this same checkpoint again.
    """
    saved = files.read_tracker(args.save)
    if saved is None or not files.has_state(args.save, saved):
        return None
    reference = files.read_state(args.save, saved)[0]["reference"]["path"]
    removed = reference is not None and not os.path.isdir(reference)
    converted = files.iteration_dir(os.path.abspath(converted_to(args)), ITERATION)
    if removed and reference == converted:
        return None
    return f"{args.save} holds a checkpoint to resume from: --load {args.load} is not converted"


def _place(args: Any) -> tuple[str, str | None]:
    """The flag for the directory of the converted checkpoint, and its value."""
    name = "mg_cache_dir" if hasattr(args, "mg_cache_dir") else "mg_save_dir"  # 2.3.0 and 26.1.0
    return f"--{name.replace('_', '-')}", getattr(args, name, None)


def _no_place(args: Any) -> Iterator[str]:
    """Why the converted checkpoint cannot be written."""
    target, (name, given) = converted_to(args), _place(args)
    flag = f"{name} {given}" if given else f"--load {args.load}"
    if not disk.writable(target):
        yield (
            f"{flag} is not writable, but the converted weights go to {target}; give {name} with a directory that is "
            "writable"
        )
    elif not os.path.isdir(files.iteration_dir(target, ITERATION)):
        need, free = sum(os.path.getsize(path) for path in _weights(args.load)), disk.free_bytes(target)
        if free < need:
            yield (
                f"{flag}: the disk has {free / 1e9:.3g} GB free, but the converted weights take {need / 1e9:.3g} GB; "
                f"give {name} with a directory on another disk"
            )


def _other_model(args: Any, config: dict[str, Any]) -> Iterator[str]:
    """Sizes in config.json that differ from the flags."""
    pairs = [(name, config.get(name), getattr(args, name, None)) for name in _UNCOMPARED_SIZES]
    wrong = [f"{spelt(n)} {ours}, in config.json {theirs}" for n, theirs, ours in pairs if _differ(theirs, ours)]
    layers, theirs = _real_layers(args), config.get("num_hidden_layers")
    if theirs and layers > theirs:
        wrong.append(f"--num-layers {layers} without noop layers, in config.json {theirs}")
    known, kind = _MODEL_TYPES.get(config.get("model_type", "")), args.model_type_hf
    if known and kind and kind not in known:
        wrong.append(f"--model-type-hf {kind}, in config.json {config['model_type']}: give {' or '.join(known)}")
    if kind == "llama2" and _differ(config.get("head_dim"), args.hidden_size // args.num_attention_heads):
        wrong.append(f"--model-type-hf llama2, in config.json head_dim {config['head_dim']}: give magistral")
    newer = {"torch_dtype": config.get("dtype"), "rope_theta": (config.get("rope_parameters") or {}).get("rope_theta")}
    if lacks := {name: value for name, value in newer.items() if value is not None and name not in config}:
        yield (
            f"--load {args.load}: config.json has names of fields of transformers 5, but MindSpeed-LLM reads older "
            f"names; add {json.dumps(lacks)[1:-1]} to it"
        )
    if wrong:
        yield f"--load {args.load} is not the model that the flags describe: {'; '.join(wrong)}"


def _real_layers(args: Any) -> int:
    """Number of layers without noop layers. --noop-layers is a text before MindSpeed's validation, a set after it."""
    noop = getattr(args, "noop_layers", None) or ()
    return (args.num_layers or 0) - len(noop.split(",") if isinstance(noop, str) else noop)


def _differ(theirs: Any, ours: Any) -> bool:
    return None not in (theirs, ours) and theirs != ours


def _weights(folder: str | None) -> list[Path]:
    """The files that MindSpeed-LLM takes for Hugging Face weights."""
    if not folder or not os.path.isdir(folder):
        return []
    return [*Path(folder).glob("*.safetensors"), *Path(folder).glob("pytorch_model*.bin")]
