"""One data row as a `Prompt`: tokens for the engine, text and ground truth for the graders."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from mindspeed_rl_plugin.control_tokens import ControlTokens, dated
from mindspeed_rl_plugin.environment import say
from mindspeed_rl_plugin.prompts.sources import Source
from mindspeed_rl_plugin.rows import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_ERRORS = (TemplateError, TypeError, LookupError)  # errors of chat templates
QUESTION = {"role": "user", "content": "question"}
HALF = re.compile("[\ud800-\udfff]")  # half of a surrogate pair


class Renderer:
    """Makes prompts of rows: for training, evaluation, offers, and (`PairRenderer`) pairs.

    prompt_key, answer_key: names of fields, with dots for fields inside objects (`reward_model.ground_truth`). A
    field inside an object stays in the record, too. Every row must have both; null counts as missing. answer_key "":
    the data has no ground truth. tools: as in `render_chat`.

    A prompt is a string, or chat messages `{"role", "content", ...}`. Without `chat_template` a string is encoded by
    `text_tokens`, and messages are refused, because no model knows their plain concatenation. With `chat_template` a
    string is one user message, and transformers' `apply_chat_template` makes the tokens; the template writes all
    special tokens. Content is a string, or a list of text parts, which are joined. In an assistant's message it may be
    null if there are fields other than `role` and `name`, and missing if there are `tool_calls`. Other null fields
    count as missing. In Parquet files and saved datasets, which add fields of other rows as null, this also holds
    inside objects. The last message may have any role except the assistant's.

    Each kind of repair is logged once, with its first row. Raises ValueError, with file, line, value and what to do,
    for any other row and for half of a surrogate pair; also if the tokenizer lacks the chat template.
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
        self._said: set[str] = set()

    def read(self, source: Source, index: int, row: int) -> Prompt:
        """The prompt of row `index` of `source`; `row`: its number over all sources."""
        fields, where = source.row(index), source.where(index)
        check_keys(fields, where, self._prompt_key, self._answer_key)
        if half := HALF.search(json.dumps(fields, ensure_ascii=False, default=str)):
            found = half.string[: half.end()][-40:]
            raise ValueError(f"{where} holds half of a surrogate pair, the end of {found!r}; correct or remove the row")
        value = find(fields, self._prompt_key)
        answer = _answer(find(fields, self._answer_key), where) if self._answer_key else ""
        messages = None if isinstance(value, str) else self._messages(value, self._prompt_key, source, where)
        if messages and messages[-1]["role"] == "assistant":
            raise ValueError(
                f"{where}: the last message of field {self._prompt_key!r} is the assistant's, "
                f"{messages[-1]['content']!r:.60}, so a response would be one more turn; remove it, or give a string "
                "rendered with transformers' continue_final_message, which the model continues"
            )
        # Text for graders: the string of the data, or a paragraph `role: content` for each message.
        text = "\n\n".join(f"{m['role']}: {m['content'] or ''}" for m in messages) if messages else value
        if not (tokens := self._tokens(text, messages, where)):
            raise ValueError(f"{where}: field {self._prompt_key!r} gives no tokens")
        record = _as_json({k: v for k, v in fields.items() if k not in (self._prompt_key, self._answer_key)})
        return Prompt(tuple(tokens), text, answer, row, record, _as_json(messages))

    def _tokens(self, text: str, messages: list[dict[str, Any]] | None, where: str) -> Sequence[int]:
        if not self._chat_template:
            if messages:
                raise ValueError(
                    f"{where}: field {self._prompt_key!r} holds chat messages; add --rl-apply-chat-template"
                )
            if self._tokenizer.chat_template and not is_rendered(self._tokenizer, text):
                self._note(where, "prompts are given without the tokenizer's chat template (--rl-apply-chat-template)")
            return text_tokens(self._tokenizer, text, functools.partial(self._note, where))
        if not messages and is_rendered(self._tokenizer, text):
            self._note(where, "a prompt for the chat template holds special tokens; is it rendered already?")
        messages = messages or [{"role": "user", "content": text}]
        rendered = self._rendered(messages, where)
        written, asked = bare(rendered), [m["content"] for m in messages if m["role"] != "assistant"]
        if lost := next((content for content in asked if bare(content) not in written), None):
            self._note(where, "the chat template does not write all of a message, {!r:.60}", lost)
        return self._tokenizer.encode(rendered, add_special_tokens=False)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], where: str, ask: bool = True) -> str:
        try:
            return render_chat(self._tokenizer, messages, self._tools, ask)
        except TEMPLATE_ERRORS as error:
            raise ValueError(f"{where}: the chat template refuses these messages: {error}") from error

    def _messages(self, value: Any, key: str, source: Source, where: str) -> list[dict[str, Any]]:
        """Chat messages in the form that `Renderer` describes."""
        where = f"{where}: field {key!r}"
        if (
            not value
            or not isinstance(value, list)
            or not all(_has(m, "role") and ("content" in m or m.get("tool_calls")) for m in value)
        ):
            raise ValueError(
                f"{where} is neither a string nor a list of messages with 'role' and 'content', but {str(value)[:80]!r}"
            )
        messages = []
        for message in value:
            content, fields = message.get("content"), {k: v for k, v in message.items() if v is not None}
            listed = isinstance(content, list) and content
            if listed and all(_has(part, "text") and part.get("type") == "text" for part in listed):
                self._note(where, "the parts of a message's content are joined")
                content = "".join(part["text"] for part in content)
            silent = message["role"] == "assistant" and not fields.keys() <= {"role", "name"}
            if not isinstance(content, str) and (content is not None or not silent):
                raise ValueError(
                    f"{where} has a message of role {message['role']!r} with the content {str(content)[:80]!r}; give a "
                    "string, or parts {'type': 'text', 'text': ...}: only text can be trained"
                )
            messages.append({**(_filled(fields) if source.fills else fields), "content": content})
        return messages

    def _note(self, where: str, repair: str, *of: object) -> None:
        """Log a repair of a row, once per kind. repair: its kind, a format string for the values `of`."""
        if repair not in self._said:
            self._said.add(repair)
            say(f"note: {repair.format(*of)} ({where}, and rows like it)")


