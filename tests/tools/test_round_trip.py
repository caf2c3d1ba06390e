"""Hugging Face to Megatron and back, bitwise, for every family, layout and storage; and what is refused."""

import argparse
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_rl_plugin.engine.hf_config import compare_configs
from mindspeed_rl_plugin.launch import pickles
from mindspeed_rl_plugin.reshard.layout import ModelShape, Parallel, canonical_tensors
from mindspeed_rl_plugin.tools.convert import to_hf, to_megatron
from mindspeed_rl_plugin.tools.convert.checkpoint import FILE, Checkpoint, rank_folder
from mindspeed_rl_plugin.tools.convert.files import write_shards

SIZES = dict(vocab_size=250, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
DENSE = SIZES | dict(num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6, rope_theta=10000.0)
MOE = dict(moe_intermediate_size=24, num_experts_per_tok=2)
CONFIGS = {
    "llama": DENSE
    | dict(
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        max_position_embeddings=64,
    ),
    "qwen2": DENSE | dict(tie_word_embeddings=True, max_position_embeddings=64),
    "qwen3": DENSE | dict(tie_word_embeddings=False, max_position_embeddings=64, head_dim=16),
    "qwen3_moe": DENSE | MOE | dict(num_experts=4, mlp_only_layers=[1], max_position_embeddings=64),
    "deepseek_v3": SIZES
    | dict(max_position_embeddings=64)
    | MOE
    | dict(n_routed_experts=4, n_shared_experts=2, first_k_dense_replace=1, q_lora_rank=12, kv_lora_rank=10)
    | dict(qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8, rms_norm_eps=1e-6, rope_theta=10000.0),
}


IMPORT = to_megatron.main


def make_model(directory: Path, family: str, dtype=torch.bfloat16, **changes) -> dict[str, torch.Tensor]:
    """A random model of a family in two files; returns its tensors."""
    directory.mkdir()
    config = {"model_type": family, **CONFIGS[family], **changes}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = canonical_tensors(ModelShape.from_hf_config(config))
    weights = {n: torch.randn(t.shape).to(torch.float32 if t.wide else dtype) for n, t in tensors.items()}
    names = sorted(weights)
    for i in range(2):
        save_file({n: weights[n] for n in names[i::2]}, directory / f"model-0000{i + 1}-of-00002.safetensors")
    return weights


@pytest.mark.parametrize(
    "family, train, more",
    [
        ("llama", "tp2,pp3", []),
        ("qwen2", "tp2,pp3", ["--pad", "8"]),  # the last stage has a copy of the embedding
        ("qwen2", "tp2", ["--impl", "te"]),
        ("qwen3", "pp3", ["--impl", "te"]),
        ("qwen3", "tp4,pp2,first1", []),
        ("qwen3_moe", "tp2,ep2,etp1", ["--experts", "grouped"]),
        ("qwen3_moe", "pp3,ep4", ["--experts", "te_grouped", "--impl", "te"]),
        ("deepseek_v3", "tp2,pp3,ep2,etp2", []),
        ("deepseek_v3", "tp2,ep2,etp1", ["--impl", "mindspeed", "--experts", "grouped"]),
        ("deepseek_v3", "tp2,ep2,etp1", ["--impl", "te", "--experts", "te_grouped"]),
    ],
)
def test_round_trip(family, train, more, tmp_path, capsys):
    weights = make_model(tmp_path / "hf", family)
    ckpt, back = tmp_path / "ckpt", tmp_path / "back"
    assert to_megatron.main(["--load", str(tmp_path / "hf"), "--out", str(ckpt), "--train", train, *more]) == 0
    assert to_hf.main(["--load", str(ckpt), "--out", str(back), "--shard-gb", "3e-5"]) == 0, capsys.readouterr()
    files = sorted(back.glob("*.safetensors"))
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert len(files) > 1 and {f.name for f in files} == set(index["weight_map"].values())
    found = {name: t for file in files for name, t in load_file(file).items()}
    assert found.keys() == weights.keys() == index["weight_map"].keys()
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    derived = json.loads((back / "config.json").read_text())
    given = {"model_type": family, **CONFIGS[family]}
    assert ModelShape.from_hf_config(derived) == ModelShape.from_hf_config(given)
    assert compare_configs(derived, given) == []
    assert derived.get("rope_scaling") == CONFIGS[family].get("rope_scaling")


def test_dtypes_and_a_single_file(tmp_path):
    weights = make_model(tmp_path / "hf", "deepseek_v3", torch.float32)
    load = ["--load", str(tmp_path / "hf"), "--out", str(tmp_path / "ckpt"), "--train", "tp2", "--dtype", "bf16"]
    assert to_megatron.main(load) == 0
    out = ["--load", str(tmp_path / "ckpt"), "--out", str(tmp_path / "out"), "--config", str(tmp_path / "hf")]
    assert to_hf.main([*out, "--dtype", "fp32"]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(found[bias], weights[bias])  # stays float32 all the way
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert found[name].dtype == torch.float32 and torch.equal(found[name], weights[name].bfloat16().float())


def test_only_what_was_asked_for_is_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "went-off",))

    torch.save({"args": argparse.Namespace(x=Bomb(), y=torch.float16), "t": torch.ones(2)}, tmp_path / "x.pt")
    found = pickles.load(tmp_path / "x.pt")
    assert not (tmp_path / "went-off").exists()
    assert isinstance(found["args"].x, pickles.Inert) and found["args"].y == torch.float16
    assert torch.equal(found["t"], torch.ones(2))
    (tmp_path / "cut.pt").write_bytes((tmp_path / "x.pt").read_bytes()[:200])
    with pytest.raises(ValueError, match="cut.pt is no file of torch.save, or is cut short"):
        pickles.load(tmp_path / "cut.pt")
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"model": 1}))
    with pytest.raises(ValueError, match="old.pt is no file of torch.save"):
        pickles.load(tmp_path / "old.pt")


