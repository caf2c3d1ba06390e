"""One model all the way: Hugging Face files, Megatron, and back to files, by real processes.

A random model is imported; Megatron's log-probs are those of transformers. Trained and exported, transformers has
Megatron's log-probs again; after a vanishing optimizer step what is exported is bitwise what it was. Engines of such
models: tests/loop/test_family_loop.py, tests/weights/test_reshard_pairs.py.
"""

import shlex
from pathlib import Path

import pytest
import torch
from family_configs import EXPERTS, LATENT
from safetensors.torch import load_file

from mindspeed_rl_plugin.__main__ import main as plugin

ROOT = Path(__file__).parents[2]
VOCAB, LENGTH, LIMIT = 4200, 32, 2e-5  # Megatron's mock data has tokens up to 4096
RUN = (
    f"--seq-length {LENGTH} --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-decay-style constant "
    "--ckpt-format torch --train-iters 2 --save-interval 2 --eval-interval 1000 --eval-iters 0 --mock-data "
    "--distributed-backend gloo --tokenizer-type NullTokenizer --attention-dropout 0 --hidden-dropout 0 "
    "--no-save-optim --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion --no-bias-dropout-fusion"
)
STILL = RUN.replace("--lr 1e-2", "--lr 1e-30").replace("iters 2", "iters 1").replace("interval 2", "interval 1")
SIZES = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
SIZES |= dict(max_position_embeddings=LENGTH, initializer_range=0.1, tie_word_embeddings=False, num_key_value_heads=2)
FAMILIES = {
    "llama": dict(head_dim=16),
    "qwen2": dict(head_dim=32, hidden_size=128, tie_word_embeddings=True),
    "qwen3": dict(head_dim=32),
    "qwen3_moe": dict(head_dim=32, num_experts=4, norm_topk_prob=True, mlp_only_layers=[1]) | EXPERTS,
    "deepseek_v3": LATENT | dict(num_key_value_heads=4, q_lora_rank=24, n_group=2, topk_group=1, n_shared_experts=2),
}


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in directory.glob("*.safetensors") for n, t in load_file(file).items()}


def random_model(family: str, directory: Path) -> None:
    """A model of transformers with values in everything that is born as ones or zeros."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | FAMILIES[family]))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(part in name for part in ("norm", "bias")):
            tensor.data.add_(torch.randn_like(tensor) * 0.1)
        tensor.data[tensor.data == 0] = 0.05  # a step of 1e-30 shows in a weight that is exactly 0, in no other
    model.save_pretrained(directory)


def transformers_logps(directory: Path) -> list[torch.Tensor]:
    """Log-probs of the worker's rows, entry 0 of each row 0."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    make = torch.Generator().manual_seed(7)
    rows = [torch.randint(0, VOCAB, (LENGTH - 5 * i,), generator=make, dtype=torch.int32).long() for i in range(2)]
    out = []
    with torch.no_grad():
        for row in rows:
            logp = model(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
            out.append(torch.cat([torch.zeros(1), logp]))
    return out


def worst(left, right) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


@pytest.fixture
def round_trip(torchrun, tmp_path, capsys):
    """`round_trip(family, train, run, *flags, ranks)`: import, Megatron's own loop, export. Returns both folders of
    Hugging Face files and Megatron's log-probs before and after training."""

    def trip(family, train, run, *flags, ranks):
        hf, ckpt, save, back, out = (tmp_path / name for name in ("hf", "ckpt", "save", "back", "logps.pt"))
        random_model(family, hf)
        assert plugin(["import", "--load", str(hf), "--out", str(ckpt), "--train", train]) == 0
        words = shlex.split(capsys.readouterr().out.strip().splitlines()[-1])
        worker, script = Path(__file__).parent / "export_ranks.py", ROOT / "examples" / "pretrain_gpt.py"
        more = (*words, *run.split(), *flags, "--load", ckpt, "--save", save)
        torchrun(worker, out, script, *more, ranks=ranks, cwd=ROOT)
        assert any(save.glob("iter_*/.metadata")) == ("torch_dist" in flags)
        assert plugin(["export", "--load", str(save), "--out", str(back)]) == 0
        before, after = torch.load(out)
        assert worst(before, transformers_logps(hf)) < LIMIT
        return hf, back, before, after

    return trip


def test_megatron_and_transformers_agree(round_trip):
    _, back, before, after = round_trip("qwen3", "tp2,pp2,first1", RUN, ranks=4)
    assert worst(after, transformers_logps(back)) < LIMIT
    assert worst(before, after) > 0.05, "training changed nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, train, stored",
    [
        ("qwen2", "tp2", "torch_dist"),
        ("llama", "pp2,first1", "torch"),
        ("qwen3_moe", "tp2,pp2,ep2,etp1,first1", "torch_dist"),
        ("deepseek_v3", "ep2", "torch_dist"),
        ("deepseek_v3", "tp2,pp2,first1", "torch"),
    ],
)
def test_chain(round_trip, family, train, stored):
    flags = ["--sequence-parallel"] * ("tp2" in train) + ["--ckpt-format", stored]
    if family == "deepseek_v3":
        flags += ["--moe-router-bias-update-rate", "0", "--attention-backend", "unfused"]
    ranks = 4 if "pp2" in train and "tp2" in train else 2
    hf, back, *_ = round_trip(family, train, STILL, *flags, ranks=ranks)
    weights, exported = tensors(hf), tensors(back)
    assert exported.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(exported[name], tensor), name
