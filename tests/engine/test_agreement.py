"""Log-probs of the engine and of Megatron's own forward pass on the same weights: apart by less than 2e-5 in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest

CASES = [("qwen3", 2), ("qwen2", 2), ("qwen3", 1), ("llama", 1), ("llama", 2)]


@pytest.mark.slow  # the ordinary tier has it in the loop tests, at another temperature too
@pytest.mark.parametrize(("family", "tp"), CASES)
def test_engine_and_trainer_agree(torchrun, family, tp) -> None:
    done = torchrun(Path(__file__).with_name("agreement_ranks.py"), family, tp)
    assert done.stdout.count("agreed") == 2
