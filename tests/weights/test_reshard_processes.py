"""Real Megatron models over gloo: engine weights bitwise, and training as if no swap had happened.

One launch runs several layouts, since starting Megatron costs more than a case.
"""

import json
from pathlib import Path

WORKER = Path(__file__).parent / "reshard_ranks.py"

BF16 = dict(dtype="bfloat16", engine_dtype="bfloat16")
CASES = [
    dict(name="tp2", tp=2, generate=[1, 2]),
    dict(name="pp2-vpp2-tied", pp=2, vpp=2, tied=True, generate=[1, 2], family="qwen3", **BF16),
    dict(name="dp2-distributed-fp32", distributed=True, generate=[1, 2]),
    dict(name="dp2-distributed-bf16-overlap", distributed=True, overlap=True, generate=[2], family="llama", **BF16),
    dict(name="fp32-to-bf16-tied", tp=2, engine_dtype="bfloat16", tied=True, generate=[1]),
]


def test_two_ranks(torchrun):
    done = torchrun(WORKER, json.dumps(CASES))
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("passed")]
    assert [words[1] for words in lines] == [case["name"] for case in CASES] + ["deadline", "death"]
    digest = {words[1]: words[-1] for words in lines}
    assert digest["tp2"] == digest["dp2-distributed-fp32"]  # the same model in two layouts
