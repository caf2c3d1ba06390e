"""DPO's step through Megatron's own train_step: the loss and gradients of plain loops over pairs, in every layout."""

import pytest

TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
VARIANTS = {
    "sigmoid": {"dpo_loss": "sigmoid", "dpo_beta": 0.1},
    "smoothed": {"dpo_loss": "sigmoid", "dpo_beta": 0.1, "dpo_label_smoothing": 0.2},
    "hinge": {"dpo_loss": "hinge", "dpo_beta": 0.1},
    "ipo": {"dpo_loss": "ipo", "dpo_beta": 0.3},
    "means": {"dpo_loss": "sigmoid", "dpo_beta": 2.0, "dpo_length_norm": True},
}


def case(micro_batch, flags="", **more):
    return {"flags": f"--micro-batch-size {micro_batch} {flags}", "variants": VARIANTS, **more}


# The loops, beside them on each rank alone, and what is cheap to run in the same processes.
DP2 = {
    "loops": case(2, mode="loops"),
    "micro-batch 2": case(2),
    "micro-batch 4, chunks": case(4, chunk=7),
    "per token loss": case(2, "--calculate-per-token-loss"),
    "forgotten": case(2, mode="forgotten ranks"),
}
ONE_RANK = {
    "loops": case(2, mode="loops"),
    "micro-batch 2": case(2),
    "micro-batch 4": case(4),
    "micro-batch 4, per token loss": case(4, "--calculate-per-token-loss"),
    "micro-batch 2, chunks": case(2, chunk=7),
}
# Pipelines first: core 0.12 leaves groups behind that a later pipeline in the same process stumbles on.
TWO_RANKS = {
    "PP2": case(2, PP2),
    "PP2 chunks": case(4, PP2, chunk=7),
    "PP2 per token loss": case(2, f"{PP2} --calculate-per-token-loss"),
    "PP2 VPP2": case(2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1"),
    "TP2": case(2, TP2),
    "TP2 chunks": case(4, TP2, chunk=7),
    "CP2": case(2, "--context-parallel-size 2"),
    "CP2 chunks": case(4, "--context-parallel-size 2 --use-distributed-optimizer", chunk=7),
    "CP2 per token loss": case(4, "--context-parallel-size 2 --calculate-per-token-loss"),
    "DP2 distributed optimizer": case(2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "DP2 micro-batch 4 per token loss": case(4, "--calculate-per-token-loss"),
}


@pytest.fixture(scope="module")
def data_parallel(run_cases):
    return run_cases("pairs.py", 2, DP2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_data_parallel_ranks_take_the_step_of_the_loops(assert_same, data_parallel, variant):
    """And a loss that does not reckon with their number would be seen: Megatron averages over them."""
    want = data_parallel["loops"][variant]
    assert want["grad_norm"] > 1e-2 and 0 < want["metrics"]["accuracy"] < 1
    for layout in ("micro-batch 2", "micro-batch 4, chunks", "per token loss"):
        assert_same(data_parallel[layout][variant], want, layout)
    forgotten = data_parallel["forgotten"][variant]["grad_norm"]
    assert forgotten == pytest.approx(want["grad_norm"] / 2, rel=1e-4)


def test_the_losses_differ(data_parallel):
    norms = [step["grad_norm"] for step in data_parallel["loops"].values()]
    assert len({round(norm, 4) for norm in norms}) == len(norms), "were the flags lost on the way, all would agree"


@pytest.mark.slow
def test_every_layout_takes_the_same_step(assert_same, run_cases):
    layouts = run_cases("pairs.py", 1, ONE_RANK)
    wanted = layouts["loops"]
    for layout, steps in {**layouts, **run_cases("pairs.py", 2, TWO_RANKS)}.items():
        assert set(steps) == set(VARIANTS)
        for variant, got in steps.items():
            assert_same(got, wanted[variant], (layout, variant))
