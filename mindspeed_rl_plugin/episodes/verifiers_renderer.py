"""A renderer for verifiers: makes tokens of messages by the chat template of the job's tokenizer, and only appends.

verifiers' default renders the complete conversation again at every turn, and so encodes sampled text again. Here the
next prompt is the tokens so far and the tokens of the new messages, in which the text of a control token stays text.
Needs the package `renderers` 0.1; runs in the interpreter that has verifiers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from renderers import RenderedTokens
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer

from mindspeed_rl_plugin.control_tokens import ControlTokens, dated

# Mark in a chat template -> parser of its tool calls. If a template has several marks, the first of this table counts.
MARKS = {"<arg_key>": "glm", "<function=": "qwen3.5", "<tool_call>": "qwen3", "<｜tool▁call▁begin｜>": "deepseek-v3"}
PLACEHOLDER = "uiweahfskdj"  # content of an assistant's message, to find it in a rendered conversation


class AppendingRenderer(DefaultRenderer):
    """`renderers.Renderer` for any chat template in which a turn ends with a control token. Templates that write
    today's date (Llama 3.2) get a fixed date, as in the job's own prompts."""

    config_class = DefaultRendererConfig

    def __init__(self, tokenizer: Any, config: DefaultRendererConfig | None = None) -> None:
        config = config or DefaultRendererConfig()
        tokenizer.chat_template = dated(tokenizer.chat_template)
        template = tokenizer.get_chat_template()
        parser = config.tool_parser or next((name for mark, name in MARKS.items() if mark in template), None)
        super().__init__(tokenizer, config.model_copy(update={"tool_parser": parser}))
        self._control = ControlTokens(tokenizer, template)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> RenderedTokens:
        """The tokens so far, the tokens of messages after an assistant's turn, and the head of the next turn."""
        held = [*previous_prompt_ids, *previous_completion_ids]
        behind = self._behind(new_messages, tools)
        if held[-1] == behind[0]:  # the turn has its end token; else (e.g. it was cut) `behind` adds it
            behind = behind[1:]
        return RenderedTokens(
            token_ids=held + behind,
            message_indices=[-1] * len(held) + [len(new_messages) - 1] * len(behind),
            message_roles=[message["role"] for message in new_messages],
            message_tool_names=[message.get("name") for message in new_messages],
        )

    def _behind(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        """Tokens after an assistant's turn, from the token that ends it."""
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PLACEHOLDER}]
        rendered = self._tokenizer.apply_chat_template(
            turn + [self._marked(message) for message in messages],
            tools=None if tools is None else list(tools),
            tokenize=False,
            add_generation_prompt=True,
            **(self.config.model_extra or {}),
        )
        tail = rendered.partition(PLACEHOLDER)[2].lstrip()
        ids = self._control.encode(tail)
        if not ids or ids[0] not in self._control.ids:
            raise ValueError(f"the chat template ends a turn with {tail[:20]!r}, which is no special token")
        return ids

    def _marked(self, value: Any) -> Any:
        """A message with the text of control tokens marked in all fields but role and type. So `encode` makes ordinary
        tokens of this text, which the model may have written, even as the name of a tool."""
        if isinstance(value, str):
            return self._control.marked(value)
        if isinstance(value, Mapping):
            return {k: v if k in ("role", "type") else self._marked(v) for k, v in value.items()}
        return [self._marked(one) for one in value] if isinstance(value, list) else value
