"""What `import` and `export` say: ordinary mistakes in one line, special tokens, sizes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_rl_plugin.reshard.layout import ModelShape, canonical_tensors
from mindspeed_rl_plugin.tools.convert import to_hf, to_megatron, tokens
from mindspeed_rl_plugin.tools.convert.cli import size

CONFIG = dict(
    model_type="qwen2",
    vocab_size=250,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.fixture
def model(tmp_path):
    """A folder with a random model."""
    folder = tmp_path / "hf"
    folder.mkdir()
    tensors = canonical_tensors(ModelShape.from_hf_config(CONFIG))
    save_file({name: torch.randn(t.shape) for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def imported(model, *more):
    return to_megatron.main(["--load", str(model), "--out", str(model.parent / "ckpt"), "--train", "tp2", *more])


def exported(model, *more):
    out = model.parent / f"out{len(list(model.parent.iterdir()))}"
    assert to_hf.main(["--load", str(model.parent / "ckpt"), "--out", str(out), *map(str, more)]) == 0
    names = ("config.json", "generation_config.json")
    return tuple(json.loads((out / n).read_text()) if (out / n).exists() else None for n in names)


def damage(kind):
    def cut(folder):
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])

    def noise(folder):
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * 8)

    def index(folder):
        names = {"a": "model.safetensors", "b": "model-2.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    return {
        "cut": cut,
        "noise": noise,
        "index": index,
        "bad index": lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
        "no config": lambda folder: (folder / "config.json").unlink(),
        "binary config": lambda folder: (folder / "config.json").write_bytes(b"\x93\xfa"),
        "config without sizes": lambda folder: (folder / "config.json").write_text('{"model_type": "qwen2"}'),
        "out is a file": lambda folder: (folder.parent / "ckpt").touch(),
    }[kind]


@pytest.mark.parametrize(
    "kind, message",
    [
        ("cut", "model.safetensors is no safetensors file, or is cut short ("),
        ("noise", "model.safetensors is no safetensors file, or is cut short ("),
        ("index", "model-2.safetensors is missing, as model.safetensors.index.json names it; copy it too"),
        ("bad index", "model.safetensors.index.json is no index of safetensors"),
        ("no config", "config.json is missing; give the folder of a Hugging Face model"),
        ("binary config", "config.json is no JSON file that can be read"),
        ("config without sizes", "config.json has no vocab_size"),
        ("out is a file", "ckpt is a file; give a directory"),
    ],
)
def test_damage_is_named_in_one_line(kind, message, model, capsys):
    damage(kind)(model)
    assert imported(model) == 1
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


def test_what_is_refused_leaves_no_folder_and_says_what_there_is(model, capsys):
    assert imported(model) == 0
    out = model.parent / "none"
    assert to_hf.main(["--load", str(model.parent / "ckpt"), "--out", str(out), "--iteration", "3"]) == 1
    assert f"iter_0000003; iterations in {model.parent / 'ckpt'}: release" in capsys.readouterr().err
    assert not out.exists()


def test_special_tokens_of_the_imported_model_are_kept(model, capsys):
    (model / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": 7, "bos_token_id": 5}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 7], "temperature": 0.6}))
    assert imported(model) == 0
    assert "--hf-tokens" not in capsys.readouterr().out  # no flag of Megatron's
    config, generation = exported(model)
    assert (config["eos_token_id"], config["bos_token_id"], config.get("pad_token_id")) == ([8, 7], 5, None)
    assert generation == {"bos_token_id": 5, "eos_token_id": [8, 7]}
    assert "eos_token_id [8, 7], from the imported model" in capsys.readouterr().out
    config, generation = exported(model, "--config", model)
    assert config["eos_token_id"] == 7 and generation == {"eos_token_id": [8, 7], "temperature": 0.6}


def tokenizer(folder):
    folder.mkdir()
    added = [{"id": 3, "content": "<end>"}, {"id": 4, "content": "<pad>"}]
    whole = {"model": {"vocab": {"a": 0, "<begin>": 1}}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    named = {"eos_token": {"content": "<end>"}, "bos_token": "<begin>", "pad_token": "<pad>", "unk_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def test_special_tokens_of_a_tokenizer(model, capsys):
    """They come before the imported model's; without either the end is said to be missing."""
    assert imported(model) == 0
    config, generation = exported(model)
    assert config["eos_token_id"] is None and generation is None
    assert "note: nothing names the token that ends a response; give --tokenizer" in capsys.readouterr().out
    folder = tokenizer(model.parent / "tokenizer")
    config, generation = exported(model, "--tokenizer", folder)
    expected = {"bos_token_id": 1, "eos_token_id": 3, "pad_token_id": 4}
    assert expected.items() <= config.items() and generation == expected
    assert f"eos_token_id 3, from {folder}" in capsys.readouterr().out
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    config, generation = exported(model, "--tokenizer", folder)
    assert config["eos_token_id"] == [2, 3] and generation == {"eos_token_id": [2, 3]}
    (folder / "generation_config.json").write_text('{"eos_token_id": 250}')
    argv = ["--load", model.parent / "ckpt", "--out", model.parent / "no", "--tokenizer", folder]
    assert to_hf.main([*map(str, argv)]) == 1
    assert "eos_token_id 250 is outside the vocabulary of 250" in capsys.readouterr().err
    for wrong in ('"end"', "[]", "[2, null]"):
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {wrong}}}')
        assert to_hf.main([*map(str, argv)]) == 1
        assert f"of {folder}: give one token id, or a list of some" in capsys.readouterr().err
    assert to_hf.main([*map(str, argv[:-1]), str(model)]) == 1
    assert "no files of a tokenizer" in capsys.readouterr().err
    assert not list((model.parent / "no").glob("*.safetensors")), "refused before the weights are written"


