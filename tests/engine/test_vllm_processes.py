"""Real vLLM in real ranks: engines of tensor parallel size 2, alone and two of them. Those of size 1, and those that
share experts, are in tests/loop."""

from pathlib import Path

import pytest


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_engines(torchrun, ranks) -> None:
    done = torchrun(Path(__file__).with_name("engine_ranks.py"), 2, ranks=ranks)
    assert done.stdout.count("passed") == ranks
