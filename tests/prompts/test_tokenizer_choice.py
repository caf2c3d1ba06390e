"""Which tokenizer the prompts have, and whether its vocabulary is the model's."""

from types import SimpleNamespace

import pytest

from mindspeed_rl_plugin.prompts.tokenizer import check_vocabulary, chosen_tokenizer, tokenizer_path


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
