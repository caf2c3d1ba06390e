"""How the messages of an episode become tokens: by the tokenizer's chat template (`ChatFormat`), or as they are
(`RawFormat`).

What the model sampled stays as it was sampled; only what comes behind it is rendered, and appended. The text of an
observation never becomes a *control token* (`control_tokens`): where it holds the text of one, this text is spelled in
ordinary tokens.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_rl_plugin.control_tokens import MARK, ControlTokens, whole
from mindspeed_rl_plugin.episodes.environments import ChatMessage
from mindspeed_rl_plugin.prompts.ends import SPOKEN, end_of_turn
from mindspeed_rl_plugin.prompts.render import QUESTION, TEMPLATE_ERRORS, render_chat, text_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CUT = "\n[cut]"  # stands behind what is left of an observation that was too long


class RawFormat:
    """How messages become tokens, and tokens text, of models that know no chat template: a prompt is the text of the
    last message, as data prompts are encoded, and observations are appended as they are.

    most_calls: most calls in one turn that the model's format has room for, None without a limit; close: the token that
    ends a turn in the chat template, None without a template.
    """

    most_calls: int | None = None
    close: int | None = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str = "") -> None:
        self._tokenizer = tokenizer
        self._control = ControlTokens(tokenizer, template)
        self._marked, self._encode = self._control.marked, self._control.encode
        special = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._ends = {tokenizer.eos_token_id, *special}
        self._longest = max(map(len, tokenizer.get_vocab()))  # token [characters]

    def prompt(self, messages: Sequence[ChatMessage], said: int = 0) -> list[int]:
        """Token ids of a conversation, up to where the model's turn begins. said: characters at the end of the last
        message that are an observation; all others are the data's, and become tokens as data prompts do."""
        content = messages[-1]["content"]
        data = len(content) - said
        return [*text_tokens(self._tokenizer, content[:data]), *self._encode(self._marked(content[data:]))]

    def behind(self, last: int, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of observations, up to where the model's next turn begins; they stand behind a turn whose last
        token, sampled, is `last`."""
        return self._encode(self._marked("".join(message["content"] for message in messages)))

    def text(self, tokens: Sequence[int]) -> str:
        """A turn as environments and graders see it: without special tokens."""
        return self._tokenizer.decode(self._unended(tokens), skip_special_tokens=True)

    def raw_text(self, tokens: Sequence[int]) -> str:
        """A turn as parsers see it: with special tokens, but without the one that ended it."""
        return self._tokenizer.decode(self._unended(tokens), clean_up_tokenization_spaces=False)

    def shortened(self, text: str, limit: int) -> tuple[str, bool]:
        """An observation, and whether it was cut: one of more than `limit` tokens is cut to so many, the mark `CUT`
        behind them included (left out where `limit` has no room for it). What the template adds or escapes does not
        count. Halves of surrogate pairs, which are no text, become U+FFFD."""
        text = whole(text)
        start = text[: limit * self._longest + 1]  # so many characters are more than `limit` tokens
        tokens = self._encode(self._marked(start))
        if len(tokens) <= limit:
            return text, False
        mark = CUT if self._length(CUT) < limit else ""
        most = max(len(self._tokenizer.decode(tokens[:limit])), 1)
        while most < len(start) and self._length(start[:most] + mark) <= limit:  # a normaliser makes text shorter
            most *= 2
        sizes = range(1, min(most, len(start)) + 1)
        size = bisect.bisect_right(sizes, limit, key=lambda size: self._length(start[:size] + mark))
        return start[:size] + mark, True

    def holds_special(self, text: str) -> bool:
        """Whether the text of a control token is in it."""
        return self._control.pattern.search(text) is not None

    # inside

    def _unended(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens[:-1] if tokens and tokens[-1] in self._ends else tokens

    def _length(self, text: str) -> int:
        return len(self._encode(self._marked(text)))


class ChatFormat(RawFormat):
    """The same by the tokenizer's chat template. tools: their JSON schemas, () where there are none.

    close: the token that ends a turn in the template. Where a turn ended by another one, `close` stands behind it.

    Raises ValueError, with the reason alone, for a template that cannot be used so.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(tokenizer, tokenizer.get_chat_template(tools=list(tools) or None))
        self._tools = tuple(tools)
        close = end_of_turn(tokenizer, self._tools)
        if close is None:
            raise ValueError(
                f"writes {self._tail([])[:40]!r} behind the model's turn, which does not begin with one special token: "
                "nothing says where a turn ends"
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

    def behind(self, last: int, messages: Sequence[ChatMessage]) -> list[int]:
        tokens = self._encode(self._tail(messages))
        assert tokens[0] == self.close, (tokens[0], self.close)
        return tokens[1:] if last == self.close else tokens

    # inside

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        return render_chat(self._tokenizer, messages, self._tools)

    def _observed(self, message: ChatMessage) -> ChatMessage:
        """All its text marked: the name of a tool may be the model's too."""
        return {k: self._marked(v) if k != "role" and isinstance(v, str) else v for k, v in message.items()}

    def _tail(self, messages: Iterable[ChatMessage], before: Sequence[ChatMessage] = (QUESTION,)) -> str:
        """What the template writes behind the model's turn, from the token that ends it on."""
        turn = {"role": "assistant", "content": SPOKEN}
        rendered = self._render([*before, turn, *map(self._observed, messages)])
        return rendered.partition(SPOKEN)[2].lstrip()

    def _check_tools(self) -> None:
        """Whether the template shows the tools to the model, and how many calls a turn has room for."""
        if not self._tools:
            return
        if self._render([QUESTION]) == render_chat(self._tokenizer, [QUESTION], ()):
            raise ValueError("does not show the tools to the model: its prompts are the same with and without them")
        if self._renders_calls(1) and not self._renders_calls(2):
            self.most_calls = 1

    def _renders_calls(self, number: int) -> bool:
        call = {"type": "function", "function": {"name": self._tools[0]["function"]["name"], "arguments": {}}}
        try:
            self._render([QUESTION, {"role": "assistant", "content": "", "tool_calls": [call] * number}])
        except TEMPLATE_ERRORS:
            return False
        return True

    def _check_rounds(self, role: str) -> None:
        """Whether what stands behind a turn is the same whatever came before it."""
        contents = [f"{word} {self._close} answer" for word in ("first", "second")]
        first, second = ({"role": role, "name": "tool", "content": content} for content in contents)
        turn = {"role": "assistant", "content": "turn"}
        alone, later = self._tail([second]), self._tail([second], [QUESTION, turn, first])
        shown, shown_later = (repr(tail.replace(MARK, "")[:80]) for tail in (alone, later))
        if not alone.startswith(self._close) or self._marked(contents[1]) not in alone:
            raise ValueError(
                f"writes {shown} behind a turn that a message of role {role!r} answers: not {self._close!r}, which "
                "ends turns, and the message"
            )
        if alone != later:
            raise ValueError(
                f"cannot be extended by appending: a message of role {role!r} becomes {shown} behind the first turn, "
                f"and {shown_later} behind the second"
            )

    def _check_together(self, role: str) -> None:
        """Whether two messages have room behind a turn. Where tools have not, a turn may make one call; where `step`
        has not, it gives one text, and `Lead` says so if it gives more."""
        contents = [f"{word} {self._close} answer" for word in ("one", "other")]
        try:
            tail = self._tail([{"role": role, "name": "tool", "content": content} for content in contents])
        except TEMPLATE_ERRORS:
            if role == "tool":
                self.most_calls = 1
            return
        if not all(self._marked(content) in tail for content in contents):
            raise ValueError(
                f"writes {tail.replace(MARK, '')[:80]!r} behind a turn that two messages of role {role!r} answer: one "
                "of them is not there"
            )


def make_format(tokenizer: PreTrainedTokenizerBase, observation: str, tools: Sequence[Mapping[str, Any]]) -> RawFormat:
    """The format of a run's episodes. observation: "chat" | "raw"; tools: JSON schemas, () where there are none.

    Raises ValueError for a chat template that is absent, or of no use for episodes.
    """
    if observation == "raw":
        return RawFormat(tokenizer)
    where = f"--rl-observation chat: the chat template of tokenizer {tokenizer.name_or_path!r}"
    mend = "give a tokenizer whose template fits"
    mend += ", or --rl-environment with `step` in place of tools" if tools else ", or --rl-observation raw"
    if not tokenizer.chat_template:
        raise ValueError(f"{where} is absent; give a tokenizer that has one, or --rl-observation raw")
    try:
        return ChatFormat(tokenizer, tools)
    except TEMPLATE_ERRORS as error:
        raise ValueError(f"{where} raises {type(error).__name__}: {error}; {mend}") from error
    except ValueError as error:
        raise ValueError(f"{where} {error}; {mend}") from error
