"""One rollout, one optimizer step: loss, metrics, gradient norm and each gradient are the same in every layout,
and those of plain loops.

Everything runs through Megatron's own train_step: its schedule, DDP, gradient finalisation, optimizer.
"""

import json
from pathlib import Path

import pytest
import torch
from checkouts import checkouts

TP2 = "--tensor-model-parallel-size 2"
SP2 = f"{TP2} --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
CP2 = "--context-parallel-size 2"
DIST = "--use-distributed-optimizer"
OVERLAP = f"{DIST} --overlap-grad-reduce --overlap-param-gather"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PER_TOKEN = "--calculate-per-token-loss"

GRPO = {"algorithm": "grpo", "kl_loss_coef": 0.1, "kl_estimator": "k3-unbiased", "entropy_coef": 0.05}
LOOPS = {"grpo": GRPO}
MEAN = {"token-mean": {**GRPO, "aggregation": "token-mean"}}
# The rollout is far off policy, so bounds of a typical size leave next to no token: wider ones for gspo.
WIDE = {"algorithm": "gspo", "clip_low": 0.2, "clip_high": 0.3}
FEW = {"gspo": WIDE, "dapo": {"algorithm": "dapo"}, "pf-ppo": {"algorithm": "pf-ppo"}}
SEQUENCES = {"correction_level": "sequence", "correction_low": 0.99, "correction_high": 1.02}
GEOMETRIC = {"correction_level": "geometric", "correction_low": 0.997, "correction_high": 1.003}
PRESETS = FEW | {
    "dr-grpo": {"algorithm": "dr-grpo", "kl_loss_coef": 0.1, "entropy_coef": 0.05},
    "rloo": {"algorithm": "rloo"},
    "reinforce++": {"algorithm": "reinforce++", "dual_clip": 3.0},
    "cispo": {"algorithm": "cispo"},
    "sapo": {"algorithm": "grpo", "loss": "sapo"},
    "truncated": {**WIDE, "correction": "truncate"},
    "masked sequences": {"algorithm": "cispo", "correction": "mask", **SEQUENCES},
    "masked by geometric means": {"algorithm": "dapo", "correction": "mask", **GEOMETRIC},
}
CRITIC = {"ppo": {"algorithm": "ppo"}}
PAIRS = {
    "sigmoid": {"dpo_loss": "sigmoid", "dpo_beta": 0.1},
    "smoothed": {"dpo_loss": "sigmoid", "dpo_beta": 0.1, "dpo_label_smoothing": 0.2},
    "hinge": {"dpo_loss": "hinge", "dpo_beta": 0.1},
    "ipo": {"dpo_loss": "ipo", "dpo_beta": 0.3},
    "means": {"dpo_loss": "sigmoid", "dpo_beta": 2.0, "dpo_length_norm": True},
}
PAIRS = {name: {"algorithm": "dpo", **fields} for name, fields in PAIRS.items()}
TREES = {"budget": 40, "packed": True, "shared": True}


def case(micro_batch, flags="", variants=LOOPS, want="plain", **more):
    """want: the case whose steps it takes; more: as ranks/steps.py reads it."""
    return {"flags": f"--micro-batch-size {micro_batch} {flags}", "variants": variants, "want": want, **more}


