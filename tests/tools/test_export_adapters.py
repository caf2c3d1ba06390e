"""Checkpoints of adapters, as the run's own classes store them: merged as the run merges them, and loaded by peft."""

import copy
from shutil import copytree

import pytest
import torch
import torch.distributed.checkpoint as dcp
from family_configs import CONFIGS
from safetensors.torch import load_file
from torch.nn import Module, Parameter
from transformers import AutoConfig, AutoModelForCausalLM

from mindspeed_rl_plugin.adapters.adapters import CHILD, AdaptedModule, Adapters, Place
from mindspeed_rl_plugin.adapters.targets import adapted
from mindspeed_rl_plugin.checkpoints.checkpoint_files import TRACKER, write_state
from mindspeed_rl_plugin.checkpoints.reference_digest import CheckpointDigest
from mindspeed_rl_plugin.layout.layout import ModelShape, Parallel, megatron_layout
from mindspeed_rl_plugin.layout.parallel import chunk_prefix
from mindspeed_rl_plugin.tools.convert.checkpoint import MODEL_FILE, Checkpoint, rank_folders

RANK, ALPHA = 4, 6.0
SIZES = dict(vocab_size=250, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=False)
OWN = {
    "deepseek_v3": dict(num_key_value_heads=4, n_group=2, topk_group=1, kv_lora_rank=10)
    | dict(qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8),
    "qwen3_moe": dict(mlp_only_layers=[1]),
}


def random_model(hf, family):
    """A small model of transformers in a folder; returns its tensors, by the names in its files."""
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **SIZES | CONFIGS[family] | OWN.get(family, {}))
    ).save_pretrained(hf)
    return load_file(hf / "model.safetensors")


def chunk_of(params):
    """A module with parameters of these paths."""
    chunk = Module()
    for name, tensor in params.items():
        *path, last = name.split(".")
        module = chunk
        for part in path:
            if part not in module._modules:
                module.add_module(part, Module())
            module = module._modules[part]
        module.register_parameter(last, Parameter(tensor, requires_grad=False))
    return chunk


def trained(convert, parallel, kinds, weights, targets=(), dist=False):
    """A run on the imported model, of which `weights` are in its dtype: a checkpoint of its adapters, in
    convert.ckpt. Returns the weights into which its ranks merge them."""
    base = Checkpoint(convert.ckpt)
    args, shape = copy.copy(base.args), ModelShape.from_megatron_args(base.args, base.args.vocab_size)
    args.rl_lora_rank, args.rl_lora_alpha, args.rl_lora_targets = RANK, ALPHA, list(targets)
    out = convert.ckpt.parent / "tuned"
    folder, merged = out / "iter_0000004", {name: t.clone() for name, t in weights.items()}
    folders, whole = {rank: name for name, rank in rank_folders(shape, parallel).items()}, {}
    for rank in range(parallel.world):
        layout, held = megatron_layout(shape, parallel, rank, *kinds), adapted(shape, parallel, rank, kinds, targets)
        state = {"args": args}
        for i in range(parallel.vpp):
            prefix, params = chunk_prefix(i, parallel.vpp), {}
            for name in (name for name in layout if name.startswith(prefix)):
                dtype = weights[layout[name][0].name].dtype
                params[name.removeprefix(prefix)] = torch.zeros(layout.shapes[name], dtype=dtype)
                for s in layout[name]:
                    there = weights[s.name].narrow(s.axis, s.start, s.size)
                    s.view(params[name.removeprefix(prefix)], s.start, s.size).copy_(there)
            chunk, modules = chunk_of(params), []
            for path in dict.fromkeys(m.module for m in held if m.module.startswith(prefix)):
                own, of = [m for m in held if m.module == path], path.removeprefix(prefix)
                place = Place(parallel.coordinates(rank), parallel.cp, None, None)
                modules.append(AdaptedModule(of, chunk.get_submodule(of), own, RANK, ALPHA / RANK, 1, place))
                for matrix, _, b in modules[-1]._pairs(modules[-1].factors):
                    for slot, name in enumerate(matrix.canonical):
                        random = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
                        full = torch.randn(matrix.shape[0], RANK, generator=random) / 4
                        rows = full.narrow(0, matrix.start, matrix.size) if matrix.axis == 0 else full
                        b.data[slot] = rows
            adapters = Adapters(chunk, modules)
            for name, tensor in adapters.merged():
                for s in layout[prefix + name]:
                    merged[s.name].narrow(s.axis, s.start, s.size).copy_(s.view(tensor, s.start, s.size))
            adapters.store(base=False)
            state[f"model{i}" if parallel.vpp > 1 else "model"] = adapters.state_dict(prefix=f"{CHILD}.")
            for part in adapters.sharded_state_dict(f"{CHILD}.").values() if dist else ():
                entry = whole.setdefault(part.key, torch.zeros(part.global_shape, dtype=part.data.dtype))
                at = zip(part.global_offset, part.local_shape, strict=True)
                entry[tuple(slice(low, low + size) for low, size in at)] = part.data
        if rank in folders and not dist:
            (folder / folders[rank]).mkdir(parents=True)
            torch.save(state, folder / folders[rank] / MODEL_FILE)
    if dist:
        dcp.save(whole, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
        torch.save({"args": args}, folder / "common.pt")
    digest = CheckpointDigest(str(base.folder)).result(60)
    write_state(str(out), 4, {"reference": {"path": str(base.folder), "digest": digest}, "loop": {}})
    (out / TRACKER).write_text("4")
    convert.ckpt = out
    return merged


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(40).view(2, 20)).logits


