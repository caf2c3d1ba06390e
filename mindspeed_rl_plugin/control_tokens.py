"""For rendering messages: a fixed date for templates, and the encoding of control tokens in messages as ordinary text.

A *control token* is a special token, or another added token that the template writes (DeepSeek's `<｜User｜>` and
Qwen's `<tool_call>` are not marked as special).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any

DATE = datetime.date(2024, 7, 26)  # the date in Llama 3.1's own template
TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")  # today's date in a chat template, with its format
MARK = "\ud800"  # half of a surrogate pair, before and after the text of a control token; valid text never has it


class ControlTokens:
    """The control tokens of a tokenizer under a chat template ("" without one).

    pattern: finds the text of a control token; ids: the ids of all control tokens.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        found = {t.content: i for i, t in added if t.special or (t.content.strip() and t.content in template)}
        longest_first = sorted(found, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.ids = frozenset(found.values())

    def marked(self, text: str, start: int = 0) -> str:
        """The text with marks around the text of control tokens, except those that end before `start`. Templates keep
        the marks."""

        def mark(found: re.Match[str]) -> str:
            return f"{MARK}{found[0]}{MARK}" if found.end() > start else found[0]

        return self.pattern.sub(mark, whole(text))

    def encode(self, marked: str) -> list[int]:
        """Token ids of a marked text; text between two marks is encoded as ordinary tokens."""
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
        # split_special_tokens splits special tokens only, so other control tokens are split after their first character
        return self._plain(control[:1]) + self._plain(control[1:])


def whole(text: str) -> str:
    """The text with a replacement for each half of a surrogate pair that stands alone."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def dated(template: Any) -> Any:
    """A chat template, or several by name, with `DATE` instead of today's date, in the template's own format. Callers
    cannot pass a clock to a template: transformers 5.24 converts every argument that is not plain data to text."""
    if isinstance(template, Mapping):
        return {name: dated(one) for name, one in template.items()}
    return template and TODAY.sub(lambda found: repr(DATE.strftime(found[2])), template)
