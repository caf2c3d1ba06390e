"""Log-probs of the engine and of Megatron's own forward pass on the same weights: apart by less than 2e-5 in fp32."""

from __future__ import annotations

import pytest

CASES = [("qwen2", 1)]  # generation TP 2: in the loop tests of this tier
MORE = [("qwen3", 2), ("qwen2", 2), ("qwen3", 1), ("llama", 1), ("llama", 2)]


@pytest.mark.parametrize(("family", "tp"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)])
def test_engine_and_trainer_agree(run_ranks, family, tp) -> None:
    output = run_ranks("agreement_ranks.py", family, str(tp), ranks=2)
    assert output.count("agreed") == 2, output[-3000:]
