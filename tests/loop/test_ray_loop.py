"""The loop over every medium of the dock: the same training, bit for bit."""

from __future__ import annotations

import pytest

COMPARED = ("loss", "grad_norm", "reward/mean", "entropy", "kl/ref", "weights/digest")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_medium_trains_the_same(job, ranks):
    """One rank with "local" holds its rows in its own process; of two it is the first that holds those of both."""
    trained = {}
    for medium in ("local", "shm", "ray"):
        more = ("--train-iters", "3", "--lr", "3e-3", "--rl-verify-weights", "--rl-dock", medium)
        result = job(*more, name=medium, ranks=ranks).run(timeout=400 if medium == "ray" else 240)
        trained[medium] = [[line[k] for k in COMPARED] for line in result.metrics]
    assert len(trained["local"]) == 3 and all(line[1] > 1e-3 for line in trained["local"])
    assert trained["local"] == trained["shm"]
    assert trained["local"] == trained["ray"]