ONE_RANK = {
    "loops": case(1, want=None, mode="loops"),
    "plain": case(1, variants=LOOPS | MEAN | FEW, want="loops"),
    "micro-batch 2": case(2),
    "micro-batch 4": case(4, variants=LOOPS | MEAN),
    "per token loss": case(2, PER_TOKEN),
    "replayed": case(2, "--rerun-mode validate_results", mode="replay"),
    "masked": case(2, want=None, rows="masked"),
    "dropped": case(2, want="masked", rows="dropped"),
    "dropped chunks": case(2, want="masked", rows="dropped", chunk=7),
    "repeated": case(2, variants=LOOPS | MEAN, want=None, rows="repeated"),
    "filtered": case(2, variants=LOOPS | MEAN, want="repeated", rows="filtered"),
    "filtered chunks": case(2, variants=MEAN, want="repeated", rows="filtered", chunk=7),
    "filtered per token": case(2, PER_TOKEN, variants=MEAN, want="repeated", rows="filtered"),
    "mean of means": case(4, variants=MEAN, want=None, mode="mean of means"),
    "chunks": case(2, chunk=7),
    "one chunk": case(4, chunk=1000),
    "tied": case(2, want=None, tied=True),
    "tied chunks": case(4, want="tied", tied=True, chunk=7),
    "40 tokens": case(2, variants=FEW, budget=40),
    "40 tokens packed": case(2, variants=FEW, budget=40, packed=True),
    "40 tokens packed, recompute": case(2, RECOMPUTE, variants=FEW, budget=40, packed=True),
    "packed in one, chunks": case(1, variants=FEW, budget=200, packed=True, chunk=7),
    "40 tokens by boundaries": case(2, variants=FEW, budget=40, packed=True, bounded=True),
    "40 tokens of trees, recompute": case(2, RECOMPUTE, variants=FEW, **TREES),
    "critic": case(4, variants=CRITIC, want=None, critic=True),
    "critic repeated": case(4, variants=CRITIC, want=None, critic=True, rows="repeated"),
    "critic filtered": case(2, variants=CRITIC, want="critic repeated", critic=True, rows="filtered"),
    "critic filtered packed": case(
        2, PER_TOKEN, CRITIC, "critic repeated", critic=True, rows="filtered", budget=40, packed=True
    ),
    "critic filtered trees": case(2, PER_TOKEN, CRITIC, "critic repeated", critic=True, rows="filtered", **TREES),
}
# Pipelines first: core 0.12 leaves groups behind that a later pipeline in the same process stumbles on.
TWO_RANKS = {
    "PP2": case(2, PP2),
    "PP2 chunks": case(2, PP2, chunk=7),
    "TP2": case(2, TP2),
    "DP2": case(2),
    "DP2 distributed optimizer": case(1, DIST),
    "DP2 filtered": case(2, want="repeated", rows="filtered"),
    "TP2 sequence parallel chunks": case(4, SP2, chunk=7),
    "TP2 sequence parallel trees": case(2, SP2, **TREES),
    "CP2": case(2, CP2),
    "CP2 chunks, other split": case(4, f"{CP2} {DIST}", chunk=7, mode="contiguous"),
    "CP2 per token loss": case(4, f"{CP2} {PER_TOKEN}", variants=MEAN),
    "CP2 mean of ranks": case(4, CP2, variants=MEAN, want=None, mode="mean of ranks"),
    "pairs by loops": case(2, variants=PAIRS, want=None, mode="loops"),
    "pairs": case(2, variants=PAIRS, want="pairs by loops"),
    "pairs, chunks": case(4, variants=PAIRS, want="pairs", chunk=7),
    "pairs, per token loss": case(2, PER_TOKEN, PAIRS, want="pairs"),
    "pairs, packed": case(2, variants=PAIRS, want="pairs", budget=40, packed=True),
    "pairs, ranks forgotten": case(2, variants=PAIRS, want=None, mode="forgotten ranks"),
}
ORDINARY = {**ONE_RANK, **TWO_RANKS}

AGGREGATIONS = {name: {**GRPO, "aggregation": name} for name in ("token-mean", "seq-mean-token-sum", "token-sum-norm")}
# ranks -> layouts of all variants; those of `MORE` are of few.
LAYOUTS = {
    1: {
        "micro-batch 2": case(2),
        "micro-batch 4, per token loss": case(4, PER_TOKEN),
        "40 tokens packed": case(2, budget=40, packed=True),
        "packed in one, chunks": case(1, budget=200, packed=True, chunk=7),
        "40 tokens by boundaries": case(2, budget=40, packed=True, bounded=True),
        "40 tokens of trees": case(2, **TREES),
    },
    2: {
        "PP2": case(2, PP2),
        "PP2, 28 tokens": case(2, PP2, budget=28),
        "PP2, 32 tokens packed": case(2, PP2, budget=32, packed=True),
        "PP2, trees": case(2, PP2, **TREES),
        "TP2": case(2, SP2),
        "TP2, 32 tokens packed": case(2, SP2, budget=32, packed=True),
        "TP2, trees": case(2, SP2, **TREES),
        "TP2, 32 tokens by boundaries": case(2, SP2, budget=32, packed=True, bounded=True),
        "DP2": case(2, DIST),
        "DP2, 30 tokens": case(2, budget=30),
        "DP2, 30 tokens packed, per token": case(4, PER_TOKEN, budget=30, packed=True),
        "DP2, trees": case(4, f"{DIST} {PER_TOKEN}", **TREES),
        "CP2": case(2, CP2),
        "CP2 per token loss": case(4, f"{CP2} {PER_TOKEN}"),
        "CP2, 40 tokens": case(2, CP2, budget=40),
    },
}
MORE = {
    2: {
        "PP2 VPP2": case(1, VPP2),
        "PP2 VPP2 chunks": case(2, VPP2, chunk=7),
        "PP2 VPP2 trees": case(2, VPP2, **TREES),
        "PP2 per token loss": case(1, f"{PP2} {PER_TOKEN}"),
        "tied PP2 chunks": case(2, PP2, want="tied", tied=True, chunk=7),
        "tied TP2 chunks": case(2, SP2, want="tied", tied=True, chunk=7),
        "TP2 chunks": case(2, TP2, chunk=7),
        "DP2 micro-batch 4, per token loss": case(4, PER_TOKEN),
        "DP2 overlapped": case(1, OVERLAP),
        "DP2 overlapped chunks": case(1, OVERLAP, chunk=7),
        "CP2 one row": case(1, f"{CP2} {PER_TOKEN}"),
        "CP2 overlapped chunks": case(2, f"{CP2} {OVERLAP}", chunk=7),
    },
    4: {
        "CP2 PP2": case(2, f"{CP2} {PP2}"),
        "CP2 TP2 chunks": case(4, f"{CP2} {SP2}", chunk=7),
        "CP2 DP2 per token loss": case(2, f"{CP2} {DIST} {PER_TOKEN}"),
        "CP2 DP2": case(1, CP2),
    },
}


