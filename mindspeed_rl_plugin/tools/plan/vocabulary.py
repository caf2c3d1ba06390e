"""The vocabulary that a launch script leaves to its tokenizer, from the files of the tokenizer alone."""

from __future__ import annotations

import json
from pathlib import Path

from mindspeed_rl_plugin.tools.rehearse.command_line import Flags

# In the order in which a run looks for the prompts' tokenizer.
_FLAGS = ("--rl-tokenizer", "--rl-hf-model", "--tokenizer-model", "--tokenizer-name-or-path")


def vocabulary(flags: Flags, folder: Path) -> int | None:
    """Entries of the vocabulary, None where none of the files is here. folder: where relative paths begin.

    That of --rl-hf-model's config.json, as in a run, else of the first tokenizer.json, tokens added to it included:
    `len(tokenizer)` of transformers. Raises ValueError for a file that holds no vocabulary.
    """
    model = flags.get("--rl-hf-model")
    config = folder / model / "config.json" if model else None
    if config and config.is_file():
        size = json.loads(config.read_text()).get("vocab_size")
        if not size:
            raise ValueError(f"--rl-hf-model {config}: no vocab_size there")
        return size
    given = [folder / path for path in map(flags.get, _FLAGS) if path]
    files = [path if path.name == "tokenizer.json" else path / "tokenizer.json" for path in given]
    return next((_entries(file) for file in files if file.is_file()), None)


def _entries(file: Path) -> int:
    """Tokens of a tokenizer.json, those added later included. Unigram models list pairs, the others have a mapping."""
    content = json.loads(file.read_text())
    known = (content.get("model") or {}).get("vocab")
    if not known:
        raise ValueError(f"{file} holds no vocabulary; give its size with --vocab")
    words = set(known) if isinstance(known, dict) else {word for word, _ in known}
    return len(words | {token["content"] for token in content.get("added_tokens") or ()})
