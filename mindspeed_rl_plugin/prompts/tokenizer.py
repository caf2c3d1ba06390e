"""The Hugging Face tokenizer of the prompts: choosing it, loading it from local files only, its vocabulary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNUSED = 128  # a model may have so many ids more than its tokenizer (usual padding), or a tenth of its ids if more
TOKENIZER_FLAGS = ("--rl-tokenizer", "--rl-hf-model", "--tokenizer-model", "--tokenizer-name-or-path")


def own_code(folder: str | Path, kind: str = "AutoTokenizer") -> str:
    """A message if a directory has its own code for the Auto class `kind` of transformers; else empty."""
    for name in ("tokenizer_config.json", "config.json"):
        named = read_if_there(Path(folder) / name).get("auto_map") or {}
        named = named.get(kind) if isinstance(named, dict) else named  # old format for tokenizers: a list
        if found := [word for word in ([named] if isinstance(named, str) else named or ()) if word]:
            return f"it has code of its own ({found[-1]}), which is not run: read it, then give --rl-trust-remote-code"
    return ""


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face directory. Never uses the network. Raises ValueError if there is none, or if it
    has code of its own that may not run."""
    from transformers import AutoTokenizer

    place = Path(path)
    file = place / "tokenizer.json"
    if file.exists() and "model" not in read_json(file):
        raise ValueError(f"{str(file)!r} is no tokenizer.json: it has no field 'model'")
    if (code := own_code(place)) and not trust_remote_code:
        raise ValueError(f"the tokenizer in {path!r}: {code}")
    try:
        return AutoTokenizer.from_pretrained(str(place), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # noqa: BLE001 - code of its own, and checks of config.json, may raise anything
        holds = ", ".join(sorted(p.name for p in place.iterdir())[:8]) or "nothing"
        raise ValueError(f"no tokenizer can be loaded from {path!r}, which holds {holds}: {error}") from error


def vocabulary_digest(path: str, trust_remote_code: bool = False) -> str:
    """A digest of all tokens with their ids; the rules by which a text is cut are not in it. Raises ValueError as
    `load_tokenizer` does, and if `path` is no directory."""
    if not Path(path).is_dir():
        raise ValueError(f"no tokenizer can be loaded from {path!r}: there is no such directory here")
    vocabulary = json.dumps(sorted(load_tokenizer(path, trust_remote_code).get_vocab().items()))
    return hashlib.blake2b(vocabulary.encode(), digest_size=8).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises ValueError for other contents."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no JSON file that can be read ({error}); copy it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object of fields")
    return content


def read_if_there(path: Path) -> dict[str, Any]:
    """As `read_json`; empty if there is no file."""
    return read_json(path) if path.is_file() else {}


def chosen_tokenizer(args: Any) -> tuple[str, str] | None:
    """Flag and path of the prompts' tokenizer, by the first of TOKENIZER_FLAGS that is given; None if none is.
    MindSpeed-LLM names the directory of a Hugging Face tokenizer with --tokenizer-name-or-path."""
    given = ((flag, getattr(args, flag[2:].replace("-", "_"), None)) for flag in TOKENIZER_FLAGS)
    return next(((flag, path) for flag, path in given if path), None)


def tokenizer_path(args: Any) -> str | None:
    chosen = chosen_tokenizer(args)
    return chosen and chosen[1]


def model_vocabulary(
    args: Any, tokenizer: PreTrainedTokenizerBase, reference: Mapping[str, Any] | None = None, smaller: bool = False
) -> int:
    """Number of rows of the embedding that are tokens: `vocab_size` of `reference` (config.json of --rl-hf-model), else
    the highest id of the prompts' tokenizer + 1 (more than its number of tokens if some ids have none).

    Raises ValueError if the tokenizer has more ids than the model or, unless `smaller`, far fewer ids. Called after
    Megatron is initialised, which sets `padded_vocab_size`.
    """
    ids = 1 + max(tokenizer.get_vocab().values())
    padded, hf_size = getattr(args, "padded_vocab_size", None), reference and reference["vocab_size"]
    named = {"--rl-hf-model": hf_size, "--vocab-size": getattr(args, "vocab_size", None), "the padded model": padded}
    sizes = {name: size for name, size in named.items() if size is not None} or {"": ids}
    name, size = next(((n, size) for n, size in sizes.items() if size < ids), next(iter(sizes.items())))
    padding = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size if size == padded else UNUSED
    if ids > size or (size - ids > max(padding, size // 10) and not smaller):
        meant = ", or give --rl-smaller-tokenizer if this is intended" if ids < size else ""
        why = f"the tokenizer has {ids} ids, {name} {size}, so it is not the tokenizer with which the model was trained"
        raise ValueError(f"{why}; correct --rl-tokenizer{meant}")
    return hf_size or ids


def vocabulary(path: str | Path) -> dict[str, int]:
    """Token -> id by the files of a tokenizer, with added tokens; empty without such files.

    path: the folder of these files, or the tokenizer.json in it.
    """
    folder = _folder(path)
    whole = read_if_there(folder / "tokenizer.json")
    listed = (whole.get("model") or {}).get("vocab") or read_if_there(folder / "vocab.json")
    known = dict(listed) if isinstance(listed, dict) else {word: i for i, (word, _) in enumerate(listed)}
    known |= {token["content"]: token["id"] for token in whole.get("added_tokens") or () if "id" in token}
    known |= read_if_there(folder / "added_tokens.json")
    added = read_if_there(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    return known | {token["content"]: int(number) for number, token in added.items()}


def vocabulary_size(folder: Path) -> int:
    """Size of a tokenizer's vocabulary: its highest id + 1, with added tokens; 0 without such files."""
    return 1 + max(vocabulary(folder).values(), default=-1)


def same_vocabulary(one: str, other: str) -> bool:
    """Whether two tokenizers map the same tokens to the same ids; True if one of them has no tokenizer.json."""
    comparable = all((_folder(path) / "tokenizer.json").is_file() for path in (one, other))
    return not comparable or vocabulary(one) == vocabulary(other)


def _folder(path: str | Path) -> Path:
    return Path(path).parent if Path(path).name == "tokenizer.json" else Path(path)