def change(ckpt: Path, folder: str, edit) -> None:
    """Edit one file of a checkpoint."""
    path = ckpt / "release" / folder / FILE
    state = torch.load(path, weights_only=False)
    edit(state)
    torch.save(state, path)


def expect(argv, message, capsys, main=to_hf.main):
    assert main([str(a) for a in argv]) == 1
    assert message in capsys.readouterr().err


def test_damaged_checkpoints_are_named(tmp_path, capsys):
    make_model(tmp_path / "hf", "qwen3")
    ckpt, out = tmp_path / "ckpt", tmp_path / "out"
    assert to_megatron.main(["--load", str(tmp_path / "hf"), "--out", str(ckpt), "--train", "tp2,pp3"]) == 0
    export = ["--load", ckpt, "--out", out]

    norm = "decoder.layers.0.input_layernorm.weight"
    change(ckpt, "mp_rank_01_002", lambda s: s["model"][norm].add_(1))
    message = "model.layers.2.input_layernorm.weight [0, 32): mp_rank_00_002 and mp_rank_01_002 store different values"
    expect(export, message, capsys)
    for file in out.glob("*"):
        file.unlink()
    change(ckpt, "mp_rank_01_002", lambda s: s["model"].pop(norm))
    expect(export, f"mp_rank_01_002 is not what its arguments say:\n  {norm} (32,) is missing", capsys)
    change(ckpt, "mp_rank_00_000", lambda s: s.pop("model"))
    expect(export, "mp_rank_00_000/model_optim_rng.pt holds no state of the model", capsys)
    (ckpt / "release" / "mp_rank_00_000" / FILE).unlink()
    expect(export, "mp_rank_00_000/model_optim_rng.pt is missing; the checkpoint was saved by 6 ranks", capsys)
    change(ckpt, "mp_rank_00_001", lambda s: s.pop("args"))
    expect(export, "was saved without Megatron's arguments", capsys)
    expect(["--load", tmp_path / "hf", "--out", out], "there is no latest_checkpointed_iteration.txt", capsys)
    (ckpt / "iter_0000007").mkdir()
    expect([*export, "--iteration", 7], "only checkpoints of --ckpt-format torch can be exported", capsys)
    expect(["--load", ckpt / "no", "--out", out], "is no directory", capsys)
    out.mkdir(exist_ok=True)
    (out / "x").touch()
    expect(export, "is not empty; nothing is overwritten", capsys)


