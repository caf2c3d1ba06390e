"""Hugging Face to Megatron and back, bitwise, for every family, layout and storage; and what is refused."""

import argparse
import json
import pickle
from pathlib import Path
from shutil import rmtree

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mindspeed_rl_plugin.checkpoints import pickles
from mindspeed_rl_plugin.checkpoints.dist_files import DistFiles, StoredTensor
from mindspeed_rl_plugin.engine.hf_config import compare_configs
from mindspeed_rl_plugin.layout.layout import ModelShape, Parallel
from mindspeed_rl_plugin.tools.convert.checkpoint import MODEL_FILE, rank_folder
from mindspeed_rl_plugin.tools.convert.files import write_shards


def same(tensors, weights):
    """Whether all tensors are bitwise equal."""
    equal = (tensors[name].dtype == t.dtype and torch.equal(tensors[name], t) for name, t in weights.items())
    return tensors.keys() == weights.keys() and all(equal)


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
        ("deepseek_v3", "tp2,pp3", ["--impl", "mindspeed_split", "--experts", "grouped"]),
        ("kimi_k2", "tp2,ep2,etp1", ["--impl", "mindspeed_split"]),
        ("deepseek_v2", "tp2,ep2,etp1", []),
        ("deepseek_v2", "tp1,ep2", ["--impl", "mindspeed", "--experts", "grouped"]),
        ("deepseek_v2_236b", "tp2,ep2,etp1", ["--impl", "mindspeed"]),
        ("mistral", "tp2,pp3", []),
        ("seed_oss", "tp2", ["--impl", "mindspeed"]),
        ("mixtral", "tp2,ep2", ["--experts", "te_grouped", "--impl", "te"]),
        ("qwen2_moe", "tp2,ep2,etp1", ["--experts", "grouped"]),
        ("glm4_moe", "tp2,pp3,ep2,etp2", ["--impl", "mindspeed"]),
        ("glm4_moe_355b", "tp2,ep2,etp1", ["--impl", "mindspeed"]),
        ("bailing_moe", "tp4,ep4,etp1", ["--impl", "mindspeed", "--experts", "grouped"]),
    ],
)
def test_round_trip(family, train, more, convert):
    weights = convert.make(family)
    convert.imported(train, *more)
    assert same(convert.exported("--shard-gb", "3e-5"), weights)
    index = json.loads((convert.back / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file.name for file in convert.back.glob("*.safetensors")}
    assert len(files) > 1 and files == set(index.values()) and index.keys() == weights.keys()
    given, derived = (json.loads((at / "config.json").read_text()) for at in (convert.hf, convert.back))
    assert ModelShape.from_hf_config(derived) == ModelShape.from_hf_config(given)
    assert compare_configs(derived, given) == []
    assert derived.get("rope_scaling") == given.get("rope_scaling")


def test_round_trip_as_dualpipev_places_layers(convert):
    """Layers from both ends of the model in each file, the head in the first."""
    weights = convert.make("qwen3", num_hidden_layers=4)
    convert.imported("tp2,pp2", "--schedules-method", "dualpipev")
    first = torch.load(next(convert.ckpt.glob("release/mp_rank_00_000/*.pt")), weights_only=False)
    assert first["args"].schedules_method == "dualpipev" and not first["args"].virtual_pipeline_model_parallel_size
    assert "embedding.word_embeddings.weight" in first["model0"] and "output_layer.weight" in first["model1"]
    assert same(convert.exported(), weights)


@pytest.mark.parametrize(
    "family, numbered", [("qwen2", False), ("qwen3", True), ("qwen3_moe", True), ("deepseek_v3", True)]
)
def test_distributed_checkpoints_are_exported(family, numbered, convert):
    weights = convert.make(family)
    convert.imported("tp1", "--impl", "te")
    folder = convert.distributed(numbered)
    assert same(convert.exported(), weights)
    rmtree(convert.back)
    part = sorted(folder.glob("*.distcp"))[0]
    part.write_bytes(part.read_bytes()[:-200])
    convert.exported(refused=f"{part} is missing or cut short")
    (folder / ".metadata").write_bytes(b"x")
    convert.exported(refused=f"{folder / '.metadata'} is no index")


def test_a_tensor_is_read_out_of_the_boxes_that_hold_it(tmp_path):
    """Stored in two files of two tensor parallel ranks, one layer each: asked for a layer, both have a part of it."""
    whole = torch.arange(2 * 4 * 3).view(2, 4, 3)
    boxes = {
        (layer, 2 * rank, 0): whole[layer : layer + 1, 2 * rank : 2 * rank + 2] for rank in (0, 1) for layer in (0, 1)
    }
    sizes = {"w": ([2, 4, 3], [(at, (1, 2, 3)) for at in boxes]), "n": ([], [((), ())])}  # "n" is a scalar
    tensors = {
        name: TensorStorageMetadata(
            TensorProperties(whole.dtype),
            torch.Size(size),
            [ChunkStorageMetadata(torch.Size(at), torch.Size(n)) for at, n in chunks],
        )
        for name, (size, chunks) in sizes.items()
    }
    entries = [MetadataIndex(name, torch.Size(at)) for name, (_, chunks) in sizes.items() for at, _ in chunks]
    places = {entry: _StorageInfo(str(number), 0, 0) for number, entry in enumerate(entries)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, storage_data=places)))
    files = DistFiles(tmp_path)
    assert [len([*files.boxes(name, box)]) for name, box in (("w", ((0, 2), (0, 4), (0, 3))), ("n", ()))] == [4, 1]
    files.load = lambda at: boxes[tuple(entries[int(at.relative_path)].offset)].clone()
    stored = StoredTensor(files, "w", ((1, 2), (0, 4), (0, 3)), (4, 3), whole.dtype)
    assert torch.equal(stored.read(), whole[1])
    files._boxes["w"][1, 2].pop()
    with pytest.raises(ValueError, match="w: 6 numbers are missing"):
        stored.read()


