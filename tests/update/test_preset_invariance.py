"""Every preset's step through Megatron's own train_step: the same loss, metrics and gradients in every layout."""

import pytest

TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
ONE_RANK = {f"micro-batch {n}": f"--micro-batch-size {n}" for n in (1, 2, 4)}
ONE_RANK["per token loss"] = "--micro-batch-size 2 --calculate-per-token-loss"
TWO_RANKS = {
    "PP2": f"{PP2} --micro-batch-size 2",
    "TP2": f"{TP2} --sequence-parallel --micro-batch-size 2",
    "DP2": "--micro-batch-size 2 --use-distributed-optimizer",
    "DP2 micro-batch 4": "--micro-batch-size 4",
    "CP2": "--context-parallel-size 2 --micro-batch-size 2",
    "CP2 per token loss": "--context-parallel-size 2 --micro-batch-size 4 --calculate-per-token-loss",
}
# Micro-batches cut by tokens, some packed; --micro-batch-size only says how Megatron counts samples then. Rows have 4
# to 24 tokens, so micro-batches hold 1 to 6 of them.
BY_TOKENS = {
    "one rank, 40 tokens": (1, "--micro-batch-size 2", {"budget": 40}),
    "one rank, 40 tokens packed": (1, "--micro-batch-size 2", {"budget": 40, "packed": True}),
    "one rank, packed in one, chunks": (1, "--micro-batch-size 1", {"budget": 200, "packed": True, "chunk": 7}),
    "one rank, 40 tokens by boundaries": (
        *(1, "--micro-batch-size 2"),
        {"budget": 40, "packed": True, "bounded": True},
    ),
    "DP2, 30 tokens": (2, "--micro-batch-size 2", {"budget": 30}),
    "DP2, 30 tokens packed, per token": (
        *(2, "--micro-batch-size 4 --calculate-per-token-loss"),
        {"budget": 30, "packed": True},
    ),
    "TP2, 32 tokens packed": (2, f"{TP2} --sequence-parallel --micro-batch-size 2", {"budget": 32, "packed": True}),
    "TP2, 32 tokens by boundaries": (
        *(2, f"{TP2} --sequence-parallel --micro-batch-size 2"),
        {"budget": 32, "packed": True, "bounded": True},
    ),
    "CP2, 40 tokens": (2, "--context-parallel-size 2 --micro-batch-size 2", {"budget": 40}),
    "PP2, 28 tokens": (2, f"{PP2} --micro-batch-size 2", {"budget": 28}),
    "PP2, 32 tokens packed": (2, f"{PP2} --micro-batch-size 2", {"budget": 32, "packed": True}),
}
FEW = (
    *("one rank, 40 tokens", "one rank, 40 tokens packed", "one rank, packed in one, chunks"),
    "one rank, 40 tokens by boundaries",
)
# The rollout is far off policy, so bounds of a typical size leave next to no token: wider ones for gspo.
VARIANTS = {
    "dapo": {"algorithm": "dapo"},
    "dr-grpo": {"algorithm": "dr-grpo", "kl_loss_coef": 0.1, "entropy_coef": 0.05},
    "rloo": {"algorithm": "rloo"},
    "reinforce++": {"algorithm": "reinforce++", "dual_clip": 3.0},
    "gspo": {"algorithm": "gspo", "clip_low": 0.2, "clip_high": 0.3},
    "cispo": {"algorithm": "cispo"},
    "sapo": {"algorithm": "grpo", "loss": "sapo"},
    "pf-ppo": {"algorithm": "pf-ppo", "times": (2, 0, 0, 1, 0, 2, 2, 1)},  # rows of each group, sampled four times
    "truncated": {"algorithm": "gspo", "clip_low": 0.2, "clip_high": 0.3, "correction": "truncate"},
    "masked sequences": {
        "algorithm": "cispo",
        "correction": "mask",
        "correction_level": "sequence",
        "correction_low": 0.99,
        "correction_high": 1.02,
    },
    "masked by geometric means": {
        "algorithm": "dapo",
        "correction": "mask",
        "correction_level": "geometric",
        "correction_low": 0.997,
        "correction_high": 1.003,
    },
}


