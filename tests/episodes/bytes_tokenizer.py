"""A tokenizer of single bytes with a chat template in the manner of Qwen."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = """{% if tools %}<|im_start|>tools
{{ tools | map(attribute='function.name') | join(' ') }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] or '' }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def byte_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Bytes, and the one word "12". It is saved in a folder, and read there."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=letters | {"12": len(letters)}, merges=[("1", "2")]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    made.add_tokens(["<tool_call>", "</tool_call>"])
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)