def test_padding_is_left_out_by_the_tokenizers_size(model, capsys):
    """Megatron saves no --vocab-size where a tokenizer of its own says it: of 256 rows 97 are tokens."""
    assert imported(model) == 0
    for file in (model.parent / "ckpt").glob("*/mp_rank_*/*.pt"):
        state = torch.load(file, weights_only=False)
        state["args"].vocab_size = None
        torch.save(state, file)
    folder = tokenizer(model.parent / "tokenizer")

    def rows(*more):
        capsys.readouterr()
        config, _ = exported(model, *more)
        out = max(model.parent.glob("out*"), key=lambda path: path.stat().st_mtime_ns)
        embedding = load_file(out / "model.safetensors")["model.embed_tokens.weight"]
        assert len(embedding) == config["vocab_size"]
        assert torch.equal(embedding[:97], load_file(model / "model.safetensors")["model.embed_tokens.weight"][:97])
        return len(embedding), "--vocab N leaves them out" in capsys.readouterr().out

    (folder / "added_tokens.json").write_text('{"<last>": 96}')
    assert rows("--tokenizer", folder) == (97, False)
    assert rows("--tokenizer", folder, "--vocab", 250) == rows("--vocab", 250) == (250, False)
    assert rows("--tokenizer", folder, "--config", model) == (250, False)
    assert rows() == (256, True)
    (folder / "added_tokens.json").write_text('{"<last>": 256}')
    assert rows("--tokenizer", folder) == (256, True)


def test_a_vocabulary_in_other_files(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "b", "bos_token": "c", "pad_token": "d"}')
    (tmp_path / "added_tokens.json").write_text('{"c": 2}')
    assert tokens.of_model(tmp_path) == {"bos_token_id": 2, "eos_token_id": 1}
    assert tokens.entries(tmp_path) == 3 and tokens.entries(tmp_path / "none") == 0
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["x", 0.0], ["b", -1.0]]}}))
    decoder = {"eos_token": "d", "added_tokens_decoder": {"9": {"content": "d"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(decoder))
    assert tokens.of_model(tmp_path) == {"eos_token_id": 9}


def test_small_sizes_are_in_mb():
    assert (size(40_000), size(999_999_999), size(15_230_000_000)) == ("0.040 MB", "1000.000 MB", "15.230 GB")
