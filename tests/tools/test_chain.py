"""One model all the way: Hugging Face files, Megatron, vLLM, and back to files, by real processes.

A random model is imported. Megatron's log-probs are those of transformers. Resharded into vLLM, every weight is
bitwise what vLLM loads from the files, and so are its answers. After a vanishing optimizer step Megatron saves it, and
exported it is bitwise what it was.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_rl_plugin.__main__ import main as plugin

sys.path.insert(0, str(Path(__file__).parent))
from export_reference import LENGTH, LIMIT, ROOT, RUN, VOCAB, transformers_logps, worst  # noqa: E402

EXPERTS = dict(moe_intermediate_size=48, num_experts_per_tok=2)
FAMILIES = {
    "qwen2": dict(num_key_value_heads=2, head_dim=32, hidden_size=128, tie_word_embeddings=True),
    "qwen3": dict(num_key_value_heads=2, head_dim=32),
    "qwen3_moe": dict(num_key_value_heads=2, head_dim=32, num_experts=4, norm_topk_prob=True, mlp_only_layers=[1])
    | EXPERTS,
    # vLLM on CPU decodes latent attention of these sizes only
    "deepseek_v3": dict(num_key_value_heads=4, n_routed_experts=4, n_shared_experts=2, first_k_dense_replace=1)
    | dict(n_group=2, topk_group=1, q_lora_rank=24, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64)
    | dict(v_head_dim=128, routed_scaling_factor=2.5)
    | EXPERTS,
}
STILL = RUN.replace("--lr 1e-2", "--lr 1e-30").replace("iters 2", "iters 1").replace("interval 2", "interval 1")


def random_model(family: str, directory: Path) -> dict[str, torch.Tensor]:
    """A model of transformers with values in everything that is born as ones or zeros; returns its tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    sizes = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
    sizes |= dict(max_position_embeddings=LENGTH, initializer_range=0.1, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes | FAMILIES[family]))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(part in name for part in ("norm", "bias")):
            tensor.data.add_(torch.randn_like(tensor) * 0.1)
        tensor.data[tensor.data == 0] = 0.05  # a step of 1e-30 shows in a weight that is exactly 0, in no other
    model.save_pretrained(directory)
    return {n: t for file in directory.glob("*.safetensors") for n, t in load_file(file).items()}


@pytest.mark.parametrize(
    "family, train, generate",
    [
        pytest.param("qwen2", "tp2", (2, 1), marks=pytest.mark.slow),
        pytest.param("qwen3", "pp2,first1", (1, 1), marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "tp2,ep2,etp1", (2, 2), marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "tp2,pp2,ep2,etp1,first1", (4, 1), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "ep2", (2, 2), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "tp2,pp2,first1", (2, 1), marks=pytest.mark.slow),
    ],
)
def test_chain(torchrun, family, train, generate, tmp_path, capsys):
    hf, ckpt, save, back = (tmp_path / name for name in ("hf", "ckpt", "save", "back"))
    weights = random_model(family, hf)
    assert plugin(["import", "--load", str(hf), "--out", str(ckpt), "--train", train]) == 0
    flags = shlex.split(capsys.readouterr().out.strip().splitlines()[-1])
    if "tp2" in train:
        flags.append("--sequence-parallel")
    if family == "deepseek_v3":
        flags += ["--moe-router-bias-update-rate", "0", "--attention-backend", "unfused"]
    job = dict(out=str(tmp_path / "logps.pt"), hf=str(hf), generate=generate, limit=LIMIT)
    worker, script = Path(__file__).parent / "chain_ranks.py", ROOT / "examples" / "pretrain_gpt.py"
    ranks = 4 if "pp2" in train and "tp2" in train else 2
    run = (*flags, *STILL.split(), "--load", ckpt, "--save", save)
    out = torchrun(worker, json.dumps(job), script, *run, ranks=ranks, cwd=ROOT).stdout
    print(next(line for line in out.splitlines() if line.startswith("engine and trainer differ by")))
    assert worst(torch.load(tmp_path / "logps.pt"), transformers_logps(hf)) < LIMIT
    assert plugin(["export", "--load", str(save), "--out", str(back)]) == 0
    found = {n: t for file in back.glob("*.safetensors") for n, t in load_file(file).items()}
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor), name
