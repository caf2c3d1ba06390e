"""One saved rollout, one optimizer step: loss, grad norm and each gradient are the same in every layout.

Everything runs through Megatron's own train_step: its schedule, DDP, gradient finalisation, optimizer.
"""

import pytest
import torch
from checkouts import checkouts

TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
DIST = "--use-distributed-optimizer"


def case(micro_batch, flags="", **more):
    return {"flags": f"--micro-batch-size {micro_batch} {flags}", **more}


ONE_RANK = {
    "reference": case(1, mode="loops"),
    "micro-batch 1": case(1),
    "micro-batch 2": case(2),
    "micro-batch 4": case(4),
    "per token loss": case(2, "--calculate-per-token-loss"),
    "replayed": case(2, "--rerun-mode validate_results", mode="replay"),
    "dropped": case(2, mode="dropped"),
    "masked": case(2, mode="masked"),
    "filtered": case(2, mode="filtered"),
    "filtered chunks": case(2, mode="filtered", chunk=7, aggregation="token-mean"),
    "filtered per token": case(2, "--calculate-per-token-loss", mode="filtered", aggregation="token-mean"),
    "repeated": case(2, mode="repeated"),
    "repeated token-mean": case(2, mode="repeated", aggregation="token-mean"),
    "token-mean 1": case(1, aggregation="token-mean"),
    "token-mean 4": case(4, aggregation="token-mean"),
    "mean of means": case(4, aggregation="token-mean", mode="mean of means"),
    "chunks": case(2, chunk=7),
    "one chunk": case(4, chunk=1000),
    "dropped chunks": case(2, chunk=7, mode="dropped"),
    "tied": case(2, tied=True),
    "tied chunks": case(4, tied=True, chunk=7),
}
# Pipelines first: core 0.12 leaves groups behind that a later pipeline in the same process stumbles on.
TWO_RANKS = {
    "PP2": case(2, PP2),
    "PP2 chunks": case(2, PP2, chunk=7),
    "TP2": case(2, TP2),
    "DP2": case(2),
    "DP2 distributed optimizer": case(1, DIST),
    "DP2 filtered": case(2, mode="filtered"),
    "TP2 sequence parallel chunks": case(4, f"{TP2} --sequence-parallel", chunk=7),
    "CP2": case(2, CP2),
    "CP2 chunks, other split": case(4, f"{CP2} {DIST}", chunk=7, mode="contiguous"),
    "CP2 per token loss": case(4, f"{CP2} --calculate-per-token-loss", aggregation="token-mean", mode="plain"),
    "CP2 mean of ranks": case(4, CP2, aggregation="token-mean", mode="mean of ranks"),
}
MORE_ON_TWO_RANKS = {
    "PP2 VPP2": case(1, f"{PP2} --num-layers-per-virtual-pipeline-stage 1"),
    "PP2 VPP2 chunks": case(1, f"{PP2} --num-layers-per-virtual-pipeline-stage 1", chunk=7),
    "PP2 per token loss": case(1, f"{PP2} --calculate-per-token-loss"),
    "TP2 sequence parallel": case(4, f"{TP2} --sequence-parallel"),
    "DP2 micro-batch 4": case(4),
    "DP2 per token loss": case(2, "--calculate-per-token-loss"),
    "DP2 overlapped": case(1, f"{DIST} --overlap-grad-reduce --overlap-param-gather"),
    "TP2 chunks": case(2, TP2, chunk=7),
    "CP2 one row": case(1, f"{CP2} --calculate-per-token-loss"),
    "CP2 overlapped chunks": case(2, f"{CP2} {DIST} --overlap-grad-reduce --overlap-param-gather", chunk=7),
    "DP2 overlapped chunks": case(1, f"{DIST} --overlap-grad-reduce --overlap-param-gather", chunk=7),
}
TIED_ON_TWO_RANKS = {
    "tied PP2 chunks": case(2, PP2, tied=True, chunk=7),
    "tied TP2 sequence parallel chunks": case(2, f"{TP2} --sequence-parallel", tied=True, chunk=7),
}
FOUR_RANKS = {
    "CP2 PP2": case(2, f"{CP2} {PP2}"),
    "CP2 TP2 sequence parallel chunks": case(4, f"{CP2} {TP2} --sequence-parallel", chunk=7),
    "CP2 DP2 per token loss": case(2, f"{CP2} {DIST} --calculate-per-token-loss"),
    "CP2 DP2": case(1, CP2),
}
OTHER_AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "token-sum-norm")


ONE_RANK_SAME = ("micro-batch 1", "micro-batch 2", "micro-batch 4", "per token loss", "replayed", "chunks", "one chunk")


@pytest.fixture(scope="module")
def one_rank(run_cases):
    return run_cases("invariance.py", 1, ONE_RANK)


@pytest.fixture(scope="module")
def two_ranks(run_cases):
    return run_cases("invariance.py", 2, TWO_RANKS)


@pytest.mark.parametrize("name", ONE_RANK_SAME)
def test_one_rank(assert_same, one_rank, name):
    assert_same(one_rank[name], one_rank["reference"])
    assert "loss" in one_rank[name]["metrics"] and one_rank[name]["grad_norm"] > 0.1


