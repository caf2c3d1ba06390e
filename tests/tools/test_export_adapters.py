"""Checkpoints of adapters, stored by the run's own classes: merged as the run merges them, and loaded by peft."""

import argparse
from shutil import copytree

import pytest
import torch
import torch.distributed.checkpoint as dcp
from family_configs import CONFIGS
from safetensors.torch import load_file
from torch.nn import Module, Parameter
from transformers import AutoConfig, AutoModelForCausalLM

from mindspeed_rl_plugin.adapters.adapters import AdaptedModule, Adapters, RankPlace
from mindspeed_rl_plugin.adapters.targets import adapted
from mindspeed_rl_plugin.checkpoints.checkpoint_files import TRACKER, write_state
from mindspeed_rl_plugin.checkpoints.reference_digest import CheckpointDigest
from mindspeed_rl_plugin.config.flag import split_words
from mindspeed_rl_plugin.layout.layout import ModelShape, Parallel, megatron_layout
from mindspeed_rl_plugin.layout.parallel import chunk_prefix
from mindspeed_rl_plugin.tools.convert.checkpoint import MODEL_FILE, Checkpoint, rank_folders
from mindspeed_rl_plugin.weights.live import ADAPTERS

RANK, ALPHA = 4, 6.0
SIZES = dict(vocab_size=250, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=False)
OWN = {"qwen3_moe": dict(mlp_only_layers=[1]), "deepseek_v3": dict(num_key_value_heads=4, n_group=2, topk_group=1)}
OWN["deepseek_v3"] |= dict(kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8)


def random_model(hf, family):
    """A small model of transformers in a folder; returns its tensors, by the names in its files."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SIZES | CONFIGS[family] | OWN.get(family, {}))
    AutoModelForCausalLM.from_config(config).save_pretrained(hf)
    return load_file(hf / "model.safetensors")


class Chunk(Module):
    """What adapters ask of a chunk: the modules that hold a rank's part of some weights."""

    def __init__(self, layout, prefix, weights):
        super().__init__()
        self.linear = {}
        for name in (name for name in layout if name.startswith(prefix)):
            param = torch.zeros(layout.shapes[name], dtype=weights[layout[name][0].name].dtype)
            for s in layout[name]:
                s.view(param, s.start, s.size).copy_(weights[s.name].narrow(s.axis, s.start, s.size))
            path, _, last = name.removeprefix(prefix).rpartition(".")
            self.linear.setdefault(path, Module()).register_parameter(last, Parameter(param, requires_grad=False))

    def get_submodule(self, path):
        return self.linear[path]


def with_adapters(chunk, prefix, held, place):
    """Adapters on a chunk; B is as if trained, and the same in every layout."""
    modules = []
    for path in dict.fromkeys(m.module for m in held if m.module.startswith(prefix)):
        own, path = [m for m in held if m.module == path], path.removeprefix(prefix)
        one = AdaptedModule(path, chunk.get_submodule(path), own, RANK, ALPHA / RANK, 1, place)
        for matrix, _, b in one._pairs(one.factors):
            for slot, name in enumerate(matrix.canonical):
                whole = torch.randn(matrix.shape[0], RANK, generator=torch.Generator().manual_seed(sum(name.encode())))
                b.data[slot] = whole[matrix.start :][: b.shape[1]] / 4 if matrix.axis == 0 else whole / 4
        modules.append(one)
    return Adapters(chunk, modules)


