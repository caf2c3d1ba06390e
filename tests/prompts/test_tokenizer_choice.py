"""Which tokenizer the prompts have, and whether its vocabulary is the model's."""

import json
from types import SimpleNamespace

import pytest

from mindspeed_rl_plugin.prompts.tokenizer import (
    chosen_tokenizer,
    model_vocabulary,
    same_vocabulary,
    tokenizer_path,
    vocabulary,
)

HF = {"vocab_size": 478}


@pytest.mark.parametrize(
    ("sizes", "reference", "ids", "named"),
    [
        ({"padded_vocab_size": 128}, None, 129, "129 ids, the padded model 128, .* correct --rl-tokenizer$"),
        ({"padded_vocab_size": 256, "vocab_size": 200}, None, 201, "201 ids, --vocab-size 200, "),
        ({"padded_vocab_size": 512}, HF, 479, "479 ids, --rl-hf-model 478, "),
        ({"padded_vocab_size": 512, "vocab_size": 478}, None, 97, "97 ids, --vocab-size 478, .* --rl-smaller"),
        ({"padded_vocab_size": 512}, HF, 97, "97 ids, --rl-hf-model 478, .*, or give --rl-smaller-tokenizer"),
        ({"padded_vocab_size": 512}, None, 97, "97 ids, the padded model 512, .*, or give --rl-smaller-tokenizer"),
        ({"padded_vocab_size": 128, "vocab_size": None}, None, 128, None),
        ({"padded_vocab_size": 256}, None, 97, None),  # --make-vocab-size-divisible-by 128 under TP 2
        ({"padded_vocab_size": 102400}, {"vocab_size": 102400}, 100015, None),  # DeepSeek's
        ({}, None, 10**6, None),
    ],
)
def test_vocabulary(sizes, reference, ids, named):
    args = SimpleNamespace(make_vocab_size_divisible_by=128, tensor_model_parallel_size=2, **sizes)
    tokenizer = SimpleNamespace(get_vocab=lambda: {"<eos>": ids - 1, "a": 0})  # with holes
    if named is None:
        assert model_vocabulary(args, tokenizer, reference) == (reference or {"vocab_size": ids})["vocab_size"]
        return
    with pytest.raises(ValueError, match=named):
        model_vocabulary(args, tokenizer, reference)
    if "smaller" in named:
        assert model_vocabulary(args, tokenizer, reference, smaller=True) == (478 if reference else 97)


def test_flags_in_their_order():
    flags = {"--rl-tokenizer": "a", "--rl-hf-model": "b", "--tokenizer-model": "c", "--tokenizer-name-or-path": "d"}
    for first in range(len(flags)):
        given = dict(list(flags.items())[first:])
        args = SimpleNamespace(**{flag[2:].replace("-", "_"): path for flag, path in given.items()})
        assert chosen_tokenizer(args) == next(iter(given.items())) and tokenizer_path(args) == "abcd"[first]
    assert chosen_tokenizer(SimpleNamespace()) is None and tokenizer_path(SimpleNamespace()) is None


def test_the_files_of_a_tokenizer_are_utf_8_and_compared_where_both_are_whole(tmp_path):
    """With a byte order mark too, in any locale; what vocab.json lists beside merges.txt lacks the added tokens."""
    texts = {"one/tokenizer.json": {"é": 0}, "other/tokenizer.json": {"é": 1}, "old/vocab.json": {}}
    for name, words in texts.items():
        path = tmp_path / name
        path.parent.mkdir()
        text = json.dumps({"model": {"vocab": words}, "added_tokens": []}, ensure_ascii=False)
        path.write_bytes(b"\xef\xbb\xbf" + text.encode() if "one" in name else text.encode())
    one, other, old = (str(tmp_path / name) for name in ("one", "other", "old"))
    assert vocabulary(one) == {"é": 0}
    assert same_vocabulary(one, one) and not same_vocabulary(one, other) and same_vocabulary(one, old)
