"""Tokenizers of the families whose chat templates are tested: trained here on little text, with each family's special
tokens and way of cutting text. The templates are read in TRL's wheel."""

import functools
import zipfile
from typing import NamedTuple

import trl_wheel
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

DIGITS = {"qwen": r"\p{N}", "llama": r"\p{N}{1,3}", "deepseek": r"\p{N}{1,3}"}
CUTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.capitalize()} two numbers.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "integer", "description": f"Number {key}."} for key in ("a", "b")},
                "required": ["a", "b"],
            },
        },
    }
    for name in ("add", "multiply")
]


class Family(NamedTuple):
    """special: tokens marked so, that of the beginning of a text first, that of its end second; added: others."""

    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    bos: bool = True


_CALL = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
_OUTPUT = ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end")
_LLAMA = ("begin_of_text", "eot_id", "end_of_text", "eom_id", "start_header_id", "end_header_id", "python_tag")
FAMILIES = {
    "qwen": Family(
        ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
        tuple(f"<{slash}{name}>" for name in ("tool_call", "tool_response", "think") for slash in ("", "/")),
        bos=False,
    ),
    "llama": Family(tuple(f"<|{name}|>" for name in _LLAMA)),
    "deepseek": Family(
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        ("<｜User｜>", "<｜Assistant｜>", *(f"<｜tool▁{n}｜>" for n in (*_CALL, *_OUTPUT)), "<think>", "</think>"),
    ),
}
FAMILY = {"qwen2_5": "qwen", "qwen3": "qwen", "llama3": "llama", "llama3_1": "llama", "llama3_2": "llama"}
FAMILY |= {"deepseekv3": "deepseek"}


@functools.cache
def template(name: str) -> str:
    """A chat template of TRL's wheel, by the name of its file."""
    with zipfile.ZipFile(trl_wheel.wheel()) as wheel:
        return wheel.read(f"trl/chat_templates/{name}.jinja").decode()


@functools.cache
def _trained(family: str) -> str:
    """A tokenizer as JSON."""
    tokenizer = Tokenizer(models.BPE())
    if family == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(CUTS.replace("DIGITS", DIGITS[family])), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    text = [template(name) for name in FAMILY] + ["\n\n\n", "  ", "é ü 中文 😀 " * 3, '{"name": "add"}\n']
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    special, added, bos = FAMILIES[family]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in added])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], tokenizer.token_to_id(special[0]))]
        )
    return tokenizer.to_str()


def make_tokenizer(name: str, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A new tokenizer with a template of TRL's, by name, or another one for the family of `name`."""
    family = FAMILY[name.removesuffix("_training")]
    special = FAMILIES[family].special
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(family)),
        bos_token=special[0] if FAMILIES[family].bos else None,
        eos_token=special[1],
        extra_special_tokens=[*special[2:], *([] if FAMILIES[family].bos else special[:1])],
    )
    tokenizer.chat_template = template(name) if chat_template is None else chat_template
    return tokenizer


@functools.cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """The same for reading."""
    return make_tokenizer(name)
