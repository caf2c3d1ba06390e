"""`python -m mindspeed_rl_plugin export`: a Megatron checkpoint as a Hugging Face model in sharded safetensors.

python -m mindspeed_rl_plugin export --load CKPT --out DIR [--tokenizer DIR]
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl_plugin.engine.hf_config import derive_config, write_config
from mindspeed_rl_plugin.layout.layout import ModelShape, canonical_tensors
from mindspeed_rl_plugin.prompts.ends import GENERATION, config_tokens, model_tokens
from mindspeed_rl_plugin.prompts.tokenizer import vocabulary_size
from mindspeed_rl_plugin.tools.convert.checkpoint import Assembled, Checkpoint, model_parts
from mindspeed_rl_plugin.tools.convert.cli import FLAG_DTYPES, UNFINISHED, make_parser, run, size
from mindspeed_rl_plugin.tools.convert.files import HF_CONFIG, check_loads, open_tensors, tokenizer_files, write_shards
from mindspeed_rl_plugin.tools.convert.lora_files import Factors, MergedModel, base_of, lora_of, write_peft
from mindspeed_rl_plugin.tools.layout_args import read_config, shape_of
from mindspeed_rl_plugin.weights.live import differences, raise_if


def main(argv: list[str]) -> int:
    """Run `export`. Returns 0, or 1 with a message."""
    parser = make_parser("export", "Megatron checkpoint (torch or torch_dist)", "directory of the Hugging Face model")
    parser.add_argument("--iteration", type=int, help="iteration to export (default: the latest)")
    parser.add_argument(
        "--vocab", type=int, help="number of tokens without padding (default: by --config, checkpoint, or --tokenizer)"
    )
    parser.add_argument("--config", type=Path, help="config.json to use (default: from saved arguments)")
    parser.add_argument("--tokenizer", type=Path, help="directory whose tokenizer is copied")
    parser.add_argument("--rl-trust-remote-code", action="store_true", help="run the model's own code to check files")
    only = "checkpoint of --rl-lora-rank: "
    parser.add_argument("--base", type=Path, help=f"{only}directory of --load of that run, if it was moved")
    parser.add_argument("--adapter", action="store_true", help=f"{only}write the adapters alone, as files for peft")
    parser.add_argument("--shard-gb", type=float, default=5.0, help="largest file, in GB (default: 5)")
    return run(parser, argv, export)


def export(options: argparse.Namespace) -> str:
    """Write the Hugging Face model; returns a text that says what was done. Raises ValueError."""
    checkpoint = Checkpoint(options.load, options.iteration)
    config, shape, padding = _config(checkpoint.args, options)
    tensors, lora = canonical_tensors(shape), lora_of(checkpoint)
    given = FLAG_DTYPES.get(options.dtype)
    if lora is None and (options.adapter or options.base):
        raise ValueError(f"{checkpoint.folder} holds a whole model; leave out --adapter and --base")
    factors = Factors(shape, checkpoint, lora) if lora else None
    if options.adapter:
        if options.tokenizer:
            raise ValueError(f"--tokenizer {options.tokenizer}: an adapter has the tokenizer of its base; leave it out")
        (out := options.out / UNFINISHED).mkdir()
        count = write_peft(out, shape, factors, given or factors.stored_dtype, config["model_type"])
        _finish(out)
        return f"exported {checkpoint.folder} to {options.out}: {count} adapters, for peft"
    base = base_of(checkpoint, options.base) if lora else checkpoint
    parts = model_parts(replace(shape, padded_vocab=base.args.padded_vocab_size), base)  # of torch_dist it may differ
    whole = MergedModel(tensors, parts, factors=factors) if lora else Assembled(tensors, parts)

    def dtype(name: str) -> torch.dtype:
        return torch.float32 if tensors[name].wide else given or whole.dtype(name)

    # Checks that need little time are made before the weights are read.
    folders = [folder for folder in (options.config, options.tokenizer) if folder and folder.is_dir()]
    ids, note = _tokens(checkpoint.args, options.config, folders, shape.vocab)
    copied = tokenizer_files(options.tokenizer) if options.tokenizer else []
    if options.config and "auto_map" in config:
        copied += (options.config if options.config.is_dir() else options.config.parent).glob("*.py")
    out = options.out / UNFINISHED
    out.mkdir()
    written = {"torch_dtype": str(dtype(next(iter(tensors)))).removeprefix("torch.")}
    write_config(config | ids | written, out)
    for file in copied:
        (shutil.copytree if file.is_dir() else shutil.copyfile)(file, out / file.name)
    if given_ids := [file for folder in folders if (file := folder / GENERATION).is_file()]:
        shutil.copyfile(given_ids[0], out / GENERATION)
    elif ids:
        (out / GENERATION).write_text(json.dumps(ids, indent=1))
    notes = check_loads(out, bool(options.tokenizer), options.rl_trust_remote_code)
    sizes = {name: math.prod(t.shape) * dtype(name).itemsize for name, t in tensors.items()}
    files, total = write_shards(out, sizes, lambda name: whole.make(name, dtype(name)), int(options.shard_gb * 1e9))
    read = {name: tuple(t.get_shape()) for name, t in open_tensors(out).items()}
    raise_if(differences({name: t.shape for name, t in tensors.items()}, read), f"{out} does not hold what was written")
    _finish(out)
    done = f"{len(tensors)} tensors, {size(total)}, files: {files}"
    merged = f", merged into {base.folder}," if lora else ""
    return f"exported {checkpoint.folder}{merged} to {options.out}: {done}\n{padding}" + "\n".join([*notes, note])


def _finish(out: Path) -> None:
    """Move complete files to --out, config.json last."""
    for file in sorted(out.iterdir(), key=lambda file: file.name == HF_CONFIG):
        file.rename(out.parent / file.name)
    out.rmdir()


def _tokens(
    args: argparse.Namespace, config: Path | None, folders: Sequence[Path], vocab: int
) -> tuple[dict[str, Any], str]:
    """Ids of special tokens for config.json, and a line that names the source of the end tokens. Of the
    sources config (--config), folders and imported model, the first that names a token counts."""
    sources = [(str(config), config_tokens(config))] if config else []
    sources += [(str(folder), model_tokens(folder)) for folder in folders]
    sources.append(("the imported model", getattr(args, "hf_tokens", None) or {}))
    ids: dict[str, Any] = {}
    for _, named in reversed(sources):
        ids |= named
    source = next((name for name, named in sources if "eos_token_id" in named), None)
    if source is None:
        return ids, (
            "note: the token that ends a response is unknown, so an engine would generate up to its length limit; give "
            "--tokenizer with the model's tokenizer"
        )
    ends = ids["eos_token_id"]
    each = ends if isinstance(ends, list) else [ends]
    if not each or not all(isinstance(end, int) for end in each):
        raise ValueError(f"eos_token_id {ends!r} of {source}: give a token id, or a list of token ids")
    if not all(0 <= end < vocab for end in each):
        raise ValueError(f"eos_token_id {ends} is outside the vocabulary of {vocab}: {source} belongs to another model")
    return ids, f"eos_token_id {ends}, from {source}"


def _vocabulary(args: argparse.Namespace, options: argparse.Namespace, described: int | None) -> tuple[int, str]:
    """Number of embedding rows that are tokens; if unknown, of all rows, and a note. described: size by --config."""
    padded = args.padded_vocab_size
    if known := options.vocab or described or args.vocab_size:
        return known, ""
    entries = vocabulary_size(options.tokenizer) if options.tokenizer else 0
    if 0 < entries <= padded:
        return entries, ""
    source = f"--tokenizer {options.tokenizer} has {entries} tokens" if entries else "the number of tokens is unknown"
    return padded, (
        f"note: {source}: all {padded} rows of the embedding are exported, maybe with padding rows; "
        "--vocab N exports only the first N\n"
    )


def _config(args: argparse.Namespace, options: argparse.Namespace) -> tuple[dict[str, Any], ModelShape, str]:
    """config.json (that of --config, or derived from the arguments), shape of the model, the line of `_vocabulary`."""
    config = read_config(options.config, "--config") if options.config else None
    vocab, note = _vocabulary(args, options, (config or {}).get("vocab_size"))
    shape = ModelShape.from_megatron_args(args, vocab)
    if config is None:
        return derive_config(args, vocab_size=vocab), shape, note
    described = replace(shape_of(config, 1, "--config"), padded_vocab=shape.padded_vocab)
    pairs = ((f.name, getattr(described, f.name), getattr(shape, f.name)) for f in fields(shape))
    wrong = [f"{name}: config.json {theirs}, checkpoint {ours}" for name, theirs, ours in pairs if theirs != ours]
    raise_if(wrong, f"--config {options.config} describes another model")
    return config, shape, note
