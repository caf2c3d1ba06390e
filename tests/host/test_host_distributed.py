"""torch.distributed in host mode, on two ranks."""

from pathlib import Path


def test_collectives(torchrun):
    torchrun(Path(__file__).with_name("collectives_ranks.py"))