def test_dtypes_and_a_single_file(convert):
    weights = convert.make("deepseek_v3", torch.float32)
    convert.imported("tp2", "--dtype", "bf16")
    exported = convert.exported("--config", convert.hf, "--dtype", "fp32")
    assert [file.name for file in convert.back.glob("*.safetensors")] == ["model.safetensors"]
    wide = "e_score_correction_bias"  # stays float32 all the way
    assert same(exported, {n: t if n.endswith(wide) else t.bfloat16().float() for n, t in weights.items()})


def test_only_what_was_asked_for_is_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "went-off",))

    torch.save({"args": argparse.Namespace(x=Bomb(), y=torch.float16), "t": torch.ones(2)}, tmp_path / "x.pt")
    content = pickles.load(tmp_path / "x.pt")
    assert not (tmp_path / "went-off").exists()
    assert isinstance(content["args"].x, pickles.Inert) and content["args"].y == torch.float16
    assert torch.equal(content["t"], torch.ones(2))
    (tmp_path / "cut.pt").write_bytes((tmp_path / "x.pt").read_bytes()[:200])
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"model": 1}))
    for name in ("cut.pt", "old.pt"):
        with pytest.raises(ValueError, match=f"{name} .* torch.save"):
            pickles.load(tmp_path / name)


def test_damaged_checkpoints_are_named(convert, tmp_path):
    convert.make("qwen3")
    convert.imported("tp2,pp3")
    norm = "decoder.layers.0.input_layernorm.weight"
    convert.change("mp_rank_01_002", lambda s: s["model"][norm].add_(1))
    differ = "model.layers.2.input_layernorm.weight [0, 32): mp_rank_00_002 and mp_rank_01_002 store different values"
    convert.exported(refused=differ)
    for file in convert.back.glob("*"):
        file.unlink()
    convert.change("mp_rank_01_002", lambda s: s["model"].pop(norm))
    missing = f"mp_rank_01_002 does not hold the tensors that its arguments describe:\n  {norm} (32,) is missing"
    convert.exported(refused=missing)
    convert.change("mp_rank_00_000", lambda s: s.pop("model"))
    convert.exported(refused="mp_rank_00_000/model_optim_rng.pt does not hold")
    (convert.ckpt / "release" / "mp_rank_00_000" / MODEL_FILE).unlink()
    convert.exported(refused="mp_rank_00_000/model_optim_rng.pt is missing")
    convert.change("mp_rank_00_001", lambda s: s.pop("args"))
    convert.exported(refused="has no arguments of Megatron")
    (convert.ckpt / "iter_0000007").mkdir()
    convert.exported("--iteration", 7, refused=".metadata: only checkpoints of --ckpt-format")
    convert.exported("--iteration", 3, refused=f"iter_0000003; iterations in {convert.ckpt}: release")
    convert.exported("--load", convert.hf, refused="there is no latest_checkpointed_iteration.txt")
    convert.exported("--load", tmp_path / "no", refused="is no directory")
    assert not convert.back.exists(), "what is refused leaves no folder"
    convert.back.mkdir()
    (convert.back / "x").touch()
    convert.exported(refused="is not empty; remove it")


