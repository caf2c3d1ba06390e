"""How verifiers turns messages into tokens: by the chat template of the job's tokenizer, and only ever appending.

verifiers' own fallback renders a whole conversation anew at every turn, which encodes anew what the model sampled. Here
the next turn's prompt is the tokens so far and those of the new messages. For renderers 0.1, in verifiers' interpreter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from renderers import RenderedTokens
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer

# What is in the chat template of models that write calls in some format -> name of its parser; the first that is there.
PARSERS = {"<arg_key>": "glm", "<function=": "qwen3.5", "<tool_call>": "qwen3", "<｜tool▁call▁begin｜>": "deepseek-v3"}
SENTINEL = "uiweahfskdj"  # content of an assistant's message, and with a number behind it of others


class AppendingRenderer(DefaultRenderer):
    """`renderers.Renderer` of any chat template in which a turn ends with a special token."""

    config_class = DefaultRendererConfig

    def __init__(self, tokenizer: Any, config: DefaultRendererConfig | None = None) -> None:
        config = config or DefaultRendererConfig()
        template = tokenizer.get_chat_template()
        parser = config.tool_parser or next((name for mark, name in PARSERS.items() if mark in template), None)
        super().__init__(tokenizer, config.model_copy(update={"tool_parser": parser}))
        self._special = re.compile(
            "|".join(map(re.escape, sorted(tokenizer.all_special_tokens, key=len, reverse=True)))
        )

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> RenderedTokens:
        """Tokens so far, and those of messages behind an assistant's turn, with the head of the next one."""
        held = [*previous_prompt_ids, *previous_completion_ids]
        behind = self._behind(new_messages)
        if held[-1] == behind[0]:  # what ended the turn; one that ended otherwise, or was cut, gets its end here
            behind = behind[1:]
        return RenderedTokens(
            token_ids=held + behind,
            message_indices=[-1] * len(held) + [len(new_messages) - 1] * len(behind),
            message_roles=[message["role"] for message in new_messages],
            message_tool_names=[message.get("name") for message in new_messages],
        )

    def _behind(self, messages: list[dict[str, Any]]) -> list[int]:
        """Tokens from the one that ends an assistant's turn on. Text of special tokens in messages is only text."""
        texts = [_text(message["content"]) for message in messages]
        odd = {f"{SENTINEL}{i}.": text for i, text in enumerate(texts) if self._special.search(text)}
        shown = [{**m, "content": f"{SENTINEL}{i}."} if f"{SENTINEL}{i}." in odd else m for i, m in enumerate(messages)]
        rendered = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": SENTINEL}, *shown],
            tokenize=False,
            add_generation_prompt=True,
            **(self.config.model_extra or {}),
        )
        tail, ids = rendered.partition(SENTINEL)[2], []
        for piece in re.split(f"({SENTINEL}[0-9]+[.])", tail):
            ids += self._encode(odd[piece], split_special_tokens=True) if piece in odd else self._encode(piece)
        if not ids or ids[0] not in self._tokenizer.all_special_ids:
            raise ValueError(f"the chat template ends a turn with {tail[:20]!r}, which is no special token")
        return ids

    def _encode(self, text: str, **how: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, **how) if text else []


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or ())