@pytest.fixture(scope="module")
def layouts(run_cases):
    def run(ranks, flags):
        return run_cases("presets.py", ranks, {name: {"flags": f, "variants": VARIANTS} for name, f in flags.items()})

    return {**run(1, ONE_RANK), **run(2, TWO_RANKS)}


def by_tokens(run_cases, names, variants):
    """{layout: {variant: what it did}}; pipelines first, for core 0.12 leaves groups of them behind."""
    results = {}
    for ranks in (1, 2):
        cases = {n: {"flags": f, "variants": variants, **how} for n, (r, f, how) in BY_TOKENS.items() if r == ranks}
        order = sorted((n for n in cases if n in names), key=lambda n: not n.startswith("PP"))
        results |= run_cases("presets.py", ranks, {n: cases[n] for n in order}) if order else {}
    return results


def test_micro_batches_by_tokens_and_packed_take_the_same_step(assert_same, run_cases):
    """One preset that sees whole sequences, one that averages over tokens; the slow tier has all of them."""
    few = {name: VARIANTS[name] for name in ("gspo", "dapo", "pf-ppo")}
    one = {"plain": {"flags": ONE_RANK["micro-batch 1"], "variants": few}}
    cases = {name: {"flags": BY_TOKENS[name][1], "variants": few, **BY_TOKENS[name][2]} for name in FEW}
    layouts = run_cases("presets.py", 1, one | cases)
    want = layouts.pop("plain")
    assert all(sum(steps["dapo"]["sizes"]) == 8 for steps in layouts.values())
    assert [len(layouts[name]["dapo"]["sizes"]) for name in FEW[1:]] == [2, 1, 2], "as the tokens allow"
    handed = layouts[FEW[-1]]["dapo"]["boundaries"]
    assert len(handed) == 2 * 4 and all(ends[0] == 0 and ends[-1] == length for ends, length in handed)
    assert sorted({len(ends) - 1 for ends, _ in handed}) == sorted(set(layouts[FEW[-1]]["dapo"]["sizes"]))
    for layout, steps in layouts.items():
        for variant, got in steps.items():
            assert_same(got, want[variant], (layout, variant))


@pytest.mark.slow
def test_every_preset_by_tokens_and_packed(assert_same, run_cases, layouts):
    for layout, steps in by_tokens(run_cases, BY_TOKENS, VARIANTS).items():
        for variant, got in steps.items():
            assert_same(got, layouts["micro-batch 1"][variant], (layout, variant))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_preset_takes_the_same_step_in_every_layout(assert_same, layouts, variant):
    want = layouts["micro-batch 1"][variant]
    tokens = 18 if variant == "pf-ppo" else 29  # without the holes of conftest.py
    assert want["grad_norm"] > 1e-3 and want["metrics"]["trained/tokens"] == tokens
    for layout, steps in layouts.items():
        assert_same(steps[variant], want, layout)


@pytest.mark.slow
def test_the_variants_differ_from_each_other(layouts):
    """Were the flags lost on the way, all would agree."""
    norms = [step["grad_norm"] for step in layouts["micro-batch 1"].values()]
    assert len({round(norm, 6) for norm in norms}) == len(norms)
    measured = {name: step["metrics"] for name, step in layouts["micro-batch 1"].items()}
    assert 0 < measured["gspo"]["clip_fraction"] < 1 and 0 < measured["dapo"]["clip_fraction"] < 1
    assert 0 < measured["masked sequences"]["rollout/sequence_weight_outside"] < 1
    assert 0 < measured["masked by geometric means"]["rollout/geometric_weight_outside"] < 1
