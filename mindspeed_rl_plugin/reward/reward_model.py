"""A reward model as a grader: a Hugging Face checkpoint for sequence classification with one label.

It reads text with its own tokenizer, whatever the policy's is. Checked by its files before any model is built; torch
and transformers are imported in the worker process alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PREFIX = "model:"
KIND = "ForSequenceClassification"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def check_files(path: str) -> None:
    """Raises ValueError where the directory holds no reward model that can be loaded, with what to give instead."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"reward {PREFIX}{path}: there is no config.json in it; give the directory of a Hugging Face checkpoint"
        )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kinds = config.get("architectures") or []
    if not any(kind.endswith(KIND) for kind in kinds):
        raise ValueError(
            f"reward {PREFIX}{path}: it is a {', '.join(kinds) or 'model of no known kind'}, which has no score "
            f"of a text; give a ...{KIND} checkpoint"
        )
    labels = len(config["id2label"]) if config.get("id2label") else config.get("num_labels", 2)
    if labels != 1:
        raise ValueError(f"reward {PREFIX}{path}: it has {labels} labels; a reward is one number, give one of 1 label")
    if not any(folder.glob("tokenizer*.json")) and not any(folder.glob("vocab*")):
        raise ValueError(
            f"reward {PREFIX}{path}: it comes without a tokenizer, and the policy's may not be the one that it was "
            "trained with; save its own beside it (tokenizer.json, tokenizer_config.json)"
        )
    if not any(match for pattern in _WEIGHTS for match in folder.glob(pattern)):
        raise ValueError(f"reward {PREFIX}{path}: it has no weights ({', '.join(_WEIGHTS)})")
    for file in sorted(folder.glob("*.safetensors")):
        _check_whole(file)
    rows = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if rows and (folder / "tokenizer.json").is_file():
        _check_ids(path, _ordinary_ids(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))), rows)


def _check_whole(file: Path) -> None:
    """Raises ValueError for a safetensors file that ends too early, or is none (a Git LFS pointer, say).

    It is the length of its header in 8 bytes, the header, in JSON, and the data that this says the places of.
    """
    size, needed = file.stat().st_size, math.inf
    with open(file, "rb") as data:
        length = int.from_bytes(data.read(8), "little")
        if 8 + length <= size:
            try:
                tensors: dict[str, Any] = json.loads(data.read(length))
                ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
                needed = 8 + length + max(ends, default=0)
            except (ValueError, LookupError, TypeError, AttributeError):
                pass
    if size < needed:
        say = f"ends after {size} of {needed} bytes" if needed < math.inf else f"is none by its head ({size} bytes)"
        raise ValueError(f"reward {PREFIX}{file.parent}: the safetensors file {file.name} {say}; copy it again")


def _ordinary_ids(tokenizer: Mapping[str, Any]) -> set[int]:
    """Ids that a plain text may become, from a tokenizer.json; special tokens are none of them."""
    words = tokenizer.get("model", {}).get("vocab", {})
    ids = set(words.values()) if isinstance(words, dict) else set(range(len(words)))
    added = tokenizer.get("added_tokens") or []
    ids |= {token["id"] for token in added}
    return ids - {token["id"] for token in added if token.get("special")}


def _check_ids(path: str, ids: Iterable[int], rows: int) -> None:
    """Special tokens may lie beyond the embedding, as one that only pads does; what texts are made of may not."""
    largest = max(ids, default=-1)
    if largest >= rows:
        raise ValueError(
            f"reward {PREFIX}{path}: its tokenizer has ids up to {largest}, which is {largest + 1} tokens, its "
            f"embedding {rows} rows; it is not the tokenizer that this model was trained with, so scores would mean "
            "nothing: save the right one beside it"
        )


def same_tokenizer(path: str, policy: str) -> bool:
    """Whether two directories hold the same vocabulary, as far as their files say."""
    files = [Path(folder, "tokenizer.json") for folder in (path, policy)]
    if not all(file.is_file() for file in files):
        return False
    mine, theirs = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    return all(mine.get(part) == theirs.get(part) for part in ("model", "added_tokens", "pre_tokenizer", "normalizer"))


def make_grader(path: str, device: str) -> Callable[..., list[float]]:
    """A batch grader: the score of each response after its prompt, as the checkpoint gives it.

    device: "cpu", or an accelerator's; there the checkpoint's own dtype is kept, on the host it is float32. With a
    chat template in the tokenizer the response is the assistant's turn after the chat messages of the data, or after
    the prompt as a user's turn; without one both are text. A text longer than the model's positions is a ValueError,
    never cut.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if device != "cpu":
        from mindspeed_rl_plugin.device import Device

        Device(device.partition(":")[0]).api.set_device(device)  # on NPU this is also what makes torch know it
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    dtype = torch.float32 if device == "cpu" else "auto"
    model, loaded = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    if loaded["missing_keys"]:
        raise ValueError(f"{path} has no weights for {', '.join(sorted(loaded['missing_keys'])[:5])}")
    model = model.to(device).eval()
    limit = getattr(model.config, "max_position_embeddings", None)
    rows_of_embedding = model.get_input_embeddings().weight.shape[0]
    special = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}
    _check_ids(path, set(tokenizer.get_vocab().values()) - special, rows_of_embedding)

    def encode(prompt: str, response: str, messages: Sequence[Any] | None) -> list[int]:
        if tokenizer.chat_template:
            asked = messages or [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": response}], tokenize=False)
            return tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokenizer(prompt + response)["input_ids"]

    def score(prompts: Sequence[str], responses: Sequence[str], messages: Sequence[Any]) -> list[float]:
        rows = [encode(*sample) for sample in zip(prompts, responses, messages, strict=True)]
        longest = max(map(len, rows))
        if limit is not None and longest > limit:
            raise ValueError(
                f"a prompt and its response have {longest} tokens, the reward model takes {limit}; lower "
                "--rl-max-prompt-length or --rl-max-response-length"
            )
        largest = max(max(row, default=0) for row in rows)
        if largest >= rows_of_embedding:
            raise ValueError(
                f"the text has the token {tokenizer.convert_ids_to_tokens(largest)!r} with the id {largest}, the "
                f"reward model's embedding only {rows_of_embedding} rows: it is not the tokenizer that it was trained "
                "with"
            )
        own = (tokenizer.pad_token_id, getattr(model.config, "pad_token_id", None))
        pad = _padding(rows, own, rows_of_embedding)
        if pad is None:  # no id is left to pad with
            return [value for row in rows for value in forward([row], None)]
        return forward(rows, pad)

    def forward(rows: Sequence[Sequence[int]], pad: int | None) -> list[float]:
        longest = max(map(len, rows))
        model.config.get_text_config().pad_token_id = pad  # None: the last position is scored
        with torch.no_grad():
            scores = model(
                input_ids=torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], device=device),
                attention_mask=torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows], device=device),
            ).logits
        return scores[:, 0].float().tolist()

    return score


def _padding(rows: Sequence[Sequence[int]], own: Iterable[int | None], size: int) -> int | None:
    """Id to pad with, below `size`, the rows of the embedding: the first of `own`, the tokenizer's and the model's,
    that is there and in none of the rows, else another one that is in none of them; None where they use every id.

    It is masked anyway, but decoders score the last token that is no padding, which they find by its id.
    """
    used = {token for row in rows for token in row}
    free = (i for i in (*own, *range(size)) if i is not None and 0 <= i < size and i not in used)
    return next(free, None)
