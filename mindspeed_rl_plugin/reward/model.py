"""A reward model as a grader: a Hugging Face checkpoint for sequence classification with one label.

It reads text with its own tokenizer, whatever the policy's is. Checked by its files before any model is built; torch
and transformers are imported in the worker process alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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


def same_tokenizer(path: str, policy: str) -> bool:
    """Whether two directories hold the same vocabulary, as far as their files say."""
    found = [Path(folder, "tokenizer.json") for folder in (path, policy)]
    if not all(file.is_file() for file in found):
        return False
    mine, theirs = (json.loads(file.read_text(encoding="utf-8")) for file in found)
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
        pad = _padding(rows, tokenizer)
        model.config.pad_token_id = pad
        with torch.no_grad():
            scores = model(
                input_ids=torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=device),
                attention_mask=torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows], device=device),
            ).logits
        return scores[:, 0].float().tolist()

    return score


def _padding(rows: Sequence[Sequence[int]], tokenizer: Any) -> int:
    """Id to pad with: the tokenizer's own, or where that may end a text too, one that is in none of the rows.

    Decoders score the last token that is no padding, found by its id.
    """
    used = {token for row in rows for token in row}
    own = tokenizer.pad_token_id
    return own if own is not None and own not in used else next(i for i in range(len(used) + 1) if i not in used)
