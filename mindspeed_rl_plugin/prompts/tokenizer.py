"""The Hugging Face tokenizer of the prompts: which it is, its loading from local files only, its vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face directory. Never asks the network. Raises ValueError when it holds none."""
    from transformers import AutoTokenizer

    place = Path(path)
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


def chosen_tokenizer(args: Any) -> tuple[str, str] | None:
    """Flag and path of the prompts' tokenizer: --rl-tokenizer, else --rl-hf-model, else --tokenizer-model; None where
    none is given. MindSpeed-LLM names the directory of a Hugging Face tokenizer with --tokenizer-name-or-path."""
    names = ("rl_tokenizer", "rl_hf_model", "tokenizer_model", "tokenizer_name_or_path")
    return next((("--" + n.replace("_", "-"), path) for n in names if (path := getattr(args, n, None))), None)


def tokenizer_path(args: Any) -> str | None:
    """Path of `chosen_tokenizer`."""
    chosen = chosen_tokenizer(args)
    return chosen and chosen[1]


def check_vocabulary(args: Any, tokenizer_size: int) -> None:
    """Check the model's vocabulary against the number of tokens of the prompts' tokenizer.

    Called once both are known: Megatron sets `padded_vocab_size` when it is initialised. Raises ValueError.
    """
    padded = getattr(args, "padded_vocab_size", None)
    if padded is not None and tokenizer_size > padded:
        raise ValueError(
            f"the tokenizer has {tokenizer_size} tokens, the model's padded vocabulary only {padded}: it is not the "
            "tokenizer that this model was trained with; fix --rl-tokenizer"
        )
    given = getattr(args, "vocab_size", None)
    if given is not None and tokenizer_size > given:
        raise ValueError(
            f"the tokenizer has {tokenizer_size} tokens, --vocab-size says {given}: ids above it would be generated "
            "but are padding to the model; fix --rl-tokenizer or --vocab-size"
        )


def vocabulary(path: str) -> dict[str, int] | None:
    """Token -> id as the tokenizer.json at, or in, `path` says; None where there is none, or it has no such table."""
    file = Path(path) if Path(path).is_file() else Path(path, "tokenizer.json")
    if not file.is_file() or file.suffix != ".json":
        return None
    content = json.loads(file.read_bytes())
    vocab = content.get("model", {}).get("vocab")
    added = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    return {**vocab, **added} if isinstance(vocab, dict) else None


def same_vocabulary(one: str, other: str) -> bool:
    """Whether two tokenizers map the same tokens to the same ids; True where their files do not say."""
    tables = [vocabulary(path) for path in (one, other)]
    return None in tables or tables[0] == tables[1]
