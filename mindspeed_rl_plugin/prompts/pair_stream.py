"""Preference pairs: a prompt with a chosen and a rejected response, as tokens, served in a seeded order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_rl_plugin.prompts.prompt_stream import PromptStream
from mindspeed_rl_plugin.prompts.render import Renderer, find, names
from mindspeed_rl_plugin.prompts.sources import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Pair:
    """prompt: P token ids; chosen, rejected: R token ids of each response, its end included; row: index in the data."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    row: int


class PairRenderer(Renderer):
    """Turns rows into pairs. Raises ValueError, naming file and line, for a row that is none.

    A response is a string, which is the whole answer and gets the end-of-text token; with `chat_template` it is an
    assistant message (a string, or a list with one), rendered and ended by the template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_key: str, keys: Mapping[str, str], chat_template: bool
    ) -> None:
        super().__init__(tokenizer, prompt_key, "", chat_template)
        self._keys = keys
        if not chat_template and tokenizer.eos_token_id is None:
            raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has no end-of-text token, which ends a response")

    def read(self, source: Source, index: int, row: int) -> Pair:
        """The pair of row `index` of `source`; `row` numbers it over all sources."""
        fields, where = source.row(index), source.where(index)
        asked = find(fields, self._prompt_key)
        if asked is None and all(find(fields, key) for key in self._keys.values()):
            raise ValueError(
                f"{where} has both answers and no prompt in {self._prompt_key!r} (--rl-prompt-key): where they hold "
                "the prompt themselves, as TRL's implicit prompts do, split it off into a field of its own"
            )
        prompt = super().read(source, index, row)
        return Pair(prompt.tokens, *(self._answer(fields, asked, name, where) for name in ("chosen", "rejected")), row)

    def _answer(self, fields: Mapping[str, Any], prompt: Any, name: str, where: str) -> tuple[int, ...]:
        key = self._keys[name]
        value = answer = find(fields, key)
        if value in (None, "", []):
            raise ValueError(
                f"{where}: a pair has a {name} answer, and the field {key!r} is empty or not there; it has "
                f"{names(fields)}; set --rl-{name}-key, or correct or remove the row"
            )
        if isinstance(value, list) and [isinstance(m, dict) and m.get("role") for m in value] == ["assistant"]:
            answer = value[0].get("content")
        if not isinstance(answer, str):
            raise ValueError(
                f"{where}: field {key!r} is neither a string nor a list of one assistant message, but "
                f"{str(value)[:80]!r}; keep the earlier messages in the prompt"
            )
        if self._chat_template:
            return self._templated(prompt, answer, where, key)
        if isinstance(value, list):
            raise ValueError(f"{where}: field {key!r} holds a chat message; add --rl-apply-chat-template")
        return (*self._tokenizer.encode(answer, add_special_tokens=False), self._tokenizer.eos_token_id)

    def _templated(self, prompt: Any, answer: str, where: str, key: str) -> tuple[int, ...]:
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        render = self._tokenizer.apply_chat_template
        before = render(messages, tokenize=False, add_generation_prompt=True)
        whole = render([*messages, {"role": "assistant", "content": answer}], tokenize=False)
        if not whole.startswith(before):
            raise ValueError(
                f"{where}: the chat template writes another prompt once field {key!r} follows it, so the response "
                "cannot be cut off; use a template that appends, or give plain strings"
            )
        return tuple(self._tokenizer.encode(whole[len(before) :], add_special_tokens=False))


class PairStream(PromptStream):
    """Pairs of one or several paths, in the manner of `PromptStream`: `next`, `all`, `state`, `load_state`.

    Pairs whose prompt or a response is too long, and those whose two responses are the same tokens, which teach
    nothing, are left out; `dropped` counts both. Raises ValueError as `PromptStream` does, and for a row that is no
    pair. max_length, max_response: [tokens].
    """

    def __init__(
        self, paths: Sequence[str], renderer: PairRenderer, *, max_length: int, max_response: int, seed: int
    ) -> None:
        self._max_response = max_response
        super().__init__(paths, renderer, max_length=max_length, seed=seed)

    def _content(self, pair: Pair) -> tuple | None:
        too_long = len(pair.prompt) > self._max_length or max(len(pair.chosen), len(pair.rejected)) > self._max_response
        return None if too_long or pair.chosen == pair.rejected else (pair.prompt, pair.chosen, pair.rejected)

    def _none_left(self, pairs: Sequence[Pair]) -> str:
        same = sum(pair.chosen == pair.rejected for pair in pairs)
        return (
            f"no pair is left of {len(pairs)}: in {same} both answers are the same, the others are longer than "
            f"--rl-max-prompt-length {self._max_length} or --rl-max-response-length {self._max_response}"
        )
