"""Parsers of the calls in a turn, for the formats of Hermes and Qwen, Qwen3-Coder, GLM-4.5, Llama 3, and DeepSeek.

A call that cannot be parsed becomes a `MalformedCall`, and the other calls of the turn are still read. Calls in a
`<think>` block are ignored, even if the prompt has begun the block; but `llama3` always reads a call at the start of a
turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_rl_plugin.episodes.chat import TEMPLATE_ERRORS
from mindspeed_rl_plugin.episodes.environments import Attempt, MalformedCall, ToolCall
from mindspeed_rl_plugin.prompts.render import render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Parser = Callable[[str], Sequence[Attempt]]

NO_JSON = MalformedCall("the call is not valid JSON")
NO_CALL = MalformedCall('a call is a JSON object with "name", a string, and its arguments, an object')
NOT_CLOSED = MalformedCall("the call is not closed")
NO_LIST = MalformedCall("a call is a name, and each argument between its tags")


@dataclass(frozen=True)
class Tagged:
    """A parser of calls between two tags."""

    tags: tuple[str, str]  # before and after a call
    # Patterns of the text between the first tag and the JSON of a call, and from the JSON to the end of the second tag.
    # If the first pattern has a group, it is the call's name, and the JSON has the arguments; else the JSON has both.
    forms: tuple[tuple[str, ...], ...]
    needs: tuple[str, ...] = ()  # tokens that the tokenizer must have

    def __call__(self, text: str) -> list[Attempt]:
        attempts: list[Attempt] = []
        marks, at = re.compile(f"</?think>|{re.escape(self.tags[0])}"), 0
        while found := marks.search(text, at):
            at = found.end()
            if found[0] == "</think>":
                attempts.clear()
            elif found[0] == "<think>":
                end = text.find("</think>", at)
                at = len(text) if end < 0 else end + len("</think>")
            else:
                attempt, at = self._read(text, at)
                attempts.append(attempt)
        return attempts

    def _read(self, text: str, at: int) -> tuple[Attempt, int]:
        """The call that begins at `at`, and where it ends."""
        for before, behind in self.forms:
            head = re.compile(before).match(text, at)
            value, end = _json(text, head.end()) if head else (None, 0)
            if head and end and (tail := re.compile(behind).match(text, end)):
                return _call({"name": head[1], "arguments": value} if head.groups() else value), tail.end()
        return self._malformed(text, at, NO_JSON)

    def _malformed(self, text: str, at: int, why: MalformedCall) -> tuple[Attempt, int]:
        begin, end = (text.find(tag, at) for tag in self.tags)
        if end < 0 or 0 <= begin < end:
            return NOT_CLOSED, begin if begin >= 0 else len(text)
        return why, end + len(self.tags[1])


class Listed(Tagged):
    """A parser of calls whose arguments stand between tags, as JSON or as other text. The one form has the patterns of
    the name, of an argument (name and value), and of what is behind the arguments."""

    def _read(self, text: str, at: int) -> tuple[Attempt, int]:
        head, argument, tail = (re.compile(pattern, re.DOTALL) for pattern in self.forms[0])
        found, texts = head.match(text, at), dict[str, str]()
        name, end = (found[1], found.end()) if found else ("", at)
        while name and (found := argument.match(text, end)):
            texts[found[1]], end = found[2], found.end()
        if not name or not (found := tail.match(text, end)):
            return self._malformed(text, at, NO_LIST)
        values = {key: (value, *_json(value, 0)) for key, value in texts.items()}
        arguments = {key: made if end == len(value) > 0 else value for key, (value, made, end) in values.items()}
        return ToolCall(name, arguments, texts), found.end()


HERMES = Tagged(("<tool_call>", "</tool_call>"), ((r"\s*", r"\s*</tool_call>"),))
_CALLED = r"\s*([\w.-]+)\s*"
_WRITTEN_VALUE = r"((?:(?!<tool_call>).)*?)"  # an argument that is not closed does not reach into the next call
QWEN3_CODER = Listed(
    HERMES.tags,
    (
        (
            rf"\s*<function={_CALLED}>\s*",
            rf"<parameter=([^>\n]+)>\n?{_WRITTEN_VALUE}\n?</parameter>\s*(?=<parameter=|</function>)",
            r"</function>\s*</tool_call>",
        ),
    ),
)
GLM45 = Listed(
    HERMES.tags,
    (
        (
            _CALLED,
            rf"<arg_key>([^<]*)</arg_key>\s*<arg_value>{_WRITTEN_VALUE}</arg_value>\s*(?=<arg_key>|</tool_call>)",
            "</tool_call>",
        ),
    ),
)
DEEPSEEK = Tagged(
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    (
        (r"function<｜tool▁sep｜>([^\n<]+)\n```json\s*", r"\s*```\s*<｜tool▁call▁end｜>"),  # V3
        (r"([^\n<]+)<｜tool▁sep｜>\s*", r"\s*<｜tool▁call▁end｜>"),  # V3.1
    ),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
)

_TAG = r"<\|python_tag\|>\s*"
_BARE_JSON = r'(?=\{\s*"(?:name"\s*:|type"\s*:\s*"function"))'  # other JSON is no call
_FIRST, _TAGGED = re.compile(rf"\s*(?:{_TAG}|{_BARE_JSON})"), re.compile(_TAG)
_NEXT, _NEXT_BUT_ONE = re.compile(rf"\s*;?\s*(?:{_TAG})?(?=\{{)"), re.compile(rf";\s*(?:{_TAG})?{_BARE_JSON}")


def llama3(text: str) -> list[Attempt]:
    """Calls of Llama 3: `{"name": ..., "parameters": {...}}`, at the start of a turn or after `<|python_tag|>`. `;` may
    separate several calls."""
    found = _FIRST.match(text)
    if found is None:
        spoken = text.partition("</think>")[2] if re.search("</?think>", text) else text
        found = _FIRST.match(spoken) or _TAGGED.search(spoken)
    attempts: list[Attempt] = []
    while found:
        text, at = found.string, found.end()
        value, end = _json(text, at)
        attempts.append(_call(value) if end else NO_JSON)
        found = _NEXT.match(text, end) if end else _NEXT_BUT_ONE.search(text, at)
    return attempts


_CALL_HEADS = re.compile("<tool_call>|<｜tool▁calls?▁begin｜>|" + re.escape("<|python_tag|>"))


def before_calls(text: str) -> str:
    """The text of a turn up to its calls. Without a head that marks them, they are the turn, apart from a `<think>`
    block."""
    start = text.rfind("</think>") + 1
    found = _CALL_HEADS.search(text, start)
    return text[: found.start()] if found else text[: start + len("/think>") if start else 0]


PARSERS: dict[str, Parser] = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "glm45": GLM45,
    "llama3": llama3,
    "deepseek": DEEPSEEK,
}
KNOWN = ", ".join(PARSERS) + " or path/to/file.py:function"


def make_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> Parser | None:
    """The parser for --rl-tool-parser `name`: one of `PARSERS`, or "auto" for the one that fits the chat template. None
    for path/to/file.py:function, because a user's code runs in another process (`environment_pool`).

    Raises ValueError for an unknown parser, or for a parser that does not fit the tokenizer.
    """
    if name == "auto":
        return make_parser(_fitting(tokenizer), tokenizer)
    if is_own(name):
        return None
    if name not in PARSERS:
        raise ValueError(f"--rl-tool-parser {name!r} is unknown; give auto, {KNOWN}")
    needs = getattr(PARSERS[name], "needs", ())
    if lacking := [token for token in needs if token not in tokenizer.get_vocab()]:
        raise ValueError(
            f"--rl-tool-parser {name}: tokenizer {tokenizer.name_or_path!r} has no token {lacking[0]!r}, which "
            f"marks calls; give the parser of the model's format of calls: {KNOWN}"
        )
    return PARSERS[name]


def is_own(name: str) -> bool:
    """Whether --rl-tool-parser names a user's function."""
    return ":" in name


