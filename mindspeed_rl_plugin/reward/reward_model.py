"""A reward model as a grader: a Hugging Face checkpoint for sequence classification with one label.

It reads text with its own tokenizer, not with the policy's. Its files are checked before any model is built; only the
worker process imports torch and transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mindspeed_rl_plugin.reward.items import OWN

MODEL_PREFIX = "model:"
SCORER = "ForSequenceClassification"
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def check_files(path: str) -> None:
    """Raises ValueError, with what to do, if the directory has no reward model that can be loaded."""
    if why := _problem(Path(path)):
        raise ValueError(f"reward {MODEL_PREFIX}{path}: {why}")


def _problem(folder: Path) -> str | None:
    if not (folder / "config.json").is_file():
        return "there is no config.json in it; give the directory of a Hugging Face checkpoint"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kinds = config.get("architectures") or []
    if not any(kind.endswith(SCORER) for kind in kinds):
        known = ", ".join(kinds) or "model of no known kind"
        return f"it is a {known}, which gives no score for a text; give a ...{SCORER} checkpoint"
    labels = len(config["id2label"]) if config.get("id2label") else config.get("num_labels", 2)
    if labels != 1:
        return f"it has {labels} labels; a reward is one number: give a model with 1 label"
    if not any(folder.glob("tokenizer*.json")) and not any(folder.glob("vocab*")):
        return (
            "it has no tokenizer, and the policy's may not be the one with which it was trained; save its own "
            "tokenizer in its directory (tokenizer.json, tokenizer_config.json)"
        )
    if not any(match for pattern in _WEIGHT_FILES for match in folder.glob(pattern)):
        return f"it has no weights ({', '.join(_WEIGHT_FILES)})"
    for file in sorted(folder.glob("*.safetensors")):
        try:
            safe_open(file, "np")
        except SafetensorError as error:  # a truncated file, or a Git LFS pointer
            size = file.stat().st_size
            return f"the safetensors file {file.name} of {size} bytes cannot be read: {error}; copy it again"
    return None


def same_tokenizer(path: str, policy: str) -> bool:
    """Whether two directories have a tokenizer.json that makes the same tokens of a text."""
    files = [Path(folder, "tokenizer.json") for folder in (path, policy)]
    if not all(file.is_file() for file in files):
        return False
    mine, theirs = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    return all(mine.get(part) == theirs.get(part) for part in ("model", "added_tokens", "pre_tokenizer", "normalizer"))


class RewardModel:
    """A batch grader: the checkpoint's score of each response after its prompt; with tools or an environment, the score
    of the complete conversation.

    device: "cpu" (then in float32) or that of an accelerator (then in the checkpoint's dtype). If the tokenizer has a
    chat template, it renders the conversation. With a single turn, this is the data's chat messages (if there are none,
    the prompt as a user's message), and the response as the assistant's message. Without a template, texts are
    concatenated. A text with more tokens than the model has positions raises ValueError; it is never cut.
    """

    def __init__(self, path: str, device: str, trust_remote_code: bool = False) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if device != "cpu":
            from mindspeed_rl_plugin.device import Device

            Device(device.partition(":")[0]).api.set_device(device)  # on NPU this also registers the device with torch
        local = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        self._tokenizer = AutoTokenizer.from_pretrained(path, **local)
        dtype = torch.float32 if device == "cpu" else "auto"
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=dtype, output_loading_info=True, **local
        )
        if loaded["missing_keys"]:
            raise ValueError(f"{path} has no weights for {', '.join(sorted(loaded['missing_keys'])[:5])}")
        self._model, self._device = model.to(device).eval(), device
        self._size = model.get_input_embeddings().weight.shape[0]
        self._check_vocabulary(path)

    def _check_vocabulary(self, path: str) -> None:
        """Check that the embedding has rows for all tokens of texts; special tokens, such as padding, may have none."""
        added = self._tokenizer.added_tokens_decoder.items()
        special = {*self._tokenizer.all_special_ids, *(i for i, token in added if token.special)}
        largest = max({*self._tokenizer.get_vocab().values()} - special, default=-1)
        if largest >= self._size:
            raise ValueError(
                f"reward {MODEL_PREFIX}{path}: its tokenizer has ids up to {largest}, its embedding has {self._size} "
                "rows, so it is not the tokenizer with which this model was trained, and scores would mean nothing: "
                "save the right tokenizer in this directory"
            )

    def __call__(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        messages: Sequence[Any],
        conversations: Sequence[Any] | None = None,
    ) -> list[float]:
        samples = zip(prompts, responses, messages, conversations or [None] * len(prompts), strict=True)
        rows = [self._encode(*sample) for sample in samples]
        self._check_texts(rows)
        own = (self._tokenizer.pad_token_id, getattr(self._model.config, "pad_token_id", None))
        pad = _padding(rows, own, self._size)
        if pad is None:  # every id is in use: no padding
            return [value for row in rows for value in self._forward([row], None)]
        return self._forward(rows, pad)

    def _encode(
        self, prompt: str, response: str, messages: Sequence[Any] | None, conversation: Sequence[Any] | None
    ) -> list[int]:
        if self._tokenizer.chat_template:
            asked = messages or [{"role": "user", "content": prompt}]
            text = self._rendered(conversation or [*asked, {"role": "assistant", "content": response}])
            return self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._tokenizer(_joined(conversation) if conversation else prompt + response)["input_ids"]

    def _rendered(self, conversation: Sequence[Mapping[str, Any]]) -> str:
        from jinja2 import TemplateError

        messages = [{k: v for k, v in message.items() if k not in OWN} for message in conversation]
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False)
        except TemplateError as error:
            roles = " ".join(message["role"] for message in messages)
            raise ValueError(
                f"the reward model's chat template refuses a conversation of the roles {roles}: {error}; give a model "
                "whose template accepts these roles"
            ) from error

    def _check_texts(self, rows: Sequence[Sequence[int]]) -> None:
        longest, limit = max(map(len, rows)), getattr(self._model.config, "max_position_embeddings", None)
        if limit is not None and longest > limit:
            raise ValueError(
                f"a prompt and its response have {longest} tokens, the reward model takes at most {limit}; lower "
                "--rl-max-prompt-length or --rl-max-response-length"
            )
        largest = max(max(row, default=0) for row in rows)
        if largest >= self._size:
            raise ValueError(
                f"the text has the token {self._tokenizer.convert_ids_to_tokens(largest)!r} with the id {largest}, the "
                f"reward model's embedding has only {self._size} rows: it was trained with another tokenizer"
            )

    def _forward(self, rows: Sequence[Sequence[int]], pad: int | None) -> list[float]:
        import torch

        longest, device = max(map(len, rows)), self._device
        self._model.config.get_text_config().pad_token_id = pad  # None: the model scores the last position
        with torch.no_grad():
            scores = self._model(
                input_ids=torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], device=device),
                attention_mask=torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows], device=device),
            ).logits
        return scores[:, 0].float().tolist()


def _joined(conversation: Sequence[Mapping[str, Any]]) -> str:
    """The text of a conversation: the prompt, and all messages from the first turn on."""
    first = next(i for i, message in enumerate(conversation) if "turn" in message)
    asked, said = conversation[:first], conversation[first:]
    head = asked[0]["content"] if first == 1 else "\n\n".join(f"{m['role']}: {m['content']}" for m in asked)
    return head + "".join(message["content"] for message in said)


def _padding(rows: Sequence[Sequence[int]], own: Iterable[int | None], size: int) -> int | None:
    """An id for padding that is in none of the rows; None if they use every id. own: ids to try first (the tokenizer's,
    the model's); size: number of ids, the rows of the embedding.

    Padding is masked. But decoders score the last token that is not padding, and find this token by the id of padding.
    """
    used = {token for row in rows for token in row}
    free = (i for i in (*own, *range(size)) if i is not None and 0 <= i < size and i not in used)
    return next(free, None)
