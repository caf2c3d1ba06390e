"""PF-PPO's filtration in the loop: responses are resampled by their rewards before they are trained."""

import pytest

CASES = {
    "pf-ppo": ("--rl-algorithm", "pf-ppo"),
    "grpo-pow": ("--rl-filtration", "pow"),
    "grpo-whole-batch": ("--rl-filtration", "best-random", "--rl-filtration-whole-batch"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_was_drawn_is_trained_and_nothing_else(job, case):
    """Two optimizer steps per rollout: each trains as many responses as it has, some of them more than once."""
    lines = job(*CASES[case], "--train-iters", "2", "--rl-rollout-prompts", "8", "--lr", "3e-3").run().metrics
    first, second = lines
    assert first["trained/sequences"] == second["trained/sequences"] == 16
    assert 0 < first["filtration/distinct"] < 1 and first["ratio/mean"] == first["ratio/max"] == 1.0
    assert second["ratio/max"] > 1.0 and all(line["grad_norm"] > 1e-3 for line in lines)
    if case == "grpo-pow":
        assert first["filtration/reward_mean"] > first["reward/mean"], "large rewards are sampled more often"
