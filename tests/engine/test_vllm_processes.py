"""Real vLLM in real ranks: engines of tensor parallel size 1 and 2, alone and beside each other."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("tp", [1, 2])
def test_engines(run_ranks, tp) -> None:
    output = run_ranks("engine_ranks.py", str(tp), ranks=2)
    assert output.count("passed") == 2


@pytest.mark.slow
def test_two_engines_of_two_ranks(run_ranks) -> None:
    output = run_ranks("engine_ranks.py", "2", ranks=4)
    assert output.count("passed") == 4