def test_damaged_models_are_named(tmp_path, capsys):
    weights = make_model(tmp_path / "hf", "qwen3")
    argv = ["--load", tmp_path / "hf", "--out", tmp_path / "ckpt"]
    expect([*argv, "--train", "tp2,dp2"], "leave dp2 out; data parallel ranks load the same files", capsys, IMPORT)
    expect([*argv, "--train", "tp3"], "do not divide over 3 tensor parallel ranks", capsys, to_megatron.main)
    for file in (tmp_path / "hf").glob("*.safetensors"):
        file.unlink()
    expect([*argv, "--train", "tp1"], "holds no *.safetensors", capsys, to_megatron.main)
    del weights["model.norm.weight"]
    weights["lm_head.weight"] = weights["lm_head.weight"][:3].clone()
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    assert to_megatron.main([*map(str, argv), "--train", "tp1"]) == 1
    err = capsys.readouterr().err
    assert "model.norm.weight (32,) is missing" in err and "lm_head.weight has shape (3, 32), not (250, 32)" in err
    save_file(weights | {"x.weight_scale_inv": torch.ones(1)}, tmp_path / "hf" / "model.safetensors")
    expect([*argv, "--train", "tp1"], "quantised (x.weight_scale_inv)", capsys, to_megatron.main)


def test_experts_in_more_shares_than_files_are_refused(tmp_path, capsys):
    """Ranks of one tensor, pipeline and expert parallel rank share a file: half of every expert would be lost."""
    make_model(tmp_path / "hf", "qwen3_moe")
    argv = ["--load", tmp_path / "hf", "--out", tmp_path / "ckpt"]
    message = "ranks 0 and 1 have different weights and the same file mp_rank_00/model_optim_rng.pt"
    expect([*argv, "--train", "tp1,etp2"], message, capsys, to_megatron.main)
    assert not (tmp_path / "ckpt").exists()
    message = "the same file mp_rank_00_000_000/"
    expect([*argv, "--train", "tp1,ep2,etp2,pp2,first1"], message, capsys, to_megatron.main)
    make_model(tmp_path / "dense", "qwen3")  # which has no experts to cut
    argv = ["--load", tmp_path / "dense", "--out", tmp_path / "ok", "--train", "tp1,etp2"]
    assert to_megatron.main([str(a) for a in argv]) == 0


@pytest.mark.parametrize(
    "family, changes, extra, message",
    [
        ("llama", {"attention_bias": True}, [], "attention_bias: Megatron False, Hugging Face True"),
        ("llama", {}, ["model.layers.0.self_attn.q_proj.bias"], "self_attn.q_proj.bias is not of this model"),
        ("llama", {"hidden_act": "gelu"}, [], "hidden_act: Megatron 'silu', Hugging Face 'gelu'"),
        ("llama", {"mlp_bias": True}, [], "mlp_bias: Megatron False, Hugging Face True"),
        ("qwen2", {"use_sliding_window": True}, [], "use_sliding_window: Megatron False, Hugging Face True"),
        ("qwen2", {}, ["lm_head.weight"], "lm_head.weight is not model.embed_tokens.weight, to which"),
        ("qwen3", {}, ["model.layers.2.mlp.gate.weight"], "model.layers.2.mlp.gate.weight is not of this model"),
        ("qwen2", {}, ["model.layers.9.mlp.up_proj.weight"], "model.layers.9.mlp.up_proj.weight is of a layer that"),
        ("qwen3", {"num_nextn_predict_layers": 1}, ["model.layers.3.x"], "num_hidden_layers is 3\n"),
        ("deepseek_v3", {}, ["model.layers.3.x"], "is 3 and no such layer in num_nextn_predict_layers"),
        ("deepseek_v3", {"num_nextn_predict_layers": 1}, ["model.layers.4.x"], "model.layers.4.x is of a layer that"),
    ],
)
def test_another_model_is_not_imported(family, changes, extra, message, tmp_path, capsys):
    """What Megatron's arguments cannot say, and tensors that would be dropped."""
    weights = make_model(tmp_path / "hf", family, **changes)
    for name in extra:
        shape = weights["model.embed_tokens.weight"].shape if name == "lm_head.weight" else (2,)
        save_file({name: torch.ones(shape)}, tmp_path / "hf" / f"{name}.safetensors")
    argv = ["--load", str(tmp_path / "hf"), "--out", str(tmp_path / "ckpt"), "--train", "tp2"]
    expect(argv, message, capsys, to_megatron.main)
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.parametrize(("model", "more"), [("qwen3", {}), ("deepseek_v3", {"num_nextn_predict_layers": 1})])
def test_fewer_layers_than_the_files_hold_are_refused(tmp_path, capsys, model, more):
    """A plain layer does not pass for a predicting one either."""
    make_model(tmp_path / "hf", model, **more)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    argv = ["--load", tmp_path / "hf", "--out", tmp_path / "ckpt", "--train", "tp1"]
    expect(argv, "model.layers.2.input_layernorm.weight is of a layer that config.json has not", capsys, IMPORT)


