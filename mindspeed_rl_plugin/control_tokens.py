"""What the job (`chat`) and verifiers' interpreter (`verifiers_renderer`) both need to render messages: the day that
templates write, and how the text of control tokens stays text. Imports the standard library only.

A *control token* is a special token, or another added one that the template writes (DeepSeek's `<｜User｜>` and Qwen's
`<tool_call>` are not marked special).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any

DATE = datetime.date(2024, 7, 26)  # what Llama 3.1's own template writes
TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")  # in a chat template, with the form of the date
MARK = "\ud800"  # half of a surrogate pair, on both sides of a control token's text: in no text can it stand itself


class ControlTokens:
    """The control tokens of a tokenizer under a chat template ("" without one).

    pattern: finds their text; ids: of them.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        found = {t.content: i for i, t in added if t.special or (t.content.strip() and t.content in template)}
        longest_first = sorted(found, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.ids = frozenset(found.values())

    def marked(self, text: str, start: int = 0) -> str:
        """With marks around the text of control tokens, but for those that end before `start`. A template leaves the
        marks where they are."""

        def mark(found: re.Match[str]) -> str:
            return f"{MARK}{found[0]}{MARK}" if found.end() > start else found[0]

        return self.pattern.sub(mark, whole(text))

    def encode(self, marked: str) -> list[int]:
        """Token ids of a text in which what stands between two marks is spelled."""
        first, *rest = marked.split(MARK)
        tokens = self._plain(first)
        for control, plain in zip(rest[::2], rest[1::2], strict=True):
            tokens += self._spelled(control) + self._plain(plain)
        return tokens

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _spelled(self, control: str) -> list[int]:
        tokens = self._tokenizer.encode(control, add_special_tokens=False, split_special_tokens=True)
        if self.ids.isdisjoint(tokens):
            return tokens
        return self._plain(control[:1]) + self._plain(control[1:])  # of an added token that is not marked special


def whole(text: str) -> str:
    """Without halves of surrogate pairs."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def dated(template: Any) -> Any:
    """A chat template, or several by name, in which `DATE` stands for the day of today, where the template itself says
    how to write it. transformers 5.24 lets nobody give a template another clock: what is no plain data becomes text."""
    if isinstance(template, Mapping):
        return {name: dated(one) for name, one in template.items()}
    return template and TODAY.sub(lambda found: repr(DATE.strftime(found[2])), template)