def crossed(layouts, variants):
    """Each layout with policy, critic and pairs; pairs are not cut by tokens, and they have two rows."""
    cases = {}
    for name, one in layouts.items():
        cases[name] = {**one, "variants": variants}
        if not one.get("tied"):
            cases[f"{name}, critic"] = {**one, "variants": CRITIC, "critic": True, "want": "critic"}
        if "budget" not in one and not one.get("tied"):
            flags = one["flags"].replace("--micro-batch-size 1 ", "--micro-batch-size 2 ")
            cases[f"{name}, pairs"] = {**one, "flags": flags, "variants": PAIRS, "want": "pairs"}
    return cases


def assert_same(got, want, where=""):
    """Metrics, gradient norm and every gradient of a step agree to 1e-4."""
    for name, value in want["metrics"].items():
        assert got["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), (where, name)
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4), where
    assert set(got["gradients"]) == set(want["gradients"])
    pieces = {name: (got["gradients"][name], gradient) for name, gradient in want["gradients"].items()}
    if "values" in want:
        pieces["values"] = got["values"], want["values"]
    for name, (mine, theirs) in pieces.items():
        limit = 1e-4 * float(theirs.abs().max())
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=limit, msg=lambda m, n=(where, name): f"{n}: {m}")


def assert_as_wanted(cases, steps, wanted):
    """The steps of each case are those of the case that it names."""
    for name in (name for name, one in cases.items() if one["want"]):
        same = steps[name].keys() & wanted[cases[name]["want"]].keys()
        assert same
        for variant in same:
            assert_same(steps[name][variant], wanted[cases[name]["want"]][variant], (name, variant))


def apart(one, other):
    """The largest difference of a gradient, as a share of it."""
    wrong, right = one["gradients"], other["gradients"]
    return max(float((wrong[n] - right[n]).norm() / right[n].norm()) for n in right)


@pytest.fixture(scope="module")
def run_cases(tmp_path_factory, torchrun):
    """`run_cases(ranks, cases, checkout=None)` -> {case: {variant: its step}}."""

    def run(ranks, cases, checkout=None):
        folder = tmp_path_factory.mktemp("steps")
        (folder / "cases.json").write_text(json.dumps(cases))
        other = {"PYTHONPATH": str(checkout), "cold": True} if checkout else {}
        torchrun(Path(__file__).with_name("ranks") / "steps.py", folder, ranks=ranks, timeout=900, **other)
        return {name: torch.load(folder / f"{name}.pt") for name in cases}

    return run


@pytest.fixture(scope="module")
def steps(run_cases):
    return {**run_cases(1, ONE_RANK), **run_cases(2, TWO_RANKS)}


@pytest.mark.parametrize("name", [name for name, one in ORDINARY.items() if one["want"]])
def test_a_layout_takes_the_step_of_another(steps, name):
    assert_as_wanted({name: ORDINARY[name]}, steps, steps)
    assert all(step["grad_norm"] > 1e-3 for step in steps[name].values())


def test_rows_that_are_trained_nowhere_count_nowhere_and_others_as_often_as_they_were_drawn(steps):
    counts = {"dropped": (6, 15), "filtered": (7, 18), "plain": (7, 29)}  # without the holes of ranks/steps.py
    for name, (sequences, tokens) in counts.items():
        metrics = steps[name]["grpo"]["metrics"]
        assert (metrics["trained/sequences"], metrics["trained/tokens"]) == (sequences, tokens)
    for changed, plain in (("repeated", "plain"), ("critic repeated", "critic")):
        for variant in steps[changed].keys() & steps[plain].keys():
            assert abs(steps[changed][variant]["grad_norm"] / steps[plain][variant]["grad_norm"] - 1) > 1e-2


