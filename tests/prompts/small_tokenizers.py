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

_ASK = "{% if add_generation_prompt %}"
_ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}"
    f"{_ASK}<|im_start|>assistant\n{{% endif %}}",
    "llama3": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    f"{{{{ m.content | trim }}}}<|eot_id|>{{% endfor %}}{_ASK}<|start_header_id|>assistant<|end_header_id|>\n\n"
    "{% endif %}",
    "llama2": "{{ bos_token }}{% set first = messages[0] %}{% set turns = messages[first.role == 'system':] %}"
    f"{{% for m in turns %}}{_ALTERNATE}{{% if m.role == 'user' %}}{{{{ '[INST] ' }}}}{{% if loop.first and first.role "
    "== 'system' %}{{ '<<SYS>>\n' + first.content + '\n<</SYS>>\n\n' }}{% endif %}{{ m.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    f"{{% for m in messages %}}{_ALTERNATE}<start_of_turn>{{{{ 'model' if m.role == 'assistant' else m.role }}}}\n"
    f"{{{{ m.content | trim }}}}<end_of_turn>\n{{% endfor %}}{_ASK}<start_of_turn>model\n{{% endif %}}",
    "deepseek": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<｜Assistant｜>"
    "{{ m.content.split('</think>')[-1] + eos_token }}{% else %}{{ '<｜User｜>' if m.role == 'user' else '' }}"
    f"{{{{ m.content }}}}{{% endif %}}{{% endfor %}}{_ASK}<｜Assistant｜>{{% endif %}}",
    "phi": "{% for m in messages %}{{ '<|' + ('user' if m.role == 'system' else m.role) + '|>\n' + m.content }}"
    f"<|end|>\n{{% endfor %}}{_ASK}<|assistant|>\n{{% else %}}{{{{ eos_token }}}}{{% endif %}}",
}
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "llama2": EOS, "gemma": "<end_of_turn>", "deepseek": EOS}
ENDS["phi"] = "<|end|>"
GLM = "<|user|>\n{{ messages[0].content }}<|assistant|>\n{% if messages[1:] %}{{ messages[1].content }}{% endif %}"


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
        core.train_from_iterator([Path(__file__).read_text(encoding="utf-8"), "12 34 a b " * 9], trainer)
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