def test_damaged_models_are_named(convert):
    weights = convert.make("qwen3")
    for file in convert.hf.glob("*.safetensors"):
        file.unlink()
    convert.imported("tp1", refused="holds no *.safetensors")
    del weights["model.norm.weight"]
    weights["lm_head.weight"] = weights["lm_head.weight"][:3].clone()
    save_file(weights, convert.hf / "model.safetensors")
    said = convert.imported("tp1", refused="model.norm.weight (32,) is missing")
    assert "lm_head.weight has shape (3, 32), not (250, 32)" in said
    save_file(weights | {"x.weight_scale_inv": torch.ones(1)}, convert.hf / "model.safetensors")
    convert.imported("tp1", refused="quantised (x.weight_scale_inv)")


# Family, what config.json says besides, a tensor besides, --train, why.
REFUSED = [
    # What Megatron's arguments cannot say, and tensors that would be dropped.
    ("llama", {"attention_bias": True}, "", "tp2", "attention_bias: Megatron False, Hugging Face True"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "", "tp2", "rope_scaling: Megatron {"),
    ("llama", {}, "model.layers.0.self_attn.q_proj.bias", "tp2", "self_attn.q_proj.bias does not belong to this"),
    ("llama", {"hidden_act": "gelu"}, "", "tp2", "hidden_act: Megatron 'silu', Hugging Face 'gelu'"),
    ("llama", {"mlp_bias": True}, "", "tp2", "mlp_bias: Megatron False, Hugging Face True"),
    ("qwen2", {"use_sliding_window": True}, "", "tp2", "use_sliding_window: Megatron False, Hugging Face True"),
    ("qwen2", {}, "lm_head.weight", "tp2", "lm_head.weight and model.embed_tokens.weight differ"),
    ("qwen3", {}, "model.layers.2.mlp.gate.weight", "tp2", "2.mlp.gate.weight does not belong to this model"),
    ("deepseek_v3", {"norm_topk_prob": False}, "", "tp2", "norm_topk_prob: Megatron True, Hugging Face False"),
    # Fewer layers than the files hold; a plain one does not pass for one of multi-token prediction.
    ("qwen2", {}, "model.layers.9.mlp.up_proj.weight", "tp2", "9.mlp.up_proj.weight belongs to no layer of"),
    ("qwen3", {"num_nextn_predict_layers": 1}, "model.layers.3.x", "tp2", "num_hidden_layers is 3\n"),
    ("deepseek_v3", {}, "model.layers.3.x", "tp2", "is 3, and num_nextn_predict_layers is 0"),
    ("deepseek_v3", {"num_nextn_predict_layers": 1}, "model.layers.4.x", "tp2", "model.layers.4.x belongs to no layer"),
    # 4 heads in 2 query groups: no rank may have half a head; more ranks than groups are a matter of the version.
    ("qwen3", {}, "", "tp8", "--train tp8: attention heads of 4 do not divide over 8 tensor"),
    ("qwen3", {}, "", "tp3", "do not divide over 3 tensor parallel ranks"),
    ("qwen3", {}, "", "tp2,dp2", "leave dp2 out"),
    ("qwen3", {}, "", "tp1,ep2", "--train tp1,ep2: leave ep2 out; a model of family qwen3 has no experts"),
    ("qwen3", {"num_attention_heads": 12, "num_key_value_heads": 4}, "", "tp6", "groups of 4 do not divide over 6"),
    # Ranks of one tensor, pipeline and expert parallel rank share a file: half of every expert would be lost.
    ("qwen3_moe", {}, "", "tp1,etp2", "ranks 0 and 1 have different weights and the same file mp_rank_00/model_optim"),
    ("qwen3_moe", {}, "", "tp1,ep2,etp2,pp2,first1", "the same file mp_rank_00_000_000/"),
    ("qwen3", {}, "", "tp1 --noop-layers 0,5", "--noop-layers 0,5: give numbers from 0 to 4"),
]


@pytest.mark.parametrize("family, changes, extra, train, message", REFUSED)
def test_what_would_not_be_the_model_is_not_imported(family, changes, extra, train, message, convert):
    weights = convert.make(family, **changes)
    if extra:
        shape = weights["model.embed_tokens.weight"].shape if extra == "lm_head.weight" else (2,)
        save_file({extra: torch.ones(shape)}, convert.hf / f"{extra}.safetensors")
    convert.imported(*train.split(), refused=message)
    assert not convert.ckpt.exists()


