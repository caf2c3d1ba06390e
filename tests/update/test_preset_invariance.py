"""Every preset's step through Megatron's own train_step: the same loss, metrics and gradients in every layout."""

import pytest
import torch

TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
ONE_RANK = {f"micro-batch {n}": f"--micro-batch-size {n}" for n in (1, 2, 4)}
ONE_RANK["per token loss"] = "--micro-batch-size 2 --calculate-per-token-loss"
TWO_RANKS = {
    "PP2": f"{PP2} --micro-batch-size 2",
    "TP2": f"{TP2} --sequence-parallel --micro-batch-size 2",
    "DP2": "--micro-batch-size 2 --use-distributed-optimizer",
    "DP2 micro-batch 4": "--micro-batch-size 4",
}
# The rollout is far off policy, so bounds of a typical size leave next to no token: wider ones for gspo.
VARIANTS = {
    "dapo": {"algorithm": "dapo"},
    "dr-grpo": {"algorithm": "dr-grpo", "kl_loss_coef": 0.1, "entropy_coef": 0.05},
    "rloo": {"algorithm": "rloo"},
    "reinforce++": {"algorithm": "reinforce++", "dual_clip": 3.0},
    "gspo": {"algorithm": "gspo", "clip_low": 0.2, "clip_high": 0.3},
    "cispo": {"algorithm": "cispo"},
    "sapo": {"algorithm": "grpo", "loss": "sapo"},
    "truncated": {"algorithm": "gspo", "clip_low": 0.2, "clip_high": 0.3, "correction": "truncate"},
    "masked sequences": {
        "algorithm": "cispo",
        "correction": "mask",
        "correction_level": "sequence",
        "correction_low": 0.99,
        "correction_high": 1.02,
    },
}


@pytest.fixture(scope="module")
def layouts(run_cases):
    def run(ranks, flags):
        return run_cases("presets.py", ranks, {name: {"flags": f, "variants": VARIANTS} for name, f in flags.items()})

    return {**run(1, ONE_RANK), **run(2, TWO_RANKS)}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_preset_takes_the_same_step_in_every_layout(layouts, variant):
    want = layouts["micro-batch 1"][variant]
    assert want["grad_norm"] > 1e-3 and want["metrics"]["trained_tokens"] == 38
    for layout, found in layouts.items():
        got = found[variant]
        for name, value in want["metrics"].items():
            assert got["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), (layout, name)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4), layout
        assert set(got["gradients"]) == set(want["gradients"])
        for name, gradient in want["gradients"].items():
            limit = 1e-4 * float(gradient.abs().max())
            torch.testing.assert_close(
                got["gradients"][name], gradient, rtol=1e-4, atol=limit, msg=lambda m, n=(layout, name): f"{n}: {m}"
            )


@pytest.mark.slow
def test_the_variants_differ_from_each_other(layouts):
    """Were the flags lost on the way, all would agree."""
    norms = [found["grad_norm"] for found in layouts["micro-batch 1"].values()]
    assert len({round(norm, 6) for norm in norms}) == len(norms)
    measured = {name: found["metrics"] for name, found in layouts["micro-batch 1"].items()}
    assert 0 < measured["gspo"]["clip_fraction"] < 1 and 0 < measured["dapo"]["clip_fraction"] < 1
    assert 0 < measured["masked sequences"]["rollout_sequence_weight_outside"] < 1