def test_what_is_left_out_is_said(tmp_path, capsys):
    """Predicting layers that config.json declares, and frequencies that old files keep."""
    make_model(tmp_path / "hf", "deepseek_v3", num_nextn_predict_layers=1)
    names = ("model.layers.3.eh_proj.weight", "model.layers.3.enorm.weight", "model.layers.0.rotary_emb.inv_freq")
    save_file({name: torch.ones(2) for name in names}, tmp_path / "hf" / "more.safetensors")
    argv = ["--load", str(tmp_path / "hf"), "--out", str(tmp_path / "ckpt"), "--train", "tp2"]
    assert to_megatron.main(argv) == 0
    out = capsys.readouterr().out
    assert f"note: left out: {names[2]}\n" in out
    assert "note: left out: model.layers.3, which predicts further tokens: 2 tensors\n" in out


def test_layouts_that_megatron_does_not_build_are_refused(tmp_path, capsys):
    """4 heads in 2 query groups: no rank may have half a head; more ranks than groups are a matter of the version."""
    make_model(tmp_path / "hf", "qwen3", tie_word_embeddings=True)
    argv = ["--load", tmp_path / "hf", "--out", tmp_path / "ckpt", "--train"]
    expect([*argv, "tp8"], "--train tp8: attention heads of 4 do not divide over 8 tensor", capsys, IMPORT)
    expect([*argv, "tp1,ep2"], "--train tp1,ep2: family qwen3 has no experts that ep2 could spread", capsys, IMPORT)
    assert IMPORT([*map(str, argv), "tp4"]) == 0
    assert "2 query groups are fewer than tp4: Megatron core 0.12 and MindSpeed refuse" in capsys.readouterr().out
    make_model(tmp_path / "6", "qwen3", num_attention_heads=12, num_key_value_heads=4)
    argv = ["--load", tmp_path / "6", "--out", tmp_path / "6c", "--train", "tp6"]
    expect(argv, "query groups of 4 do not divide over 6 tensor parallel ranks", capsys, IMPORT)
    make_model(tmp_path / "latent", "deepseek_v3")
    argv = ["--load", tmp_path / "latent", "--out", tmp_path / "lc", "--train", "tp8"]
    expect(argv, "attention heads of 4 do not divide over 8", capsys, IMPORT)


def test_a_head_that_repeats_the_tied_embedding_is_imported(tmp_path):
    weights = make_model(tmp_path / "hf", "qwen2")
    head = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(head, tmp_path / "hf" / "head.safetensors")
    assert to_megatron.main(["--load", str(tmp_path / "hf"), "--out", str(tmp_path / "c"), "--train", "tp1"]) == 0


@pytest.mark.parametrize("train, last", [("pp3", "mp_rank_00_002"), ("tp1", "mp_rank_00")])
def test_predicting_layers_are_not_exported(train, last, tmp_path, capsys):
    """They stand on the last stage, which has a copy of the embedding for them; the first stage's is the model's."""
    weights = make_model(tmp_path / "hf", "deepseek_v3")
    ckpt, back = tmp_path / "ckpt", tmp_path / "back"
    assert to_megatron.main(["--load", str(tmp_path / "hf"), "--out", str(ckpt), "--train", train]) == 0

    def predict(state):
        state["model"]["mtp.layers.0.enorm.weight"] = torch.ones(32)
        state["model"].setdefault("embedding.word_embeddings.weight", torch.ones(256, 32))

    change(ckpt, last, predict)
    assert to_hf.main(["--load", str(ckpt), "--out", str(back)]) == 0, capsys.readouterr()
    found = load_file(back / "model.safetensors")
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


