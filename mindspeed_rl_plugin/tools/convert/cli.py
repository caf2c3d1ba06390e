"""What `export` and `import` have in common on the command line."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch

UNFINISHED = ".unfinished"  # folder in --out for files that are incomplete or not checked yet
FLAG_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def make_parser(name: str, load: str, out: str) -> argparse.ArgumentParser:
    """Parser with the flags of both commands; load, out: texts of --help for these flags."""
    parser = argparse.ArgumentParser(prog=f"python -m mindspeed_rl_plugin {name}")
    parser.add_argument("--load", type=Path, required=True, help=load)
    parser.add_argument("--out", type=Path, required=True, help=f"{out}; must be empty or new")
    dtype = "dtype of the written weights (default: as stored); a router bias stays float32"
    parser.add_argument("--dtype", choices=FLAG_DTYPES, help=dtype)
    return parser


def size(nbytes: int) -> str:
    """Bytes as a text: in GB (1e9), below 1 GB in MB (1e6)."""
    return f"{nbytes / 1e9:.3f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.3f} MB"


def run(parser: argparse.ArgumentParser, argv: list[str], work: Callable[[argparse.Namespace], str]) -> int:
    """Call `work` and print the text that it returns. Returns 0, or 1 after an error message."""
    options = parser.parse_args(argv)
    load, out, made = options.load, options.out, not options.out.exists()
    try:
        if not load.is_dir():
            raise ValueError(f"--load {load} is no directory")
        if not made and not out.is_dir():
            raise ValueError(f"--out {out} is a file; give a directory that is empty or new")
        if not made and any(out.iterdir()):
            raise ValueError(f"--out {out} is not empty; remove it, or name another directory")
        out.mkdir(parents=True, exist_ok=True)
        print(work(options))
    except (ValueError, OSError) as error:
        shutil.rmtree(out / UNFINISHED, ignore_errors=True)
        if made and out.is_dir() and not any(out.iterdir()):
            out.rmdir()
        print(f"{parser.prog.split()[-1]}: {error}", file=sys.stderr)
        return 1
    return 0
