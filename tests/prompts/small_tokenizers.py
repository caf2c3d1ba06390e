"""Small tokenizers of the public kinds, made from nothing, and chat templates in the form of public families."""

import functools
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

ALPHABET = [chr(c) for c in range(32, 127)] + ["\n", "é", "中"]
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
SPECIAL += ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
SPECIAL += ("<start_of_turn>", "<end_of_turn>", "<｜User｜>", "<｜Assistant｜>", "<|user|>", "<|assistant|>", "<|end|>")
BOS, EOS = "<s>", "</s>"
KINDS = ("bytes", "words", "metaspace", "metaspace-bare")

# templates/NAME.jinja: in the form of public families. That of GLM writes no end of a turn.
TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("templates/*.jinja"))
}
GLM = TEMPLATES.pop("glm")
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "llama2": EOS, "gemma": "<end_of_turn>", "deepseek": EOS}
ENDS["phi"] = "<|end|>"


@functools.cache
def make(kind: str, template: str | None = None, adds: str = "") -> PreTrainedTokenizerFast:
    """kind: of KINDS, `metaspace` begins each text with a dummy space; template: name in TEMPLATES, or its text;
    adds: "b", "e" or "be", what it puts around a text."""
    if kind == "bytes":
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=letters, show_progress=False)
        core.train_from_iterator([*TEMPLATES.values(), "12 34 a b " * 9], trainer)
    elif kind == "words":
        core = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*ALPHABET, "<unk>"])}, unk_token="<unk>"))
        core.pre_tokenizer, core.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    else:
        words = {w: i for i, w in enumerate(["<unk>", "▁", *(c for c in ALPHABET if c != " "), "ab", "▁a", "=1"])}
        core = Tokenizer(models.BPE(vocab=words, merges=[("a", "b"), ("▁", "a"), ("=", "1")], unk_token="<unk>"))
        scheme = "first" if kind == "metaspace" else "never"
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    if adds:
        form = " ".join([BOS] * ("b" in adds) + ["$A"] + [EOS] * ("e" in adds))
        around = [(word, core.token_to_id(word)) for word in (BOS, EOS)]
        core.post_processor = processors.TemplateProcessing(single=form, special_tokens=around)
    # As Phi-3's: its other control tokens have no name, they are special in added_tokens_decoder alone.
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=BOS, eos_token=EOS, unk_token="<unk>")
    made.chat_template = TEMPLATES.get(template, template)
    return made
