"""A model imported, trained by Megatron's own loop on four ranks, exported: transformers has the same log-probs."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


def launch(*words) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]


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


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_other_families(family, tmp_path, capsys):
    round_trip(family, tmp_path, capsys)


def test_megatron_and_transformers_agree(tmp_path, capsys):
    round_trip("qwen3", tmp_path, capsys)


def round_trip(family: str, tmp_path: Path, capsys) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32 if family == "qwen3" else 16,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=family == "qwen2",
        initializer_range=0.1,
    )
    hf, ckpt, save, back = (tmp_path / name for name in ("hf", "ckpt", "save", "back"))
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():  # norms are born as ones, biases as zeros
        if "norm" in name or "bias" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(hf)
    assert plugin(["import", "--load", str(hf), "--out", str(ckpt), "--train", "tp2,pp2,first1"]) == 0
    flags = shlex.split(capsys.readouterr().out.strip().splitlines()[-1])
    worker, script = Path(__file__).parent / "export_ranks.py", ROOT / "examples" / "pretrain_gpt.py"
    launch(worker, tmp_path / "logps.pt", script, *flags, *RUN.split(), "--load", ckpt, "--save", save)
    assert plugin(["export", "--load", str(save), "--out", str(back)]) == 0
    before, after = torch.load(tmp_path / "logps.pt")
    assert worst(before, transformers_logps(hf)) < LIMIT
    assert worst(after, transformers_logps(back)) < LIMIT
    assert worst(before, after) > 0.05, "training changed nothing"
