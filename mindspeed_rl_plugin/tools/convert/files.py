"""A Hugging Face directory: tensors (safetensors files, read in slices and written in shards) and other files."""

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

from mindspeed_rl_plugin.prompts.ends import GENERATION
from mindspeed_rl_plugin.prompts.tokenizer import load_tokenizer, own_code, read_json
from mindspeed_rl_plugin.tools.convert.cli import size

HF_INDEX, HF_CONFIG = "model.safetensors.index.json", "config.json"
# A tokenizer has at least one of these files. It may need any other file too, except those of `_OF_MODEL`.
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json", "chat_template*")
TEMPLATES = "additional_chat_templates"  # a folder of a tokenizer
_KNOWN_FILES = (*_TOKENIZER, "*.model", "*.tiktoken", "*.jinja", "*.py", TEMPLATES, HF_CONFIG, GENERATION)
_OF_MODEL = (
    *("*.safetensors*", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ckpt", "*.distcp"),
    *("*.index.json", HF_CONFIG, GENERATION, "*.md", ".*", "optimizer*", "trainer_state.json", "events.out.*", "*.log"),
    *("*.npy", "*.npz", "*.parquet", "*.arrow", "*.jsonl", "*.csv", "*.tar*", "*.tgz", "*.zip", "*.7z", "core.[0-9]*"),
)


def open_tensors(directory: Path) -> dict[str, Any]:
    """Name -> `PySafeSlice` of every tensor in a directory; it has `get_shape()`, and indexing reads values. Raises
    ValueError if there are no safetensors files, if one is damaged, or if a file that the index names is missing."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} holds no *.safetensors; weights in pickle files are not read")
    if (index := directory / HF_INDEX).is_file():
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
        raise ValueError(f"{index.parent / missing[0]} is missing, but {HF_INDEX} names it; copy it too")


def write_shards(
    directory: Path, sizes: Mapping[str, int], make: Callable[[str], Tensor], limit: int
) -> tuple[int, int]:
    """Write tensors into files of at most `limit` bytes; a larger tensor has a file to itself. Returns (files, bytes).
    sizes: name -> bytes; make: name -> tensor, called shard by shard, so that only one shard is in memory."""
    split = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    for file, names in split.filename_to_tensors.items():
        write_file(directory / file, {name: make(name) for name in names})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / HF_INDEX).write_text(json.dumps(index, indent=1))
    return len(split.filename_to_tensors), split.metadata["total_size"]


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(_usual_mode())


def _usual_mode() -> int:
    """Usual permissions of a new file; safetensors writes files that only their owner can read."""
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def tokenizer_files(source: Path) -> list[Path]:
    """Files in a directory that its tokenizer may need. Raises ValueError if there is no tokenizer."""
    if not any(file.is_file() for pattern in _TOKENIZER for file in source.glob(pattern)):
        raise ValueError(f"--tokenizer {source} has no files of a tokenizer")
    kept = (file for file in source.iterdir() if not any(map(file.match, _OF_MODEL)))
    return sorted(file for file in kept if file.is_file() or file.name == TEMPLATES)


def check_loads(folder: Path, tokenizer: bool, trust_remote_code: bool) -> list[str]:
    """Load the written config.json and tokenizer. Returns notes: files of unknown use, and what was not loaded.
    Raises ValueError, with the reason, if one of the two cannot be loaded."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    notes, kind = [], read_json(folder / HF_CONFIG)["model_type"]
    if unusual := sorted(file for file in folder.iterdir() if not any(map(file.match, _KNOWN_FILES))):
        total = size(sum(file.stat().st_size for file in unusual))
        notes.append(f"note: also copied ({total}): {', '.join(file.name for file in unusual)}")
    if kind in CONFIG_MAPPING or (trust_remote_code and own_code(folder, "AutoConfig")):
        try:
            AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        except Exception as error:  # noqa: BLE001 - a model's code may raise anything
            raise ValueError(f"{folder / HF_CONFIG} cannot be loaded: {error}") from error
    else:
        notes.append(f"note: {HF_CONFIG} was not loaded, and so not checked: transformers has no model_type {kind!r}")
    if tokenizer and (code := own_code(folder)) and not trust_remote_code:
        notes.append(f"note: the tokenizer was copied but not loaded, and so not checked: {code}")
    elif tokenizer:
        load_tokenizer(str(folder), trust_remote_code)
    return notes
