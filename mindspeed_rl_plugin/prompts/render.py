"""One data row as a `Prompt`: tokens for the engine, text and ground truth for the graders."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from mindspeed_rl_plugin.episodes.rendering import dated
from mindspeed_rl_plugin.prompts.sources import Source
from mindspeed_rl_plugin.rows import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Renderer:
    """Turns rows into prompts. Raises ValueError for a chat template that the tokenizer does not have.

    Keys may name a field inside an object, `reward_model.ground_truth`, which stays in the record too. A prompt is a
    string or a list of chat messages `{"role", "content", ...}`. With `chat_template` a string becomes
    one user message; a list without it is an error, since any plain join would be a format no model was taught.
    answer_key "" is data without ground truth; tools: of episodes, see `render_chat`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_key: str,
        answer_key: str,
        chat_template: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        if chat_template and not tokenizer.chat_template:
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path!r} has no chat template; "
                "remove --rl-apply-chat-template or give a tokenizer with one"
            )
        self._tokenizer, self._prompt_key, self._answer_key = tokenizer, prompt_key, answer_key
        self._chat_template, self._tools = chat_template, tools

    def read(self, source: Source, index: int, row: int) -> Prompt:
        """The prompt of row `index` of `source`; `row` numbers it over all sources."""
        fields, where = source.row(index), source.where(index)
        flags = {self._prompt_key: "--rl-prompt-key", self._answer_key: "--rl-answer-key ('' for data without answers)"}
        if absent := {key: flag for key, flag in flags.items() if key and find(fields, key, ...) is ...}:
            keys, set_them = " and no ".join(map(repr, absent)), " and ".join(absent.values())
            raise ValueError(f"{where} has no field {keys}; it has {names(fields)}; set {set_them}")
        value = find(fields, self._prompt_key)
        answer = _answer(find(fields, self._answer_key)) if self._answer_key else ""
        messages = None if isinstance(value, str) else _messages(value, self._prompt_key, where)
        # What a grader sees: the string of the data, or one `role: content` paragraph a message.
        text = "\n\n".join(f"{m['role']}: {m['content']}" for m in messages) if messages else value
        tokens = self._tokens(text, messages, where)
        if not tokens:
            raise ValueError(f"{where}: field {self._prompt_key!r} gives no tokens")
        record = _as_json({k: v for k, v in fields.items() if k not in (self._prompt_key, self._answer_key)})
        messages = _as_json(messages)
        try:
            json.dumps([text, answer, record, messages], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where} holds half of a surrogate pair, which is no text: {error}") from error
        return Prompt(tuple(tokens), text, answer, row, record, messages)

    def _tokens(self, text: str, messages: list[dict[str, Any]] | None, where: str) -> Sequence[int]:
        if not self._chat_template:
            if messages:
                raise ValueError(
                    f"{where}: field {self._prompt_key!r} holds chat messages; add --rl-apply-chat-template"
                )
            return self._tokenizer.encode(text)
        messages = messages or [{"role": "user", "content": text}]
        try:
            rendered = render_chat(self._tokenizer, messages, self._tools)
        except TemplateError as error:
            raise ValueError(f"{where}: the chat template refuses field {self._prompt_key!r}: {error}") from error
        return self._tokenizer.encode(rendered, add_special_tokens=False)  # the template writes its own


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Text of a conversation by the tokenizer's chat template, up to where the model's turn begins.

    tools: JSON schemas of the tools of episodes, () for episodes without any; None where responses are no episodes.
    In episodes the date that some templates write (Llama 3.2) is that of `DATE`: their prompts are the same every day.
    """
    more: dict[str, Any] = {}
    if tools is not None:
        of_tools = list(tools) or None
        more = {"tools": of_tools, "chat_template": dated(tokenizer.get_chat_template(tools=of_tools))}
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **more)


def find(fields: Mapping[str, Any], key: str, absent: Any = None) -> Any:
    """The field `key`, or with dots the one inside: `reward_model.ground_truth`; `absent` where there is none."""
    if key in fields or "." not in key:
        return fields.get(key, absent)
    head, _, rest = key.partition(".")
    return find(fields[head], rest, absent) if isinstance(fields.get(head), dict) else absent


def names(fields: Mapping[str, Any]) -> str:
    """The fields of a row as text, those inside objects by their dotted names."""
    inside = ((f"{k}.{name}" for name in v) if isinstance(v, dict) else (k,) for k, v in fields.items())
    return ", ".join(map(repr, itertools.chain.from_iterable(inside)))


def _answer(value: Any) -> str:
    """Ground truth as text: strings as they are, None as "", JSON values as JSON (42, true, [1, 2]), else `str`."""
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (bool, int, float, list, dict)) else str(value)


def _as_json(value: Any) -> Any:
    """As it would come back from JSON; what JSON has no form for becomes text."""
    return json.loads(json.dumps(value, default=str))


def _messages(value: Any, key: str, where: str) -> list[dict[str, Any]]:
    ok = isinstance(value, list) and value and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value)
    if not ok:
        raise ValueError(
            f"{where}: field {key!r} is neither a string nor a list of messages with 'role' and 'content', "
            f"but {str(value)[:80]!r}"
        )
    # Parquet fills fields that only some messages have with None; templates take a present field for a meant one.
    return [{k: v for k, v in m.items() if v is not None or k == "content"} for m in value]
