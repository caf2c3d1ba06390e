"""Real vLLM in real ranks: engines of tensor parallel size 1 and 2, alone, beside each other, and sharing experts."""

import re
from pathlib import Path

import pytest


@pytest.mark.parametrize(("tp", "ranks"), [(1, 2), (2, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_engines(torchrun, tp, ranks) -> None:
    done = torchrun(Path(__file__).with_name("engine_ranks.py"), tp, ranks=ranks)
    assert done.stdout.count("passed") == ranks


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "ep"), [(1, 4), (1, 2), (2, 4)])
def test_engines_that_share_experts(torchrun, tp, ep) -> None:
    """As engines of their own compute, on four ranks; (1, 2): in two groups. A rank that stands still ends the others,
    and the reason that torchrun shows names them."""
    done = torchrun(Path(__file__).with_name("expert_ranks.py"), tp, ep, ranks=4, timeout=600)
    assert done.stdout.count("passed") == 4
    late = rf"rank \d waited 3 s \(--rl-wait-timeout\) in .* ranks 0 to {ep - 1} .*--rl-generate-ep {ep}"
    assert len(re.findall(late, done.stderr)) == ep - 1