@pytest.mark.parametrize("wrong", ["mean of means", "CP2 mean of ranks"])
def test_a_mean_of_means_of_micro_batches_or_ranks_would_be_caught(steps, wrong):
    assert apart(steps[wrong]["token-mean"], steps["plain"]["token-mean"]) > 0.05


def test_a_loss_of_pairs_that_does_not_reckon_with_the_ranks_would_be_caught(steps):
    """Megatron averages over them."""
    for variant, right in steps["pairs"].items():
        wrong = steps["pairs, ranks forgotten"][variant]
        assert wrong["grad_norm"] == pytest.approx(right["grad_norm"] / 2, rel=1e-4)
        assert 0 < right["metrics"]["dpo/accuracy"] < 1


def test_a_tied_output_weight_gets_both_gradients(steps):
    name = "model.embed_tokens.weight"
    tied, plain = (steps[case]["grpo"]["gradients"][name] for case in ("tied", "chunks"))
    assert not torch.allclose(tied, plain, rtol=0.1)


def test_micro_batches_are_as_the_tokens_allow_and_the_attention_is_handed_their_boundaries(steps):
    packed = ("40 tokens packed", "packed in one, chunks", "40 tokens by boundaries")
    assert [len(steps[name]["dapo"]["sizes"]) for name in packed] == [2, 1, 2]
    assert all(sum(steps[name]["dapo"]["sizes"]) == 8 for name in ("40 tokens", *packed))
    bounded = steps["40 tokens by boundaries"]["dapo"]
    assert len(bounded["boundaries"]) == 2 * 4
    assert all(ends[0] == 0 and ends[-1] == length for ends, length in bounded["boundaries"])
    assert {len(ends) - 1 for ends, _ in bounded["boundaries"]} == set(bounded["sizes"])


def test_the_critic_clips_and_learns_its_head(steps):
    step = steps["critic"]["ppo"]
    assert 0 < step["metrics"]["critic/clip_fraction"] < 1 and step["values"].abs().max() > 0.5
    assert step["gradients"]["lm_head.weight"].abs().max() > 1e-3


def test_the_variants_differ_from_each_other(steps):
    """Were the flags lost on the way, all would agree."""
    for name in ("plain", "pairs by loops"):
        norms = [step["grad_norm"] for step in steps[name].values()]
        assert len({round(norm, 4) for norm in norms}) == len(norms)


@pytest.fixture(scope="module")
def wanted(run_cases, steps):
    variants = LOOPS | PRESETS | AGGREGATIONS
    more = {"plain": case(1, variants=variants), "tied": case(2, tied=True, variants=variants)}
    return {**steps, **run_cases(1, more)}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_variant_takes_the_same_step_in_every_layout(run_cases, wanted, ranks):
    cases = crossed(LAYOUTS[ranks], PRESETS | AGGREGATIONS)
    assert_as_wanted(cases, run_cases(ranks, cases), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", MORE)
def test_more_layouts(run_cases, wanted, ranks):
    cases = crossed(MORE[ranks], LOOPS)
    assert_as_wanted(cases, run_cases(ranks, cases), wanted)


@pytest.mark.slow
def test_the_presets_differ_from_each_other_and_their_bounds_bite(wanted):
    norms = [wanted["plain"][name]["grad_norm"] for name in PRESETS]
    assert min(norms) > 1e-3 and len({round(norm, 6) for norm in norms}) == len(norms)
    metrics = {name: step["metrics"] for name, step in wanted["plain"].items()}
    assert 0 < metrics["gspo"]["clip_fraction"] < 1 and 0 < metrics["dapo"]["clip_fraction"] < 1
    assert 0 < metrics["masked sequences"]["rollout/sequence_weight_outside"] < 1
    assert 0 < metrics["masked by geometric means"]["rollout/geometric_weight_outside"] < 1


@pytest.mark.upstream
@pytest.mark.slow
@pytest.mark.parametrize("checkout", checkouts(), ids=lambda path: path.name)
def test_other_megatron_versions(run_cases, steps, checkout):
    """Each checkout named by MEGATRON_LM_PATH (several, separated as in PATH) scales alike, old rules or new."""
    # Core 0.12 ends a job after every replay, and replays only where it is asked to.
    replays = "_reduce_any" in (checkout / "megatron/core/rerun_state_machine.py").read_text()
    alone = {name: one for name, one in ONE_RANK.items() if replays or one.get("mode") != "replay"}
    for name, got in run_cases(1, alone, checkout).items():
        for variant, step in got.items():
            assert_same(step, steps[name][variant], (name, variant))
    both = {name: one for name, one in {**MORE[2], **TWO_RANKS}.items() if "mode" not in one and one["want"] == "plain"}
    assert_as_wanted(both, run_cases(2, dict(sorted(both.items(), key=lambda c: "PP2" not in c[0])), checkout), steps)
