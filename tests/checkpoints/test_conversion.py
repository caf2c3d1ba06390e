"""MindSpeed-LLM converts `--load`: when and where to, what it is refused for, and when it is not needed."""

import json
import os
from types import SimpleNamespace

import pytest

from mindspeed_rl_plugin.checkpoints import checkpoint_files as files
from mindspeed_rl_plugin.checkpoints import conversion, disk
from mindspeed_rl_plugin.checkpoints.start_decision import decide
from mindspeed_rl_plugin.launch import launch

CONFIG = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 4}
NEW = {"enable_mg2hf_convert": False, "only_convert_last_checkpoint": False}  # flags since 26.1.0


@pytest.fixture
def args(tmp_path):
    """Arguments of a start from a Hugging Face folder, before validation."""
    load = tmp_path / "hf"
    load.mkdir()
    (load / "config.json").write_text(json.dumps(CONFIG))
    (load / "model-00001-of-00001.safetensors").write_bytes(b"weights")
    sizes = dict(num_layers=4, hidden_size=64, num_attention_heads=2, tensor_model_parallel_size=2)
    return SimpleNamespace(
        load=str(load), save=str(tmp_path / "out"), enable_hf2mg_convert=True, model_type_hf="qwen3", **sizes
    )


def test_when_it_converts_and_where_training_will_start(args, tmp_path):
    folder = tmp_path / "hf" / "megatron_cache_tp2pp1ep1" / "iter_0000001"
    start = decide(args)
    assert (start.kind, start.reference_path) == ("pretrained", str(folder))
    args.mg_save_dir = str(tmp_path / "mg")
    assert decide(args).reference_path == str(tmp_path / "mg" / "iter_0000001")
    args.enable_hf2mg_convert = False
    with pytest.raises(ValueError, match="python -m mindspeed_rl_plugin import"):
        decide(args)
    vars(args).update(NEW)
    assert decide(args).kind == "pretrained", "turned on where --load holds weights"
    args.enable_mg2hf_convert = True
    assert not conversion.converts(args)


def test_what_can_be_converted_is_not_refused(args):
    assert list(conversion.problems(args)) == []
    assert list(conversion.problems(SimpleNamespace(load=None, save=None))) == [], "of another host"
    vars(args).update(num_layers=6, noop_layers="4,5", **NEW)
    assert list(conversion.problems(args)) == []


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"load": None}, "--load None"),
        ({"load": "/nowhere"}, "--load /nowhere"),
        ({"ckpt_format": "torch_dist"}, "--ckpt-format torch"),
        ({"ckpt_step": 7}, "--ckpt-step 7"),
        ({"num_layers": 5}, "--num-layers 5"),
        ({"num_layers": 6, "noop_layers": {5}}, "--num-layers 5 without noop layers, in config.json 4"),
        ({"hidden_size": 128}, "--hidden-size 128, in config.json 64"),
        ({"num_attention_heads": 8}, "--num-attention-heads 8, in config.json 2"),
        ({"model_type_hf": "llama2"}, "--model-type-hf llama2, in config.json qwen3: give qwen3"),
        ({"enable_mg2hf_convert": True, "save": None}, "give --save"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_flag_and_value(args, changes, said):
    vars(args).update(changes)
    (line,) = conversion.problems(args)
    assert said in line


@pytest.mark.parametrize("head_dim, said", [(32, []), (48, ["--model-type-hf llama2, in config.json head_dim 48"])])
def test_mistral_is_converted_as_llama_where_its_heads_are(args, tmp_path, head_dim, said):
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG | {"model_type": "mistral", "head_dim": head_dim}))
    args.model_type_hf = "llama2"
    problems = list(conversion.problems(args))
    assert len(problems) == len(said) and all(words in line for words, line in zip(said, problems, strict=True))


def test_a_config_of_transformers_5_is_answered_with_the_field_to_add(args, tmp_path):
    newer = {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 1e6}}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG | newer))
    (line,) = conversion.problems(args)
    assert args.load in line and '"torch_dtype": "bfloat16", "rope_theta": 1000000.0' in line


def test_a_folder_that_may_not_be_written_or_is_full_is_answered_with_another(args, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(disk.os, "access", lambda path, mode: False)
        (line,) = conversion.problems(args)
        assert f"--load {args.load} is not writable" in line and "give --mg-save-dir" in line
        args.mg_save_dir = "/mg"
        (line,) = conversion.problems(args)
        assert "--mg-save-dir /mg is not writable" in line
        del args.mg_save_dir
        args.mg_cache_dir = None  # as newer commits of 2.3.0 call it
        (line,) = conversion.problems(args)
        assert f"--load {args.load} is not writable" in line and "give --mg-cache-dir" in line
        args.mg_cache_dir = "/cache"
        assert conversion.converted_to(args) == "/cache"
        del args.mg_cache_dir
    monkeypatch.setattr(disk, "free_bytes", lambda path: 6)
    (line,) = conversion.problems(args)
    assert "6e-09 GB free" in line and "7e-09 GB" in line and "--mg-save-dir" in line
    os.makedirs(files.iteration_dir(conversion.converted_to(args), 1))
    assert list(conversion.problems(args)) == [], "it writes over what it wrote before"


def resumable(args, reference):
    """Make --save hold an RL checkpoint with this reference."""
    files.write_state(args.save, 2, {"reference": {"path": reference, "digest": "x"}, "loop": {}})
    with open(os.path.join(args.save, files.TRACKER), "w") as tracker:
        tracker.write("2")


def test_a_resume_converts_only_what_its_reference_needs(args, tmp_path):
    assert conversion.needless(args) is None, "a first start"
    converted = files.iteration_dir(conversion.converted_to(args), 1)
    resumable(args, converted)
    assert decide(args).kind == "resume"
    assert conversion.needless(args) is None, "the reference is gone"
    os.makedirs(converted)
    assert "is not converted" in conversion.needless(args)
    resumable(args, str(tmp_path / "another" / "iter_0000001"))
    assert "is not converted" in conversion.needless(args), "converting would not make it again"
    resumable(args, None)
    assert "is not converted" in conversion.needless(args)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 128}))
    assert list(conversion.problems(args)) == [], "of a resume it does not matter"


def test_the_hook_converts_once_or_not_at_all_and_says_which_model_it_could_not(args, capsys):
    calls = []
    launch.convert_weights(args, lambda *given: calls.append(given), (args, True), {})
    assert calls == [(args, True)] and f"converts --load {args.load} to" in capsys.readouterr().out

    def fail(*given):
        raise KeyError("model.layers.0.mlp")

    with pytest.raises(ValueError, match=f"could not convert --load {args.load}: KeyError.*model.layers.0.mlp"):
        launch.convert_weights(args, fail, (args, True), {})
    resumable(args, None)
    assert launch.convert_weights(args, fail, (args, True), {}) is None
    assert "is not converted" in capsys.readouterr().out


def test_what_should_be_known_is_said(args):
    vars(args).update(distributed_timeout_minutes=10, ckpt_format="torch", **NEW)
    assert ["--distributed-timeout-minutes 10" in line for line in conversion.notes(args)] == [True]
    args.enable_hf2mg_convert, args.enable_mg2hf_convert = False, True
    (line,) = conversion.notes(args)
    assert "--only-convert-last-checkpoint" in line
    args.ckpt_format = "torch_dist"
    (line,) = conversion.notes(args)
    assert "--ckpt-format torch_dist" in line