def test_files_of_experts_over_tensor_parallel_ranks_have_mindspeeds_names(tmp_path, capsys):
    """With --moe-tp-extend-ep a file is named by Megatron's own expert parallel rank, and that may be none."""

    def spread(world, tp, ep):
        return Parallel(world, tp=tp, ep=tp * ep, etp=1, tp_in_ep=True)

    names = [[rank_folder(p, r) for r in range(p.world)] for p in (spread(4, 2, 2), spread(4, 2, 1))]
    assert names[0] == ["mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001"]
    assert names[1] == ["mp_rank_00", "mp_rank_01"] * 2
    weights = make_model(tmp_path / "hf", "qwen3_moe")
    ckpt, back = tmp_path / "ckpt", tmp_path / "back"
    argv = ["--load", str(tmp_path / "hf"), "--out", str(ckpt), "--train", "tp2,ep4,etp1", "--experts", "grouped"]
    assert to_megatron.main(argv) == 0

    def as_mindspeed(state):
        args = state["args"]
        args.moe_tp_extend_ep, args.expert_model_parallel_size, args.expert_tensor_parallel_size = True, 2, None
        args.moe_token_dispatcher_type = "alltoall_seq"

    for rank, name in enumerate(names[0]):
        old = f"mp_rank_{rank % 2:02d}_{rank:03d}"
        change(ckpt, old, as_mindspeed)
        (ckpt / "release" / old).rename(ckpt / "release" / f"{name}.new")
    for name in names[0]:
        (ckpt / "release" / f"{name}.new").rename(ckpt / "release" / name)
    assert to_hf.main(["--load", str(ckpt), "--out", str(back)]) == 0, capsys.readouterr()
    found = load_file(back / "model.safetensors")
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


def test_a_wrong_config_is_refused(tmp_path, capsys):
    make_model(tmp_path / "hf", "qwen3_moe")
    ckpt = tmp_path / "ckpt"
    assert to_megatron.main(["--load", str(tmp_path / "hf"), "--out", str(ckpt), "--train", "tp1"]) == 0
    change(ckpt, "mp_rank_00", lambda s: s["args"].__delattr__("moe_router_topk"))
    expect(["--load", ckpt, "--out", tmp_path / "out"], "--moe-router-topk is not given", capsys)
    make_model(tmp_path / "other", "qwen3_moe", mlp_only_layers=[2])
    argv = ["--load", ckpt, "--out", tmp_path / "out", "--config", tmp_path / "other"]
    message = "other describes another model:\n  dense_layers: config.json (2,), checkpoint (1,)\n"
    assert to_hf.main([str(a) for a in argv]) == 1 and capsys.readouterr().err.endswith(message)


def test_the_layout_comes_from_the_saved_arguments(tmp_path):
    make_model(tmp_path / "hf", "qwen3")
    argv = ["--load", str(tmp_path / "hf"), "--out", str(tmp_path / "ckpt"), "--train", "tp4,pp2,last1"]
    assert to_megatron.main(argv) == 0
    parallel = Checkpoint(tmp_path / "ckpt").parallel
    assert (parallel.tp, parallel.pp, parallel.world, parallel.chunk_sizes(3)) == (4, 2, 8, (2, 1))


def test_shards_hold_at_most_the_limit(tmp_path):
    sizes, made = {"a": 40, "b": 40, "c": 8, "d": 200, "e": 4}, []

    def make(name):
        made.append(name)
        return torch.zeros(sizes[name] // 4)

    assert write_shards(tmp_path, sizes, make, 88) == (3, 292)
    held = sorted(sorted(load_file(f)) for f in tmp_path.glob("*.safetensors"))
    assert held == [["a", "b", "c"], ["d"], ["e"]] and sorted(made) == list("abcde")
    (tmp_path / "usual").touch()
    assert {f.stat().st_mode for f in tmp_path.iterdir()} == {(tmp_path / "usual").stat().st_mode}, "the umask's"
