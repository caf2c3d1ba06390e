"""Encodes the messages of an episode: by the tokenizer's chat template (`ChatFormat`), or as plain text (`RawFormat`).

Sampled tokens are never changed; only the messages after them are rendered and appended. An observation (a text of a
tool or an environment) never gets a *control token* (a special token, or another added token that the template writes):
if it has the text of a control token, this text is encoded as ordinary tokens.
"""

from __future__ import annotations

import bisect
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_rl_plugin.control_tokens import MARK, ControlTokens, whole
from mindspeed_rl_plugin.episodes.environments import ChatMessage
from mindspeed_rl_plugin.prompts.ends import SPOKEN, end_of_turn
from mindspeed_rl_plugin.prompts.render import QUESTION, TEMPLATE_ERRORS, render_chat, text_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_FORMATS = 64  # sets of tools that agents gave
CUT = "\n[cut]"  # end of an observation that was cut


class RawFormat:
    """Encodes messages and decodes turns without a chat template. A prompt is the text of the last message, encoded as
    the prompts of the data are; observations are appended as plain text.

    most_calls: how many calls the chat template can write in one turn, None: no limit; close: id of the token that ends
    a turn in the chat template, None: no template is used.
    """

    most_calls: int | None = None
    close: int | None = None
    longest: int  # characters of the longest token
    tools: Sequence[Mapping[str, Any]] = ()  # that the template shows

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str = "") -> None:
        self._tokenizer = tokenizer
        self._control = ControlTokens(tokenizer, template)
        self._marked, self._encode = self._control.marked, self._control.encode
        special = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._ends = {tokenizer.eos_token_id, *special}
        self.longest = _longest(tokenizer)

    def prompt(self, messages: Sequence[ChatMessage], said: int = 0) -> list[int]:
        """Token ids of a conversation, up to the start of the model's turn. said: number of characters at the end of
        the last message that are an observation; the other text is from the data, and is encoded like its prompts."""
        content = messages[-1]["content"]
        data = len(content) - said
        return [*text_tokens(self._tokenizer, content[:data]), *self._encode(self._marked(content[data:]))]

    def behind(self, last: int, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of observations, up to the start of the model's next turn. last: last token of the former turn."""
        return self._encode(self._marked("".join(message["content"] for message in messages)))

    def text(self, tokens: Sequence[int]) -> str:
        """Text of a turn without special tokens, for environments and graders."""
        return self._tokenizer.decode(self._unended(tokens), skip_special_tokens=True)

    def raw_text(self, tokens: Sequence[int]) -> str:
        """Text of a turn for parsers: with special tokens, except the token that ended the turn."""
        return self._tokenizer.decode(self._unended(tokens), clean_up_tokenization_spaces=False)

    def shortened(self, text: str, limit: int) -> tuple[str, bool]:
        """An observation of at most `limit` tokens, and whether it was cut to this. A cut text ends with `CUT`, if this
        fits. Text that the template adds does not count. Halves of surrogate pairs become U+FFFD."""
        text = whole(text)
        start = text[: limit * self.longest + 1]  # enough for more than `limit` tokens
        tokens = self._encode(self._marked(start))
        if len(tokens) <= limit:
            return text, False
        mark = CUT if self._length(CUT) < limit else ""
        most = max(len(self._tokenizer.decode(tokens[:limit])), 1)  # too few, if a normaliser makes text shorter
        while most < len(start) and self._length(start[:most] + mark) <= limit:
            most *= 2
        sizes = range(1, min(most, len(start)) + 1)
        size = bisect.bisect_right(sizes, limit, key=lambda size: self._length(start[:size] + mark))
        return start[:size] + mark, True

    def holds_special(self, text: str) -> bool:
        """Whether a text contains the text of a control token."""
        return self._control.pattern.search(text) is not None

    # inside

    def _unended(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens[:-1] if tokens and tokens[-1] in self._ends else tokens

    def _length(self, text: str) -> int:
        return len(self._encode(self._marked(text)))


class ChatFormat(RawFormat):
    """Encodes by the tokenizer's chat template. tools: JSON schemas of the tools, () if there are none.

    `close` is appended to a turn that ended with another token.

    Raises ValueError for a template that cannot be used; `make_format` completes the error's text to a sentence.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(tokenizer, tokenizer.get_chat_template(tools=list(tools) or None))
        self.tools = tuple(tools)
        close = end_of_turn(tokenizer, self.tools)
        if close is None:
            raise ValueError(
                f"writes {self._tail([])[:40]!r} after the model's turn; this text does not begin with a special "
                "token, so no token ends a turn"
            )
        self._close = close
        self.close = tokenizer.convert_tokens_to_ids(self._close)
        self._ends.add(self.close)
        self._check_tools()
        for role in ("user", "tool") if tools else ("user",):
            self._check_rounds(role)
            self._check_together(role)

    def prompt(self, messages: Sequence[ChatMessage], said: int = 0) -> list[int]:
        *before, last = messages
        content = self._marked(last["content"], len(last["content"]) - said) if said else last["content"]
        return self._encode(self._render([*before, {**last, "content": content}]))

    def written(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of an agent's messages, up to the start of the model's turn."""
        return self._encode(self._render([self._observed(message) for message in messages]))

    def behind(self, last: int, messages: Sequence[ChatMessage]) -> list[int]:
        tokens = self._encode(self._tail(messages))
        assert tokens[0] == self.close, (tokens[0], self.close)
        return tokens[1:] if last == self.close else tokens

    # inside

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        return render_chat(self._tokenizer, messages, self.tools)

    def _observed(self, value: Any) -> Any:
        """A message with the text of control tokens marked in all fields but role and type: the model may have written
        even the name of a tool, or of an argument."""
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            return {self._marked(k): v if k in ("role", "type") else self._observed(v) for k, v in value.items()}
        return [self._observed(one) for one in value] if isinstance(value, list) else value

    def _tail(self, messages: Iterable[ChatMessage], before: Sequence[ChatMessage] = (QUESTION,)) -> str:
        """The text that the template writes after the model's turn, from the token that ends the turn."""
        turn = {"role": "assistant", "content": SPOKEN}
        rendered = self._render([*before, turn, *map(self._observed, messages)])
        return rendered.partition(SPOKEN)[2].lstrip()

    def _check_tools(self) -> None:
        """Check that the template shows the tools to the model, and whether it can write several calls in a turn."""
        if not self.tools:
            return
        if self._render([QUESTION]) == render_chat(self._tokenizer, [QUESTION], ()):
            raise ValueError("does not show the tools to the model: its prompts are the same with and without them")
        if self._renders_calls(1) and not self._renders_calls(2):
            self.most_calls = 1

    def _renders_calls(self, number: int) -> bool:
        call = {"type": "function", "function": {"name": self.tools[0]["function"]["name"], "arguments": {}}}
        try:
            self._render([QUESTION, {"role": "assistant", "content": "", "tool_calls": [call] * number}])
        except TEMPLATE_ERRORS:
            return False
        return True

    def _check_rounds(self, role: str) -> None:
        """Check that the text after a turn does not depend on earlier messages."""
        contents = [f"{word} {self._close} answer" for word in ("first", "second")]
        first, second = ({"role": role, "name": "tool", "content": content} for content in contents)
        turn = {"role": "assistant", "content": "turn"}
        alone, later = self._tail([second]), self._tail([second], [QUESTION, turn, first])
        shown, shown_later = (repr(tail.replace(MARK, "")[:80]) for tail in (alone, later))
        if not alone.startswith(self._close) or self._marked(contents[1]) not in alone:
            raise ValueError(
                f"writes {shown} after a turn that a message of role {role!r} follows; it must write {self._close!r}, "
                "which ends turns, and then the message"
            )
        if alone != later:
            raise ValueError(
                f"cannot be extended by appending: a message of role {role!r} becomes {shown} after the first turn, "
                f"and {shown_later} after the second turn"
            )

    def _check_together(self, role: str) -> None:
        """Check that the template writes both messages if two follow a turn. If it raises an error for two results of
        tools, a turn may have only one call. If it raises one for two texts of `step`, `Lead` reports it later."""
        contents = [f"{word} {self._close} answer" for word in ("one", "other")]
        try:
            tail = self._tail([{"role": role, "name": "tool", "content": content} for content in contents])
        except TEMPLATE_ERRORS:
            if role == "tool":
                self.most_calls = 1
            return
        if not all(self._marked(content) in tail for content in contents):
            raise ValueError(
                f"writes {tail.replace(MARK, '')[:80]!r} after a turn that two messages of role {role!r} follow: one "
                "of the messages is missing"
            )


def make_format(tokenizer: PreTrainedTokenizerBase, observation: str, tools: Sequence[Mapping[str, Any]]) -> RawFormat:
    """The format of a run's episodes. observation: "chat" | "raw"; tools: JSON schemas, () if there are none.

    Raises ValueError for a chat template that is missing, or cannot be used for episodes.
    """
    if observation == "raw":
        return RawFormat(tokenizer)
    where = f"--rl-observation chat: the chat template of tokenizer {tokenizer.name_or_path!r}"
    mend = "give a tokenizer whose template fits"
    mend += (
        ", or --rl-environment with `step` instead of tools" if tools else ", or --rl-observation raw without agents"
    )
    if not tokenizer.chat_template:
        raise ValueError(f"{where} is missing; give a tokenizer with one, or --rl-observation raw without agents")
    try:
        return ChatFormat(tokenizer, tools)
    except TEMPLATE_ERRORS as error:
        raise ValueError(f"{where} raises {type(error).__name__}: {error}; {mend}") from error
    except ValueError as error:
        raise ValueError(f"{where} {error}; {mend}") from error


@functools.lru_cache(maxsize=8)
def _longest(tokenizer: PreTrainedTokenizerBase) -> int:
    """Characters of the longest token. Kept, because agents may have many sets of tools, and a vocabulary is large."""
    return max(map(len, tokenizer.get_vocab()))


class AgentFormats:
    """The formats for the tools of agents' requests; agents of a job have few sets of tools. parser: gives the parser
    of calls, or raises ValueError if there is none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, parser: Callable[[], Callable[[str], Any]]) -> None:
        self._tokenizer, self._parser, self._made = tokenizer, parser, dict[str, ChatFormat]()

    def parse(self, text: str) -> Any:
        return self._parser()(text)

    def __call__(self, tools: Sequence[Mapping[str, Any]]) -> ChatFormat:
        """Raises ValueError for a chat template that cannot show these tools, or without a parser of calls."""
        if tools:
            self._parser()
        key = json.dumps(tools)
        if key not in self._made:
            if len(self._made) >= MAX_FORMATS:
                del self._made[next(iter(self._made))]
            self._made[key] = make_format(self._tokenizer, "chat", tools)
        return self._made[key]
