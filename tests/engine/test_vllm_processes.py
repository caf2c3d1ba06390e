"""Real vLLM in real ranks: engines of tensor parallel size 1 and 2, alone and beside each other. Those that
share experts: tests/loop/test_moe_loop.py."""

from pathlib import Path

import pytest


@pytest.mark.parametrize(("tp", "ranks"), [(1, 2), (2, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_engines(torchrun, tp, ranks) -> None:
    done = torchrun(Path(__file__).with_name("engine_ranks.py"), tp, ranks=ranks)
    assert done.stdout.count("passed") == ranks