def check_keys(fields: Mapping[str, Any], where: str, prompt_key: str, answer_key: str) -> None:
    """Raises ValueError for a row without prompt or answer, see `Renderer`."""
    flags = {prompt_key: "--rl-prompt-key", answer_key: "--rl-answer-key ('' for data without answers)"}
    if absent := {key: flag for key, flag in flags.items() if key and find(fields, key) is None}:
        keys, set_them = " and no ".join(map(repr, absent)), " and ".join(absent.values())
        null = '("" is an answer, null is none) ' if answer_key in absent else ""
        raise ValueError(
            f"{where} has no field {keys}; it has {names(fields)}; set {set_them}, or correct the row {null}"
            "or remove it"
        )


def text_tokens(tokenizer: PreTrainedTokenizerBase, text: str, note: Callable[..., object] = str.format) -> list[int]:
    """Tokens of a text that a response continues. Special tokens that the tokenizer puts before a text occur only once,
    even if the text begins with them; those that it puts after a text are left out. note: called in both cases."""
    whole = tokenizer.encode(text)
    if not whole or not tokenizer.num_special_tokens_to_add():
        return whole
    plain, begin = tokenizer.encode(text, add_special_tokens=False), tokenizer.bos_token_id
    starts = (i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain)
    at = next((i for i in starts if plain or begin not in whole[i:]), None)  # an empty text is put after BOS
    if at is None:
        return whole
    if tail := whole[at + len(plain) :]:
        note("the tokenizer puts {!r} after a text, which is left out of prompts", tokenizer.decode(tail))
    if at and plain[:at] == whole[:at]:
        begun = "a prompt begins with {!r} itself; the tokenizer does not put it there again"
        note(begun, tokenizer.decode(plain[:at]))
        return plain
    return whole[: at + len(plain)]


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    ask: bool = True,
) -> str:
    """Text of a conversation by the tokenizer's chat template, up to the begin of the model's turn; without `ask` up to
    the end of the last message.

    tools: JSON schemas of functions for the model; (): an environment without tools answers the model; None: nothing
    answers the model. If not None, templates that write today's date (Llama 3.2) get a fixed date, so that prompts are
    the same every day.
    """
    more: dict[str, Any] = {}
    if tools is not None:
        of_tools = list(tools) or None
        more = {"tools": of_tools, "chat_template": dated(tokenizer.get_chat_template(tools=of_tools))}
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask, **more)


def find(fields: Mapping[str, Any], key: str) -> Any:
    """The field `key`; dots name a field inside an object (`reward_model.ground_truth`). None if it is missing."""
    if key in fields or "." not in key:
        return fields.get(key)
    head, _, rest = key.partition(".")
    return find(fields[head], rest) if isinstance(fields.get(head), dict) else None


def names(fields: Mapping[str, Any]) -> str:
    """The names of a row's fields as text: with dots for fields inside objects, and a note for null fields."""
    inside = ([(f"{k}.{n}", v[n]) for n in v] if isinstance(v, dict) else [(k, v)] for k, v in fields.items())
    return ", ".join(f"{k!r} (null)" if v is None else repr(k) for k, v in itertools.chain.from_iterable(inside))


def _answer(value: Any, where: str) -> str:
    """Ground truth as text: a string as it is, other JSON values as JSON (42, true, [1, 2]), else `str`. Raises
    ValueError for NaN and infinities."""
    try:
        json_value = isinstance(value, (bool, int, float, list, dict))
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if json_value else str(value)
    except ValueError as error:
        raise ValueError(f"{where}: the answer is {value!r:.80}, which is no valid JSON; correct the data") from error


def _as_json(value: Any) -> Any:
    """The value as it would come back from JSON; a value that JSON cannot represent becomes a text."""
    return json.loads(json.dumps(value, default=str))


def _has(value: Any, key: str) -> bool:
    """Whether the value is an object with a string in the field `key`."""
    return isinstance(value, dict) and isinstance(value.get(key), str)


def _filled(value: Any) -> Any:
    """The value without null fields, at any depth."""
    if isinstance(value, dict):
        return {k: _filled(v) for k, v in value.items() if v is not None}
    return [_filled(one) for one in value] if isinstance(value, list) else value


def is_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether the text has the control token (not BOS) that the chat template writes last before a user's text."""
    return any(mark in text for mark in _marks(tokenizer))


@functools.lru_cache(maxsize=8)
def _marks(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    try:
        before = render_chat(tokenizer, [QUESTION], ask=False).partition(QUESTION["content"])[0]
    except (*TEMPLATE_ERRORS, ValueError):  # no template, or several named ones
        return frozenset()
    return frozenset(ControlTokens(tokenizer, before).pattern.findall(before)[-1:]) - {tokenizer.bos_token}


def bare(text: str | None) -> str:
    """The text without white space, which templates may change."""
    return "".join((text or "").split())
