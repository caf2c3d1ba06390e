"""What the process tests of this folder share: flags of a small run, its launch, transformers' own log-probs."""

from __future__ import annotations

from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
VOCAB, LENGTH, LIMIT = 4200, 32, 2e-5  # Megatron's mock data has tokens up to 4096
RUN = (
    f"--seq-length {LENGTH} --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-decay-style constant "
    "--ckpt-format torch --train-iters 2 --save-interval 2 --eval-interval 1000 --eval-iters 0 --mock-data "
    "--distributed-backend gloo --tokenizer-type NullTokenizer --attention-dropout 0 --hidden-dropout 0 "
    "--no-save-optim --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion --no-bias-dropout-fusion"
)


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