def test_what_is_left_out_is_said(convert):
    """Layers for multi-token prediction that config.json declares, and frequencies that old files keep."""
    convert.make("deepseek_v3", num_nextn_predict_layers=1)
    names = ("model.layers.3.eh_proj.weight", "model.layers.3.enorm.weight", "model.layers.0.rotary_emb.inv_freq")
    save_file({name: torch.ones(2) for name in names}, convert.hf / "more.safetensors")
    said = convert.imported("tp2")
    assert f"note: left out: {names[2]}\n" in said
    assert "note: left out: model.layers.3, a layer for multi-token prediction: 2 tensors\n" in said


def test_layouts_that_only_some_versions_build_and_a_head_that_repeats_the_tied_embedding(convert):
    weights = convert.make("qwen2")  # which has no experts to cut
    save_file({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, convert.hf / "head.safetensors")
    said = convert.imported("tp4,etp2")
    assert "2 query groups are fewer than tp4: Megatron core 0.12 and MindSpeed do not accept" in said


@pytest.mark.parametrize("train, last, moved", [("pp3", "mp_rank_00_002", True), ("tp1", "mp_rank_00", False)])
def test_mtp_layers_are_not_exported(train, last, moved, convert):
    """They stand on the last stage, which has a copy of the embedding for them; the first stage's is the model's."""
    weights = convert.make("deepseek_v3")
    convert.imported(train)

    def predict(state):
        state["model"]["mtp.layers.0.enorm.weight"] = torch.ones(32)
        if moved:  # as MindSpeed-LLM stores the last norm then
            state["model"]["final_layernorm.weight"] = state["model"].pop("decoder.final_layernorm.weight")
        state["model"].setdefault("embedding.word_embeddings.weight", torch.ones(256, 32))

    convert.change(last, predict)
    assert same(convert.exported(), weights)


def test_layers_that_do_nothing_are_counted_by_megatron_alone(convert):
    """--noop-layers 0,3: the model's three layers, of which the second is dense, are Megatron's 1, 2 and 4."""
    weights = convert.make("qwen3_moe")
    said = convert.imported("pp2,last2", "--noop-layers", "0,3")
    for flags in ("--num-layers 5 ", "--noop-layers 0,3 ", "--moe-layer-freq '[1,1,0,1,1]' "):
        assert flags in said
    names = torch.load(convert.ckpt / "release" / "mp_rank_00_001" / MODEL_FILE, weights_only=False)["model"]
    assert {name.split(".")[2] for name in names if name.startswith("decoder.layers")} == {"1"}, "of layers 3 and 4"
    assert same(convert.exported(), weights)


def test_files_of_experts_over_tensor_parallel_ranks_have_mindspeeds_names(convert):
    """With --moe-tp-extend-ep a file is named by Megatron's own expert parallel rank, and that may be none."""

    def spread(world, tp, ep):
        return Parallel(world, tp=tp, ep=tp * ep, etp=1, tp_in_ep=True)

    names = [[rank_folder(p, r) for r in range(p.world)] for p in (spread(4, 2, 2), spread(4, 2, 1))]
    assert names[0] == ["mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001"]
    assert names[1] == ["mp_rank_00", "mp_rank_01"] * 2
    weights, release = convert.make("qwen3_moe"), convert.ckpt / "release"
    convert.imported("tp2,ep4,etp1", "--experts", "grouped")

    def as_mindspeed(state):
        args = state["args"]
        args.moe_tp_extend_ep, args.expert_model_parallel_size, args.expert_tensor_parallel_size = True, 2, None
        args.moe_token_dispatcher_type = "alltoall_seq"

    for rank, name in enumerate(names[0]):
        old = f"mp_rank_{rank % 2:02d}_{rank:03d}"
        convert.change(old, as_mindspeed)
        (release / old).rename(release / f"{name}.new")
    for name in names[0]:
        (release / f"{name}.new").rename(release / name)
    assert same(convert.exported(), weights)


def test_a_wrong_config_is_refused(convert):
    convert.make("qwen3_moe")
    convert.imported("tp1")
    convert.make("qwen3_moe", mlp_only_layers=[2])
    message = f"--config {convert.hf} describes another model:\n  dense_layers: config.json (2,), checkpoint (1,)\n"
    convert.exported("--config", convert.hf, refused=message)
    convert.change("mp_rank_00", lambda s: s["args"].__delattr__("moe_router_topk"))
    convert.exported(refused="--moe-router-topk is not given")


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