def _fitting(tokenizer: PreTrainedTokenizerBase) -> str:
    """Name of the parser that reads calls in the form in which the chat template writes them."""
    question = {"role": "user", "content": "question"}
    for arguments in ({"key": 1}, '{"key": 1}') if tokenizer.chat_template else ():  # the string is for DeepSeek
        call = {"type": "function", "function": {"name": "probe", "arguments": arguments}}
        try:
            text = render_chat(tokenizer, [question, {"role": "assistant", "content": "", "tool_calls": [call]}], ())
            text = text.removeprefix(render_chat(tokenizer, [question], ()))
        except TEMPLATE_ERRORS:
            continue
        for name, parser in PARSERS.items():
            if parser(text) == [ToolCall("probe", {"key": 1})]:
                return name
    raise ValueError(
        f"--rl-tool-parser auto: the chat template of tokenizer {tokenizer.name_or_path!r} is missing, or "
        f"writes calls in no known form; give {KNOWN}"
    )


def _json(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at `at`, and its end; (None, 0) if there is none, or if it contains half a
    surrogate pair or a number that is not finite."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None, 0
    return value, end


def _call(value: Any) -> Attempt:
    """A call from its JSON. Without the field of the arguments, the call has no arguments."""
    if not isinstance(value, dict):
        return NO_CALL
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    arguments = {} if arguments is None else arguments
    return ToolCall(name, arguments) if name and isinstance(name, str) and isinstance(arguments, dict) else NO_CALL