@pytest.mark.parametrize(
    "family, train, storage, targets",
    [
        ("qwen3", "tp2,pp2,vpp2", ("local", "sequential"), ()),
        ("qwen2", "tp1", ("te", "sequential"), ("linear_qkv", "down_proj")),
        ("qwen3_moe", "tp2,ep2,etp1", ("local", "grouped"), ()),
        ("qwen3_moe", "tp1", ("te", "te_grouped"), ("o_proj", "experts.gate_proj")),
        ("deepseek_v3", "tp2,ep2,etp2", ("local", "sequential"), ()),
        ("deepseek_v3", "tp1", ("te", "sequential"), ()),
        ("mixtral", "ep2", ("te", "te_grouped"), ()),
    ],
)
def test_a_merge_is_that_of_the_run_and_peft_has_its_logits(family, train, storage, targets, convert):
    from peft import PeftModel

    weights = random_model(convert.hf, family)
    convert.imported(train, "--impl", storage[0], "--experts", storage[1])
    dist, parallel = train == "tp1", Checkpoint(convert.ckpt).parallel
    if dist:  # of two ranks
        convert.distributed(family == "qwen3_moe")
        parallel = Parallel(2, tp=2, ep=2, etp=1) if "moe" in family or "deep" in family else Parallel(2, tp=2)
    merged = trained(convert, parallel, storage, weights, targets, dist)
    exported = convert.exported()
    assert exported.keys() == merged.keys()
    assert [name for name, t in merged.items() if not torch.equal(exported[name], t)] == []
    whole = AutoModelForCausalLM.from_pretrained(convert.back, dtype=torch.float32)
    convert.back = convert.back.with_name("adapter")
    convert.exported("--adapter")
    model = AutoModelForCausalLM.from_pretrained(convert.hf, dtype=torch.float32)
    plain, expected = logits(model), logits(whole)
    assert (plain - expected).abs().max() > 0.1
    assert (logits(PeftModel.from_pretrained(model, convert.back)) - expected).abs().max() < 5e-5


def test_a_run_in_bf16_merges_what_it_rounded(convert):
    weights = random_model(convert.hf, "qwen3")
    convert.imported("tp2")
    merged = trained(convert, Parallel(2, tp=2), ("local", "sequential"), {n: t.bfloat16() for n, t in weights.items()})
    exported = convert.exported("--dtype", "fp32")
    assert all(torch.equal(exported[name], t.float()) for name, t in merged.items())


def test_what_cannot_be_merged_is_named(convert, tmp_path):
    weights = random_model(convert.hf, "qwen3")
    convert.imported("tp2")
    convert.exported("--adapter", refused="holds a whole model; leave out --adapter and --base")
    base = convert.ckpt
    trained(convert, Parallel(2, tp=2), ("local", "sequential"), weights)
    moved = base.rename(tmp_path / "elsewhere")
    convert.exported(refused=f"{base / 'release'}, the base of these adapters, is not there")
    assert convert.exported("--base", moved).keys() == weights.keys()
    convert.back = tmp_path / "again"
    other = copytree(moved, tmp_path / "other") / "release"
    state = torch.load(other / "mp_rank_00" / MODEL_FILE, weights_only=False)
    state["model"]["decoder.final_layernorm.weight"][0] += 1
    torch.save(state, other / "mp_rank_00" / MODEL_FILE)
    convert.exported("--base", other, refused=f"{other} is not the base of these adapters, or has changed")
    file = convert.ckpt / "iter_0000004" / "mp_rank_01" / MODEL_FILE
    state = torch.load(file, weights_only=False)
    gone = next(name for name in state["model"] if name.endswith("lora_B"))
    del state["model"][gone]
    torch.save(state, file)
    refused = f"{file.parent} does not hold the adapters of its arguments:\n  {gone.rpartition('.')[2]}"
    convert.exported("--base", moved, refused=refused)
    assert not convert.back.exists()
