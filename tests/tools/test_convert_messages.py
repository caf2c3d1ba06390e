"""What `import` and `export` say: ordinary mistakes in one line, special tokens, sizes."""

import json

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_rl_plugin.prompts.ends import model_tokens
from mindspeed_rl_plugin.prompts.tokenizer import vocabulary_size
from mindspeed_rl_plugin.tools.convert.cli import size

FIRST, INDEX = "model-00001-of-00002.safetensors", "model.safetensors.index.json"


@pytest.mark.parametrize(
    "file, content, message",
    [
        (FIRST, lambda old: old[:-100], f"{FIRST} is no safetensors file, or is cut short ("),
        (FIRST, lambda old: bytes(range(256)) * 8, f"{FIRST} is no safetensors file, or is cut short ("),
        (INDEX, {"weight_map": {"a": FIRST, "b": "c.safetensors"}}, f"c.safetensors is missing, but {INDEX} names it"),
        (INDEX, {}, f"{INDEX} is no index of safetensors"),
        ("../ckpt", b"", "ckpt is a file; give a directory"),
    ],
)
def test_damage_is_named_in_one_line(file, content, message, convert):
    convert.make("qwen2")
    path = convert.hf / file
    content = content(path.read_bytes()) if callable(content) else content
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    said = convert.imported("tp2", refused=message)
    assert len(said.splitlines()) == 1


def exported(convert, *more):
    """config.json and generation_config.json of an export into a folder of its own."""
    convert.back = convert.back.with_name(f"back{len(list(convert.back.parent.iterdir()))}")
    convert.exported(*more)
    paths = (convert.back / name for name in ("config.json", "generation_config.json"))
    return tuple(json.loads(path.read_text()) if path.exists() else None for path in paths)


def test_special_tokens_of_the_imported_model_are_kept(convert):
    convert.make("qwen2", eos_token_id=7, bos_token_id=5)
    (convert.hf / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 7], "temperature": 0.6}))
    assert "--hf-tokens" not in convert.imported("tp2")  # no flag of Megatron's
    config, generation = exported(convert)
    assert (config["eos_token_id"], config["bos_token_id"], config.get("pad_token_id")) == ([8, 7], 5, None)
    assert generation == {"bos_token_id": 5, "eos_token_id": [8, 7]}
    assert "eos_token_id [8, 7], from the imported model" in convert.said
    config, generation = exported(convert, "--config", convert.hf)
    assert config["eos_token_id"] == 7 and generation == {"eos_token_id": [8, 7], "temperature": 0.6}


@pytest.fixture
def tokenizer(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    kind = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    added = [{"id": 3, "content": "<end>"} | kind, {"id": 4, "content": "<pad>"} | kind]
    model = {"type": "WordLevel", "vocab": {"a": 0, "<begin>": 1, "b": 2}, "unk_token": "a"}
    whole = {"version": "1.0", "model": model, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    end = {"__type": "AddedToken", "content": "<end>"}
    named = {"eos_token": end, "bos_token": "<begin>", "pad_token": "<pad>", "unk_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def test_special_tokens_of_a_tokenizer(convert, tokenizer):
    """They come before the imported model's; without either the end is said to be missing."""
    convert.make("qwen2")
    convert.imported("tp2")
    config, generation = exported(convert)
    assert config["eos_token_id"] is None and generation is None
    assert "note: the token that ends a response is unknown" in convert.said
    config, generation = exported(convert, "--tokenizer", tokenizer)
    expected = {"bos_token_id": 1, "eos_token_id": 3, "pad_token_id": 4}
    assert expected.items() <= config.items() and generation == expected
    assert f"eos_token_id 3, from {tokenizer}" in convert.said
    (tokenizer / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    config, generation = exported(convert, "--tokenizer", tokenizer)
    assert config["eos_token_id"] == [2, 3] and generation == {"eos_token_id": [2, 3]}
    convert.back = convert.back.with_name("no")
    outside = "250 is outside the vocabulary of 250"
    for ends in (250, "end", [], [2, None]):
        (tokenizer / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        refused = outside if ends == 250 else f"of {tokenizer}: give a token id, or a list of token ids"
        convert.exported("--tokenizer", tokenizer, refused=refused)
    convert.exported("--tokenizer", convert.hf, refused="no files of a tokenizer")
    assert not convert.back.exists(), "refused before the weights are written"


def test_padding_is_left_out_by_the_tokenizers_size(convert, tokenizer):
    """Megatron saves no --vocab-size where a tokenizer of its own says it: of 256 rows 97 are tokens."""
    weight = convert.make("qwen2")["model.embed_tokens.weight"]
    convert.imported("tp2")
    for rank in range(2):
        convert.change(f"mp_rank_0{rank}", lambda state: setattr(state["args"], "vocab_size", None))

    def rows(*more):
        config, _ = exported(convert, *more)
        embedding = load_file(convert.back / "model.safetensors")["model.embed_tokens.weight"]
        assert len(embedding) == config["vocab_size"] and torch.equal(embedding[:97], weight[:97])
        return len(embedding), "--vocab N exports only the first N" in convert.said

    (tokenizer / "added_tokens.json").write_text('{"<last>": 96}')
    assert rows("--tokenizer", tokenizer) == (97, False)
    assert rows("--tokenizer", tokenizer, "--vocab", 250) == rows("--vocab", 250) == (250, False)
    assert rows("--tokenizer", tokenizer, "--config", convert.hf) == (250, False)
    assert rows() == (256, True)
    (tokenizer / "added_tokens.json").write_text('{"<last>": 256}')
    assert rows("--tokenizer", tokenizer) == (256, True)


def test_a_vocabulary_in_other_files(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "b", "bos_token": "c", "pad_token": "d"}')
    (tmp_path / "added_tokens.json").write_text('{"c": 2}')
    assert model_tokens(tmp_path) == {"bos_token_id": 2, "eos_token_id": 1}
    assert vocabulary_size(tmp_path) == 3 and vocabulary_size(tmp_path / "none") == 0
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["x", 0.0], ["b", -1.0]]}}))
    decoder = {"eos_token": "d", "added_tokens_decoder": {"9": {"content": "d"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(decoder))
    assert model_tokens(tmp_path) == {"eos_token_id": 9}


def test_small_sizes_are_in_mb():
    assert (size(40_000), size(999_999_999), size(15_230_000_000)) == ("0.040 MB", "1000.000 MB", "15.230 GB")
