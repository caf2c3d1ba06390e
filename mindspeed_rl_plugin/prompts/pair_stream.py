"""Preference pairs: a prompt with a chosen and a rejected response, as tokens, served in a seeded order."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_rl_plugin.prompts.ends import SPOKEN, end_of_turn
from mindspeed_rl_plugin.prompts.prompt_stream import PromptStream
from mindspeed_rl_plugin.prompts.render import Renderer, bare, find, is_rendered, names, text_tokens
from mindspeed_rl_plugin.prompts.sources import Source
from mindspeed_rl_plugin.rows import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Pair:
    """One prompt with a chosen and a rejected response."""

    prompt: tuple[int, ...]  # P token ids
    chosen: tuple[int, ...]  # R token ids, its end included
    rejected: tuple[int, ...]  # likewise
    row: int  # index in the data


class PairRenderer(Renderer):
    """Turns rows into pairs.

    Prompts are as `Renderer` says. Without `chat_template` a response is a string, the complete answer. An end is
    appended: the end-of-text token, or the template's end of a turn if the prompt was rendered before. With
    `chat_template` a response is an assistant message (a string, or a list with one message), which the template
    renders and ends. Prompt and response are tokenized as one text. `Pair.prompt` is the common begin of the prompt's
    tokens and the tokens of both texts; a response, and its loss, begins after it. An end that an answer has in the
    data is written once, even if nothing else would write an end. If a template drops a part of an answer, the text of
    the data is trained.

    Raises ValueError, with file and line, for a row that is no pair.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_key: str, keys: Mapping[str, str], chat_template: bool
    ) -> None:
        super().__init__(tokenizer, prompt_key, "", chat_template)
        self._keys = keys
        if not chat_template and tokenizer.eos_token is None:
            raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has no end-of-text token, which ends a response")

    def read(self, source: Source, index: int, row: int) -> Pair:
        """The pair of row `index` of `source`; `row`: its number over all sources."""
        fields, where = source.row(index), source.where(index)
        if find(fields, self._prompt_key) is None and all(find(fields, key) for key in self._keys.values()):
            raise ValueError(
                f"{where} has both answers, but no prompt in {self._prompt_key!r} (--rl-prompt-key): if the answers "
                "contain the prompt, as in TRL's implicit form, move it to a separate field"
            )
        prompt = super().read(source, index, row)
        in_turns = self._chat_template or is_rendered(self._tokenizer, prompt.text)
        end = (in_turns and self._end_of_turn) or (None if self._chat_template else self._tokenizer.eos_token)
        answers = (self._answer(source, fields, name, end, where) for name in ("chosen", "rejected"))
        texts = [self._whole(prompt, answer, end, where) for answer in answers]
        own = len(os.path.commonprefix([prompt.tokens, *texts]))
        if not 0 < own < min(map(len, texts)):
            empty = "an answer" if own else "the prompt"
            raise ValueError(f"{where}: {empty} has no token of its own; lengthen it or remove the row")
        if own < len(prompt.tokens):
            merged = "tokens of prompt and answer merge: {!r} of the prompt is trained with the answer"
            self._note(where, merged, self._tokenizer.decode(prompt.tokens[own:]))
        return Pair(prompt.tokens[:own], *(tokens[own:] for tokens in texts), row)

    @functools.cached_property
    def _end_of_turn(self) -> str | None:
        return end_of_turn(self._tokenizer)

    def _answer(
        self, source: Source, fields: Mapping[str, Any], name: str, end: str | None, where: str
    ) -> dict[str, Any]:
        """An answer as an assistant message, without its end, because `end` is appended later. If `end` is None, an end
        in the data is kept."""
        key = self._keys[name]
        value = find(fields, key)
        if value in (None, "", []):
            raise ValueError(
                f"{where}: the field {key!r} of the {name} answer is empty or missing; the row has "
                f"{names(fields)}; set --rl-{name}-key, or correct or remove the row"
            )
        listed = isinstance(value, list) and [isinstance(m, dict) and m.get("role") for m in value] == ["assistant"]
        if not listed and not isinstance(value, str):
            raise ValueError(
                f"{where}: field {key!r} is neither a string nor a list of one assistant message, but "
                f"{str(value)[:80]!r}; keep the earlier messages in the prompt"
            )
        if listed and not self._chat_template:
            raise ValueError(f"{where}: field {key!r} holds a chat message; add --rl-apply-chat-template")
        message = self._messages(value, key, source, where)[0] if listed else {"role": "assistant", "content": value}
        text, ends, written = message["content"] or "", {end, self._tokenizer.eos_token} - {None}, ""
        while found := next((one for one in ends if text.rstrip().endswith(one)), ""):
            text, written = text.rstrip().removesuffix(found), found
            self._note(where, "an answer ends with {!r} in the data; it is not written twice", found)
        if found := next((one for one in ends if one in text), None):
            raise ValueError(
                f"{where}: field {key!r} holds {found!r}, which ends a response, before "
                f"{text.partition(found)[2]!r:.60}; cut the answer there or remove the row"
            )
        if not end and not written:
            self._note(where, "the chat template writes no special token after an answer, so no end is trained")
        return {**message, "content": text if end else text + written}

    def _whole(self, prompt: Prompt, answer: Mapping[str, Any], end: str | None, where: str) -> tuple[int, ...]:
        said = answer["content"]
        if not self._chat_template:
            ended = self._tokenizer.convert_tokens_to_ids(end)
            return (*text_tokens(self._tokenizer, prompt.text + said), ended)
        asked = prompt.messages or [{"role": "user", "content": prompt.text}]
        before, whole = self._rendered(asked, where), self._rendered([*asked, answer], where, ask=False)
        if not whole.startswith(before):
            raise ValueError(
                f"{where}: the chat template changes the prompt when {said!r:.60} follows it, so the two "
                "cannot be separated; use a template that only appends, or give plain strings"
            )
        # the answer may begin inside of `before`
        if bare(said) not in bare(whole)[max(len(bare(before)) - len(bare(said)) + 1, 0) :]:
            marked = self._rendered([*asked, {**answer, "content": SPOKEN}], where, ask=False)
            drops = marked.startswith(before + SPOKEN)
            whole = marked.replace(SPOKEN, said) if drops else whole
            repair = f"the chat template {'drops some of' if drops else 'changes'} an answer, {{!r:.60}}; trained as "
            self._note(where, repair + "{!r:.60}", said, whole[len(before) :])
        return tuple(self._tokenizer.encode(whole, add_special_tokens=False))


class PairStream(PromptStream):
    """Pairs of one or several paths, with the methods of `PromptStream`: `next`, `all`, `state`, `load_state`.

    Pairs are left out if the prompt or a response is too long, or if both responses are equal, because nothing can be
    learned from these; `dropped` is their number. Raises ValueError as `PromptStream` does, and for a row that is no
    pair. max_length, max_response: limits of prompt and response [tokens].
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
            f"all {len(pairs)} pairs are left out: {same} have equal answers, the others are longer than "
            f"--rl-max-prompt-length {self._max_length} or --rl-max-response-length {self._max_response}"
        )
