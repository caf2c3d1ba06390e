"""Real Megatron models over gloo: engine weights bitwise, and training as if no swap had happened.

One launch runs several layouts, since starting Megatron costs more than a case.
"""

import json
from pathlib import Path

WORKER = Path(__file__).parent / "reshard_ranks.py"

BF16 = dict(dtype="bfloat16", engine_dtype="bfloat16")
TWO_RANKS = [
    dict(name="tp2", tp=2, generate=[1, 2]),
    dict(name="pp2", pp=2, generate=[1, 2], family="qwen3", **BF16),
    dict(name="dp2-distributed-fp32", distributed=True, generate=[1, 2]),
    dict(name="dp2-distributed-bf16-overlap", distributed=True, overlap=True, generate=[1, 2], **BF16),
    dict(name="fp32-to-bf16-tied", tp=2, engine_dtype="bfloat16", tied=True, generate=[1]),
]
FOUR_RANKS = [
    dict(name="tp2-pp2", tp=2, pp=2, generate=[2], distributed=True, **BF16),
    dict(name="pp2-vpp2-dp2-tied", pp=2, vpp=2, tied=True, family="llama", generate=[4], distributed=True),
]


def launch(torchrun, ranks, cases, breaks=False):
    """Output lines of rank 0."""
    done = torchrun(WORKER, json.dumps({"cases": cases, "break": breaks}), ranks=ranks)
    return [line for line in done.stdout.splitlines() if line.startswith("passed")]


def test_two_ranks(torchrun):
    lines = launch(torchrun, 2, TWO_RANKS, breaks=True)
    assert [line.split()[1] for line in lines] == [case["name"] for case in TWO_RANKS] + ["deadline", "death"]
    digest = {line.split()[1]: line.split()[-1] for line in lines}
    assert digest["tp2"] == digest["dp2-distributed-fp32"]  # the same model in two layouts


def test_four_ranks(torchrun):
    assert [line.split()[1] for line in launch(torchrun, 4, FOUR_RANKS)] == [case["name"] for case in FOUR_RANKS]
