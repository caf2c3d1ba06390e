"""A family that the package does not have, defined by one entry of the table: everything else follows from it.

dots.llm1 of transformers: Qwen3's attention, DeepSeek-V3's experts. Megatron's flags tell it from Qwen3-MoE by the
router's score alone.
"""

import argparse
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_rl_plugin.engine.hf_config import compare_configs, derive_config
from mindspeed_rl_plugin.layout import families, family_rows
from mindspeed_rl_plugin.layout.family_table import Family, HfConfig, Router
from mindspeed_rl_plugin.layout.layout import ModelShape, Parallel, canonical_tensors
from mindspeed_rl_plugin.tools.convert import to_hf, to_megatron
from mindspeed_rl_plugin.tools.convert.arguments import flags, megatron_arguments
from mindspeed_rl_plugin.tools.plan import plan
from mindspeed_rl_plugin.tools.plan.script_args import read_arguments
from mindspeed_rl_plugin.tools.rehearse.command_line import Flags

ROWS = family_rows.PLAIN_ATTENTION + family_rows.QK_NORM + family_rows.DENSE_MLP
ROWS += family_rows.ROUTED + family_rows.ROUTER_BIAS + family_rows.SHARED_EXPERTS
DOTS = Family(
    "Dots1ForCausalLM",
    ROWS,
    qk_norm=True,
    experts=True,
    router=Router("sigmoid", bias=True, grouped=True, scaled=True),
    hf=HfConfig(
        defaults={"norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1},
        synonyms={"num_local_experts": "n_routed_experts"},
        experts="n_routed_experts",
        dense="first_k_dense_replace",
    ),
)
SIZES = dict(vocab_size=250, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, head_dim=16, max_position_embeddings=64, moe_intermediate_size=24)
SIZES |= dict(n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=4, first_k_dense_replace=1, n_group=4)
SIZES |= dict(topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5)


@pytest.fixture(autouse=True)
def dots(monkeypatch):
    monkeypatch.setitem(families.FAMILIES, "dots1", DOTS)


@pytest.fixture
def files(tmp_path):
    """A model as transformers writes it, one file; its tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("dots1", **SIZES))
    model.save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    # Transformers has the router's bias in the dtype of the model, which here is float32; it starts as zeros.
    tensors = {n: torch.randn(t.shape) if n.endswith("_bias") else t for n, t in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    return tmp_path / "hf", tensors


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


def test_arguments_and_config_say_the_same(files):
    """config.json to Megatron's flags, and back from them, as a launch script's too; its tensors are transformers'."""
    config, tensors = config_of(files[0]), files[1]
    shape = ModelShape.from_hf_config(config, 256)
    assert {n: t.shape for n, t in canonical_tensors(shape).items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    args = megatron_arguments(shape, Parallel(4, tp=2, pp=2, first_layers=1), config)
    assert ModelShape.from_megatron_args(args) == shape and shape.family == "dots1"
    derived = derive_config(args, vocab_size=250)
    assert compare_configs(derived, config) == [] and derived["architectures"] == ["Dots1ForCausalLM"]
    assert {name: derived[name] for name in SIZES} == SIZES
    words = [word for flag in flags(args) for word in flag.split()]
    assert read_arguments(Flags.parse(words), 4).shape == shape
    # With softmax scores and the same sizes it is Qwen3-MoE, as ever; what it has not is refused by name.
    other = argparse.Namespace(**vars(args) | {"moe_router_score_function": "softmax"})
    assert ModelShape.from_megatron_args(other).family == "qwen3_moe"
    refused = argparse.Namespace(**vars(args) | {"moe_router_score_function": "tanh"})
    with pytest.raises(ValueError, match="of the families qwen3_moe, bailing_moe, dots1 none has .*function='tanh'"):
        derive_config(refused, vocab_size=250)


def test_import_export_and_plan(files, tmp_path, capsys):
    directory, tensors = files
    ckpt, back = tmp_path / "ckpt", tmp_path / "back"
    train = ["--train", "tp2,pp2,ep2,first1", "--experts", "grouped"]
    assert to_megatron.main(["--load", str(directory), "--out", str(ckpt), *train]) == 0
    assert to_hf.main(["--load", str(ckpt), "--out", str(back)]) == 0, capsys.readouterr()
    exported = load_file(back / "model.safetensors")
    assert exported.keys() == tensors.keys() and all(torch.equal(exported[n], t) for n, t in tensors.items())
    assert compare_configs(config_of(back), config_of(directory)) == []
    model = str(directory / "config.json")
    assert plan.main(["--model", model, "--train", "tp2,pp2,ep2,first1", "--generate", "tp2,ep4", "--world", "8"]) == 0
    assert "dots1, " in capsys.readouterr().out
