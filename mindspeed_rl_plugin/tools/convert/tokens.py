"""Ids of special tokens: what ends a response is no argument of Megatron's, so it is read from a model's own files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.tools.layout_args import read_json

FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
GENERATION = "generation_config.json"


def of_model(folder: Path) -> dict[str, Any]:
    """Ids that the files of a model or of a tokenizer name, those that say how to generate first.

    A model may end a response with several tokens, which only generation_config.json and config.json can say.
    """
    out = _of_tokenizer(folder)
    for name in ("config.json", GENERATION):
        out |= of_file(folder / name)
    return out


def entries(folder: Path) -> int:
    """Size of a tokenizer's vocabulary: its highest id and 1, tokens added to it included; 0 without files that say."""
    return 1 + max(_vocabulary(folder).values(), default=-1)


def of_file(path: Path) -> dict[str, Any]:
    """Ids in a config.json, or that of a folder, or in a generation_config.json."""
    named = _read(path / "config.json" if path.is_dir() else path)
    return {name: named[name] for name in FIELDS if named.get(name) is not None}


def write_generation(ids: Mapping[str, Any], folders: Sequence[Path], out: Path) -> None:
    """The first folder's generation_config.json, else one with the ids, where there are any."""
    given = next((folder / GENERATION for folder in folders if (folder / GENERATION).is_file()), None)
    if given:
        shutil.copyfile(given, out / GENERATION)
    elif ids:
        (out / GENERATION).write_text(json.dumps(dict(ids), indent=1))


def _of_tokenizer(folder: Path) -> dict[str, Any]:
    named = _read(folder / "special_tokens_map.json") | _read(folder / "tokenizer_config.json")
    words = {field: named.get(field.removesuffix("_id")) for field in FIELDS}
    words = {field: word["content"] if isinstance(word, dict) else word for field, word in words.items() if word}
    known = _vocabulary(folder) if words else {}
    return {field: known[word] for field, word in words.items() if word in known}


def _vocabulary(folder: Path) -> dict[str, int]:
    whole = _read(folder / "tokenizer.json")
    listed = (whole.get("model") or {}).get("vocab") or _read(folder / "vocab.json")
    known = dict(listed) if isinstance(listed, dict) else {word: i for i, (word, _) in enumerate(listed)}
    known |= {token["content"]: token["id"] for token in whole.get("added_tokens") or () if "id" in token}
    known |= _read(folder / "added_tokens.json")
    added = _read(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    return known | {token["content"]: int(number) for number, token in added.items()}


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
