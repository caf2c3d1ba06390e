"""Presets other than GRPO end to end: columns of their own, KL in the reward, whitening over ranks."""

import math

import pyarrow.parquet as pq
import pytest

PRESETS = {
    "gspo": (),
    "rloo": (),
    "reinforce++": (),
    "dapo": ("--rl-overlong-buffer", "4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_runs_end_to_end(job, preset):
    """Two passes over rollouts of two steps: the first starts at ratio 1, the later ones have moved."""
    more = ("--rl-algorithm", preset, *PRESETS[preset], "--train-iters", "4", "--rl-rollout-prompts", "8")
    run = job(*more, "--lr", "3e-3", "--rl-correction", "truncate").dumping()
    result = run.run()
    assert [line["iteration"] for line in result.metrics] == [1, 2, 3, 4]
    result.check_log_probs()
    for line in result.metrics:
        assert line["grad_norm"] > 1e-3 and all(math.isfinite(v) for v in line.values() if isinstance(v, float))
        if not line["rollout/stale"]:
            assert line["rollout/weight_mean"] == pytest.approx(1.0, abs=1e-5) and line["rollout/weight_outside"] == 0.0
    first, second, third, _ = result.metrics
    assert first["ratio/mean"] == first["ratio/max"] == 1.0 and third["ratio/max"] == 1.0
    assert second["ratio/max"] > 1.0
    # DAPO's second rollout begins with the groups that the first deferred, which older weights sampled.
    resumed = [line.get("sampling/brought", 0.0) for line in (first, third)]
    stale = [line["rollout/stale"] for line in result.metrics]
    assert stale[:2] == [0.0, 0.0] and (max(stale[2:]) > 0) == (resumed[1] > 0) == (preset == "dapo")
    assert ("kl/ref" in first) == (preset in ("rloo", "reinforce++"))
    assert ("seconds/logp_ref" in first) == (preset in ("rloo", "reinforce++"))

    rows = pq.read_table(run.save / "dump" / "rollout-000002.parquet").to_pylist()
    advantages = [[a for a in row["advantages"] if a] for row in rows]
    if preset == "reinforce++":
        # KL in the reward of each token: with a policy that has moved, tokens of a response differ.
        assert any(len(set(row)) > 1 for row in advantages)
        every = [a for row in rows for a in row["advantages"]]
        assert sum(every) / len(every) == pytest.approx(0.0, abs=1e-4)
        assert sum(a * a for a in every) / (len(every) - 1) == pytest.approx(1.0, rel=1e-3)
    else:
        assert all(len(set(row)) <= 1 for row in advantages)