@pytest.mark.parametrize("name", [name for name, c in TWO_RANKS.items() if "mode" not in c])
def test_two_ranks(assert_same, one_rank, two_ranks, name):
    assert_same(two_ranks[name], one_rank["reference"])
    assert_same(two_ranks[name], one_rank["micro-batch 1"])


def test_a_dropped_sample_is_trained_nowhere_and_counts_nowhere(assert_same, one_rank):
    dropped, masked = one_rank["dropped"], one_rank["masked"]
    assert_same(dropped, masked)
    assert dropped["metrics"]["trained/sequences"] == 6 and dropped["metrics"]["trained/tokens"] == 15
    assert_same(one_rank["dropped chunks"], masked)


def test_filtration_is_a_batch_of_what_was_drawn(assert_same, one_rank, two_ranks):
    """A row that counts three times is trained as three copies of it; one that was never sampled as no row at all."""
    repeated = one_rank["repeated"]
    assert repeated["metrics"]["trained/sequences"] == 7 and repeated["metrics"]["trained/tokens"] == 18
    assert_same(one_rank["filtered"], repeated)
    assert_same(two_ranks["DP2 filtered"], repeated)
    for name in ("filtered chunks", "filtered per token"):
        assert_same(one_rank[name], one_rank["repeated token-mean"])
    assert abs(repeated["grad_norm"] / one_rank["micro-batch 2"]["grad_norm"] - 1) > 1e-2


def test_a_tied_output_weight_gets_both_gradients(assert_same, one_rank):
    assert_same(one_rank["tied chunks"], one_rank["tied"])
    name = "embedding.word_embeddings.weight"
    assert not torch.allclose(one_rank["tied"]["gradients"][name], one_rank["chunks"]["gradients"][name], rtol=0.1)


def test_a_mean_of_micro_batch_means_would_be_caught(assert_same, one_rank):
    assert_same(one_rank["token-mean 4"], one_rank["token-mean 1"])
    with pytest.raises(AssertionError):
        assert_same(one_rank["mean of means"], one_rank["token-mean 1"])
    wrong, right = one_rank["mean of means"]["gradients"], one_rank["token-mean 1"]["gradients"]
    assert max(float((wrong[n] - right[n]).norm() / right[n].norm()) for n in right) > 0.05


def test_context_parallel_ranks_take_the_step_of_one(assert_same, one_rank, two_ranks):
    """Whatever the split, which is the host's: both ends of a row, or a piece of it as MindSpeed's ulysses has it."""
    assert_same(two_ranks["CP2 chunks, other split"], one_rank["micro-batch 1"])
    assert_same(two_ranks["CP2 per token loss"], one_rank["token-mean 1"])


def test_a_mean_of_the_means_of_context_parallel_ranks_would_be_caught(assert_same, one_rank, two_ranks):
    with pytest.raises(AssertionError):
        assert_same(two_ranks["CP2 mean of ranks"], one_rank["token-mean 1"])
    wrong, right = two_ranks["CP2 mean of ranks"]["gradients"], one_rank["token-mean 1"]["gradients"]
    assert max(float((wrong[n] - right[n]).norm() / right[n].norm()) for n in right) > 0.05


@pytest.mark.slow
def test_more_layouts(assert_same, run_cases, one_rank):
    for name, got in run_cases("invariance.py", 2, MORE_ON_TWO_RANKS).items():
        assert_same(got, one_rank["micro-batch 1"], name)
    for name, got in run_cases("invariance.py", 4, FOUR_RANKS).items():
        assert_same(got, one_rank["micro-batch 1"], name)
    for got in run_cases("invariance.py", 2, TIED_ON_TWO_RANKS).values():
        assert_same(got, one_rank["tied"])


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", OTHER_AGGREGATIONS)
def test_other_aggregations(assert_same, run_cases, aggregation):
    want = run_cases("invariance.py", 1, {"one": case(1, aggregation=aggregation)})["one"]
    layouts = {name: {**c, "aggregation": aggregation} for name, c in TWO_RANKS.items() if "mode" not in c}
    for got in run_cases("invariance.py", 2, layouts).values():
        assert_same(got, want)


@pytest.mark.upstream
@pytest.mark.slow
@pytest.mark.parametrize("checkout", checkouts(), ids=lambda path: path.name)
def test_other_megatron_versions(assert_same, run_cases, one_rank, checkout):
    """Each checkout named by MEGATRON_LM_PATH (several, separated as in PATH) scales alike, old rules or new."""
    # Core 0.12 ends a job after every replay, and replays only where it is asked to.
    replays = "_reduce_any" in (checkout / "megatron/core/rerun_state_machine.py").read_text()
    alone = {name: c for name, c in ONE_RANK.items() if replays or c.get("mode") != "replay"}
    for name, got in run_cases("invariance.py", 1, alone, checkout).items():
        assert_same(got, one_rank[name])
    pipelines = {name: c for name, c in {**TWO_RANKS, **MORE_ON_TWO_RANKS}.items() if name.startswith("PP2")}
    rest = {**TWO_RANKS, **MORE_ON_TWO_RANKS}.items()
    others = {name: c for name, c in rest if name not in pipelines and "mode" not in c}
    for name, got in run_cases("invariance.py", 2, {**pipelines, **others}, checkout).items():
        assert_same(got, one_rank["micro-batch 1"], name)
