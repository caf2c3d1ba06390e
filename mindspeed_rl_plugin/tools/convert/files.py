"""A Hugging Face directory: canonical tensors in one or more safetensors files, read in slices, written in shards."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mindspeed_rl_plugin.prompts.tokenizer import read_json

INDEX = "model.safetensors.index.json"
# What a tokenizer may consist of.
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json", "chat_template*")


def open_tensors(directory: Path) -> dict[str, Any]:
    """Name -> safetensors' slice of every tensor of a directory: it has `get_shape()`, and reads what it is indexed by.

    Raises ValueError when there are no safetensors, one is damaged, or one is missing that the index names.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} holds no *.safetensors; pickled weights are not read")
    if (index := directory / INDEX).is_file():
        _check_index(index, {file.name for file in files})
    tensors: dict[str, Any] = {}
    for file in files:
        try:
            handle = safe_open(file, "pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is no safetensors file, or is cut short ({error}); copy it again") from None
        tensors |= {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
    return tensors


def _check_index(index: Path, files: set[str]) -> None:
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict):
        raise ValueError(f"{index} is no index of safetensors: it has no weight_map; copy it again")
    if missing := sorted(set(named.values()) - files):
        raise ValueError(f"{index.parent / missing[0]} is missing, but {INDEX} names it; copy it too")


def write_shards(
    directory: Path, sizes: Mapping[str, int], make: Callable[[str], Tensor], limit: int
) -> tuple[int, int]:
    """Write tensors into files of at most `limit` bytes, or one larger tensor. Returns (files, bytes).

    sizes: bytes by name; make: the tensor of a name, called once each, so that one shard is in memory at a time.
    """
    split = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    mode = _usual_mode()
    for file, names in split.filename_to_tensors.items():
        save_file({name: make(name) for name in names}, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(mode)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / INDEX).write_text(json.dumps(index, indent=1))
    return len(split.filename_to_tensors), split.metadata["total_size"]


def _usual_mode() -> int:
    """Permissions of a new file; safetensors gives its own to the owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def tokenizer_files(source: Path) -> list[Path]:
    """The files of a tokenizer in a directory. Raises ValueError when there is none."""
    files = sorted({file for pattern in _TOKENIZER for file in source.glob(pattern) if file.is_file()})
    if not files:
        raise ValueError(f"--tokenizer {source}: no files of a tokenizer there")
    return files