def trained(convert, parallel, kinds, weights, targets=(), whole=None):
    """A run on the imported model, of which `weights` are in its dtype, leaves a checkpoint in `convert.ckpt`, of
    torch_dist if `whole` is a dict. Returns the weights into which its ranks merge their adapters."""
    base, out = Checkpoint(convert.ckpt), convert.ckpt.parent / "tuned"
    args = argparse.Namespace(**vars(base.args), rl_lora_rank=RANK, rl_lora_alpha=ALPHA, rl_lora_targets=[*targets])
    shape, folder = ModelShape.from_megatron_args(args, args.vocab_size), out / "iter_0000004"
    merged, files = {n: t.clone() for n, t in weights.items()}, {r: f for f, r in rank_folders(shape, parallel).items()}
    for rank in range(parallel.world):
        layout, state = megatron_layout(shape, parallel, rank, *kinds), {"args": args}
        for i in range(parallel.vpp):
            prefix, place = (
                chunk_prefix(i, parallel.vpp),
                RankPlace(parallel.coordinates(rank), parallel.cp, False, None, None),
            )
            held = adapted(shape, parallel, rank, kinds, split_words(targets))
            adapters = with_adapters(Chunk(layout, prefix, weights), prefix, held, place)
            for name, tensor in ((name, merged()) for name, merged in adapters.merging()):
                for s in layout[prefix + name]:
                    merged[s.name].narrow(s.axis, s.start, s.size).copy_(s.view(tensor, s.start, s.size))
            state[f"model{i}" if parallel.vpp > 1 else "model"] = adapters.state_dict(prefix=f"{ADAPTERS}.")
            for part in adapters.sharded_state_dict().values() if whole is not None else ():
                at = zip(part.global_offset, part.local_shape, strict=True)
                entry = whole.setdefault(part.key, torch.zeros(part.global_shape))
                entry[tuple(slice(low, low + size) for low, size in at)] = part.data
        if rank in files and whole is None:
            (folder / files[rank]).mkdir(parents=True)
            torch.save(state, folder / files[rank] / MODEL_FILE)
    if whole is not None:
        dcp.save(whole, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
        torch.save({"args": args}, folder / "common.pt")
    reference = {"path": str(base.folder), "digest": CheckpointDigest(str(base.folder)).result(60)}
    write_state(str(out), 4, {"reference": reference, "loop": {}})
    (out / TRACKER).write_text("4")
    convert.ckpt = out
    return merged


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(40).view(2, 20)).logits


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "family, train, storage, targets",
    [
        ("qwen3", "tp2,pp2,vpp2", ("local", "sequential"), ()),
        pytest.param("qwen2", "tp1", ("te", "sequential"), ("linear_qkv", "down_proj"), marks=SLOW),
        pytest.param("qwen3_moe", "tp2,ep2,etp1", ("local", "grouped"), (), marks=SLOW),
        ("qwen3_moe", "tp1", ("te", "te_grouped"), ("o_proj,experts.gate_proj",)),
        ("deepseek_v3", "tp2,ep2,etp2", ("local", "sequential"), ()),
        pytest.param("deepseek_v3", "tp1", ("te", "sequential"), (), marks=SLOW),
        pytest.param("mixtral", "ep2", ("te", "te_grouped"), (), marks=SLOW),
    ],
)
def test_a_merge_is_that_of_the_run_and_peft_has_its_logits(family, train, storage, targets, convert):
    from peft import PeftModel

    weights = random_model(convert.hf, family)
    convert.imported(train, "--impl", storage[0], "--experts", storage[1])
    parallel, whole = Checkpoint(convert.ckpt).parallel, None
    if train == "tp1":  # a checkpoint of torch_dist, from which two ranks start
        experts = family != "qwen2"
        convert.distributed(numbered=experts)
        parallel, whole = Parallel(2, tp=2, ep=1 + experts, etp=1), {}
    merged = trained(convert, parallel, storage, weights, targets, whole)
    exported = convert.exported()
    assert exported.keys() == merged.keys()
    assert [name for name, t in merged.items() if not torch.equal(exported[name], t)] == []
    tuned = logits(AutoModelForCausalLM.from_pretrained(convert.back, dtype=torch.float32))
    convert.back = convert.back.with_name("adapter")
    convert.exported("--adapter")
    model = AutoModelForCausalLM.from_pretrained(convert.hf, dtype=torch.float32)
    assert (logits(model) - tuned).abs().max() > 0.1
    assert (logits(PeftModel.from_pretrained(model, convert.back)) - tuned).abs().max() < 5e-5


def test_a_run_in_bf16_merges_what_it_rounded(convert):
    weights = {name: t.bfloat16() for name, t in random_model(convert.hf, "qwen3").items()}
    convert.imported("tp2")
    merged = trained(convert, Parallel(2, tp=2), ("local", "sequential"), weights)
    exported = convert.exported("--dtype", "fp32")
    assert all(torch.equal(exported[name], t.float()) for name, t in merged.items())


def test_what_cannot_be_exported_is_named(convert, tmp_path):
    weights, base = random_model(convert.hf, "qwen3"), convert.ckpt
    convert.imported("tp2")
    convert.exported("--adapter", refused="holds a whole model; leave out --adapter and --base")
    trained(convert, Parallel(2, tp=2), ("local", "sequential"), weights)
    convert.exported("--adapter", "--tokenizer", tmp_path, refused="an adapter has the tokenizer of its base")
    moved, convert.back = base.rename(tmp_path / "moved"), tmp_path / "result"
    convert.exported(refused=f"{base / 'release'}, the base of these adapters, is not there; if it was moved")
    assert convert.exported("--base", moved).keys() == weights.keys()
    other, convert.back = copytree(moved / "release", tmp_path / "other"), tmp_path / "none"
    with open(other / "mp_rank_00" / MODEL_FILE, "ab") as file:
        file.write(b"x")
    convert.exported("--base", other, refused=f"{other} is not the base of these adapters, or has changed")
    path = convert.ckpt / "iter_0000004" / "mp_rank_01" / MODEL_FILE
    state = torch.load(path, weights_only=False)
    gone, _ = state["model"].popitem()
    torch.save(state, path)
    why = f"{path.parent} does not hold the adapters of its arguments:\n  {gone.rpartition('.')[2]}"
    convert.exported("--base", moved, refused=why)
    assert not convert.back.exists()
