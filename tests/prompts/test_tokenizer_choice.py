"""Which tokenizer the prompts have, and whether its vocabulary is the model's."""

import json
from types import SimpleNamespace

import pytest

from mindspeed_rl_plugin.prompts.tokenizer import (
    check_vocabulary,
    chosen_tokenizer,
    same_vocabulary,
    tokenizer_path,
    vocabulary,
)


@pytest.mark.parametrize(
    ("attributes", "size", "named"),
    [
        ({"padded_vocab_size": 128}, 129, ("129 tokens", "128", "--rl-tokenizer")),
        ({"padded_vocab_size": 256, "vocab_size": 200}, 201, ("201 tokens", "--vocab-size says 200")),
        ({"padded_vocab_size": 128}, 128, None),
        ({"padded_vocab_size": 128, "vocab_size": None}, 100, None),
        ({}, 10**6, None),
    ],
)
def test_vocabulary(attributes, size, named):
    args = SimpleNamespace(**attributes)
    if named is None:
        check_vocabulary(args, size)
        return
    with pytest.raises(ValueError) as error:
        check_vocabulary(args, size)
    assert all(text in str(error.value) for text in named)


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
