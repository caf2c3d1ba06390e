"""Micro-batches by tokens in the loop: old log-probs go through the update's own, so the first ratio is exactly 1."""

import pytest

BUDGET = ("--rl-max-tokens-per-microbatch", "48")
LAYOUTS = {
    "DP2": (),
    "DP2-packed": ("--rl-pack-sequences",),
    "TP2-packed": ("--rl-pack-sequences", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "PPO-packed": ("--rl-pack-sequences", "--rl-algorithm", "ppo", "--rl-critic-lr", "1e-3"),
    "PP2-packed": ("--rl-pack-sequences", "--pipeline-model-parallel-size", "2"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_by_tokens_is_the_step_by_rows(job, layout):
    common = ("--train-iters", "3", "--rl-rollout-prompts", "8", "--lr", "3e-3")
    rows = job(*common, *LAYOUTS[layout][1:], name="rows").run().metrics
    run = job(*common, *BUDGET, *LAYOUTS[layout], "--save-interval", "1", name="tokens")
    run.stop_at(1)
    result = run.run()  # goes on in the middle of the first rollout
    result.check_log_probs()
    tokens = result.metrics
    assert [line["iteration"] for line in tokens] == [1, 2, 3]
    for line in (tokens[0], tokens[2]):
        assert line["ratio/mean"] == line["ratio/max"] == 1.0 and line["clip_fraction"] == line["kl/old"] == 0.0
    assert tokens[1]["ratio/max"] > 1.0
    for name in ("loss", "grad_norm", "entropy", "trained/tokens", "reward/mean", "lr"):
        assert tokens[0][name] == pytest.approx(rows[0][name], rel=1e-4, abs=1e-7), name
