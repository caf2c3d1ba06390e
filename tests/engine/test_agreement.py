"""Log-probs of the engine and of Megatron's own forward pass on the same weights: apart by less than 2e-5 in fp32."""

from __future__ import annotations

import pytest

CASES = [("qwen3", 2), ("qwen2", 2), ("qwen3", 1), ("llama", 1), ("llama", 2)]


@pytest.mark.slow  # the ordinary tier has it in the loop tests, at another temperature too
@pytest.mark.parametrize(("family", "tp"), CASES)
def test_engine_and_trainer_agree(run_ranks, family, tp) -> None:
    output = run_ranks("agreement_ranks.py", family, str(tp), ranks=2)
    assert output.count("agreed") == 2, output[-3000:]
