"""A model imported, trained by Megatron's own loop on four ranks, exported: transformers has the same log-probs."""

import shlex
import sys
from pathlib import Path

import pytest
import torch

from mindspeed_rl_plugin.__main__ import main as plugin

sys.path.insert(0, str(Path(__file__).parent))
from export_reference import LENGTH, LIMIT, ROOT, RUN, VOCAB, transformers_logps, worst  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_other_families(torchrun, family, tmp_path, capsys):
    round_trip(torchrun, family, tmp_path, capsys)


def test_megatron_and_transformers_agree(torchrun, tmp_path, capsys):
    round_trip(torchrun, "qwen3", tmp_path, capsys)


def round_trip(torchrun, family: str, tmp_path: Path, capsys) -> None:
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
    run = (*flags, *RUN.split(), "--load", ckpt, "--save", save)
    torchrun(worker, tmp_path / "logps.pt", script, *run, ranks=4, cwd=ROOT)
    assert plugin(["export", "--load", str(save), "--out", str(back)]) == 0
    before, after = torch.load(tmp_path / "logps.pt")
    assert worst(before, transformers_logps(hf)) < LIMIT
    assert worst(after, transformers_logps(back)) < LIMIT
    assert worst(before, after) > 0.05, "training changed nothing"
