"""The Hugging Face tokenizer, from local files only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face directory, or of a bare `tokenizer.json` file. Never asks the network.

    Raises ValueError when nothing is there, or what is there is no tokenizer.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    place = Path(path)
    if not place.exists():
        raise ValueError(
            f"tokenizer {path!r} is not there; give a Hugging Face directory (tokenizer.json, "
            "tokenizer_config.json) or a tokenizer.json file"
        )
    if place.is_file():
        _check_json(place)
        return PreTrainedTokenizerFast(tokenizer_file=str(place))
    if (place / "tokenizer.json").exists():
        _check_json(place / "tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(str(place), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        holds = ", ".join(sorted(p.name for p in place.iterdir())[:8]) or "nothing"
        raise ValueError(f"no tokenizer can be loaded from {path!r}, which holds {holds}: {error}") from error


def _check_json(file: Path) -> None:
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"tokenizer file {str(file)!r} is not JSON: {error}") from error
    if not isinstance(content, dict) or "model" not in content:
        raise ValueError(f"{str(file)!r} is no tokenizer.json: it has no field 'model'")
