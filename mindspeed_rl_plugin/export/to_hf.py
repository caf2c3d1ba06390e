"""`python -m mindspeed_rl_plugin export`: a Megatron checkpoint as a Hugging Face model in sharded safetensors.

python -m mindspeed_rl_plugin export --load CKPT --out DIR [--tokenizer DIR]
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl_plugin.export.checkpoint import Checkpoint
from mindspeed_rl_plugin.export.cli import DTYPES, make_parser, run
from mindspeed_rl_plugin.export.convert import Assembled
from mindspeed_rl_plugin.export.files import copy_tokenizer, write_shards
from mindspeed_rl_plugin.reshard.layout import ModelShape, canonical_tensors
from mindspeed_rl_plugin.rollout.hf_config import derive_config, write_config


def main(argv: list[str]) -> int:
    """Run `export`. Returns 0, or 1 with a message."""
    parser = make_parser("export", "Megatron checkpoint (--ckpt-format torch)", "directory of the Hugging Face model")
    parser.add_argument("--iteration", type=int, help="which one (default: the latest)")
    parser.add_argument("--vocab", type=int, help="rows of the embedding that are tokens (default: as saved)")
    parser.add_argument("--config", type=Path, help="config.json to take, instead of one derived from the arguments")
    parser.add_argument("--tokenizer", type=Path, help="directory whose tokenizer is copied")
    parser.add_argument("--shard-gb", type=float, default=5.0, help="largest file (default: 5)")
    return run(parser, argv, export)


def export(options: argparse.Namespace) -> str:
    """Write the Hugging Face model; returns what was done, in one line. Raises ValueError."""
    checkpoint = Checkpoint(options.load, options.iteration)
    config, shape = _config(checkpoint.args, options)
    tensors = canonical_tensors(shape)
    whole = Assembled(tensors, checkpoint.held(shape))
    given = DTYPES.get(options.dtype)

    def dtype(name: str) -> torch.dtype:
        return torch.float32 if tensors[name].wide else given or whole.dtype(name)

    sizes = [(name, math.prod(t.shape) * dtype(name).itemsize) for name, t in tensors.items()]
    files, total = write_shards(
        options.out, sizes, lambda name: whole.make(name, dtype(name)), int(options.shard_gb * 1e9)
    )
    write_config(config | {"torch_dtype": str(dtype(next(iter(tensors)))).removeprefix("torch.")}, options.out)
    if options.tokenizer:
        copy_tokenizer(options.tokenizer, options.out)
    size = f"{len(tensors)} tensors, {total / 1e9:.3f} GB, files: {files}"
    return f"exported {checkpoint.folder} to {options.out}: {size}"


def _config(args: argparse.Namespace, options: argparse.Namespace) -> tuple[dict[str, Any], ModelShape]:
    """config.json and shape of the model that saved arguments describe."""
    config = None
    if options.config:
        path = options.config / "config.json" if options.config.is_dir() else options.config
        config = json.loads(path.read_text())
    vocab = options.vocab or (config or {}).get("vocab_size") or args.vocab_size or args.padded_vocab_size
    shape = ModelShape.from_megatron_args(args, vocab)
    if config is None:
        return derive_config(args, vocab_size=vocab), shape
    described = ModelShape.from_hf_config(config, shape.padded_vocab)
    if described != shape:
        raise ValueError(f"--config describes another model:\n  config.json {described}\n  checkpoint  {shape}")
    return config, shape
