"""A Hugging Face directory: canonical tensors in one or more safetensors files, read in slices, written in shards; and
ids of special tokens, for what ends a response is no argument of Megatron's."""

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

from mindspeed_rl_plugin.prompts.tokenizer import read_if_there, read_json, vocabulary

INDEX = "model.safetensors.index.json"
FIELDS, GENERATION = ("bos_token_id", "eos_token_id", "pad_token_id"), "generation_config.json"
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


def model_tokens(folder: Path) -> dict[str, Any]:
    """Ids that the files of a model or of a tokenizer name, those that say how to generate first.

    A model may end a response with several tokens, which only generation_config.json and config.json can say.
    """
    out = _tokenizer_tokens(folder)
    for name in ("config.json", GENERATION):
        out |= config_tokens(folder / name)
    return out


def vocabulary_size(folder: Path) -> int:
    """Size of a tokenizer's vocabulary: its highest id and 1, tokens added to it included; 0 without files that say."""
    return 1 + max(vocabulary(folder).values(), default=-1)


def config_tokens(path: Path) -> dict[str, Any]:
    """Ids in a config.json, or that of a folder, or in a generation_config.json."""
    named = read_if_there(path / "config.json" if path.is_dir() else path)
    return {name: named[name] for name in FIELDS if named.get(name) is not None}


def _tokenizer_tokens(folder: Path) -> dict[str, Any]:
    named = read_if_there(folder / "special_tokens_map.json") | read_if_there(folder / "tokenizer_config.json")
    words = {field: named.get(field.removesuffix("_id")) for field in FIELDS}
    words = {field: word["content"] if isinstance(word, dict) else word for field, word in words.items() if word}
    known = vocabulary(folder) if words else {}
    return {field: known[word] for field, word in words.items() if word in known}
