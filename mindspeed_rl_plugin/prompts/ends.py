"""The token ids that end a response, from the files of a model and of a tokenizer; Megatron has no argument for them.
Training, every engine, import and export use the same list."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_rl_plugin.control_tokens import ControlTokens
from mindspeed_rl_plugin.prompts.render import QUESTION, TEMPLATE_ERRORS, render_chat
from mindspeed_rl_plugin.prompts.tokenizer import read_if_there, vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKEN_FIELDS, GENERATION = ("bos_token_id", "eos_token_id", "pad_token_id"), "generation_config.json"
SPOKEN = "what-the-model-said"  # text of a model's turn, to find it in a rendered conversation
PRINTED_CHARACTERS = 400  # most characters of a text that is printed
END, LEFT_OUT = "\ud800", "\ud801"  # stand for marks in a text; decoded text never has halves of surrogate pairs


def end_of_turn(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] | None = None) -> str | None:
    """The token with which the chat template ends the model's turn; None if no control token follows the turn's text,
    or if the template refuses the turn. tools: as in `render_chat`."""
    turns = ({"role": "assistant", "content": said} for said in (SPOKEN, SPOKEN + "?"))
    try:
        one, other = (render_chat(tokenizer, [QUESTION, turn], tools, ask=False)[::-1] for turn in turns)
    except TEMPLATE_ERRORS:
        return None
    # the common end of both conversations, after the text of the turn
    behind = os.path.commonprefix([one, other])[::-1] if one != other else ""
    template = tokenizer.get_chat_template(tools=list(tools or ()) or None)
    found = ControlTokens(tokenizer, template).pattern.match(behind.lstrip())
    return found and found[0]


def response_ends(
    tokenizer: PreTrainedTokenizerBase, chat: bool, hf_model: str | None, vocab: int, tools: Sequence[Any] | None = None
) -> dict[int, str]:
    """Id that ends a response -> what names it (tokenizer, chat template, generation_config.json). The tokenizer's id
    is first. chat: whether prompts have the form of the chat template; hf_model: folder whose generation_config.json
    may list more ids; vocab: number of ids. Raises ValueError for an id that is not below `vocab`."""
    close = end_of_turn(tokenizer, tools) if chat and tokenizer.chat_template else None
    listed = config_tokens(Path(hf_model) / GENERATION).get("eos_token_id") if hf_model else None
    named = [(tokenizer.eos_token_id, "tokenizer"), (close and tokenizer.convert_tokens_to_ids(close), "chat template")]
    named += [(one, GENERATION) for one in (listed if isinstance(listed, list) else [listed])]
    ends: dict[int, str] = {}
    for token, source in named:
        if token is not None:
            if not (isinstance(token, int) and 0 <= token < vocab):
                file = f"{hf_model}/{source}" if source == GENERATION else f"the {source} {tokenizer.name_or_path!r}"
                raise ValueError(f"eos_token_id {token!r} of {file} is no id below {vocab}; correct it")
            ends[token] = f"{ends[token]}, {source}" if token in ends else source
    return ends


def marked(tokenizer: PreTrainedTokenizerBase, ends: Collection[int], tokens: Sequence[int], begin: int = 0) -> str:
    """Text, in quotes, of the tokens from `begin` on, decoded together with the earlier tokens. `*end*` follows each
    token of `ends`, outside the quotes; ` ... ` replaces the middle of a text longer than PRINTED_CHARACTERS."""
    cuts = [begin, *(i for i in range(begin + 1, len(tokens) + 1) if tokens[i - 1] in ends), len(tokens)]
    texts = [tokenizer.decode(tokens[:cut]) for cut in cuts]
    text = END.join(text[len(os.path.commonprefix([before, text])) :] for before, text in itertools.pairwise(texts))
    if len(text) > PRINTED_CHARACTERS:
        text = text[: PRINTED_CHARACTERS // 2] + LEFT_OUT + text[-PRINTED_CHARACTERS // 2 :]
    marks = {END: "*end*", LEFT_OUT: "..."}
    return " ".join(marks.get(piece) or repr(piece) for piece in re.split(f"([{END}{LEFT_OUT}])", text) if piece)


def model_tokens(folder: Path) -> dict[str, Any]:
    """The TOKEN_FIELDS in the files of a model or of a tokenizer; generation_config.json overrides other files.

    Only generation_config.json and config.json can name several tokens in a field.
    """
    out = _tokenizer_tokens(folder)
    for name in ("config.json", GENERATION):
        out |= config_tokens(folder / name)
    return out


def config_tokens(path: Path) -> dict[str, Any]:
    """The TOKEN_FIELDS in a config.json or a generation_config.json. path: the file, or the folder of a config.json."""
    named = read_if_there(path / "config.json" if path.is_dir() else path)
    return {name: named[name] for name in TOKEN_FIELDS if named.get(name) is not None}


def _tokenizer_tokens(folder: Path) -> dict[str, Any]:
    named = read_if_there(folder / "special_tokens_map.json") | read_if_there(folder / "tokenizer_config.json")
    words = {field: named.get(field.removesuffix("_id")) for field in TOKEN_FIELDS}
    words = {field: word["content"] if isinstance(word, dict) else word for field, word in words.items() if word}
    known = vocabulary(folder) if words else {}
    return {field: known[word] for field, word in words.items() if word in known}
