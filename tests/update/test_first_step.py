"""The first update of a rollout starts at ratio 1 to the last bit: old log-probs use its own micro-batches."""

import pytest
import torch

ONE_RANK = {"one": {"flags": "--micro-batch-size 2"}, "chunks": {"flags": "--micro-batch-size 2", "chunk": 7}}
TWO_RANKS = {
    "PP2": {"flags": "--pipeline-model-parallel-size 2 --micro-batch-size 2"},
    "TP2": {"flags": "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 2"},
    "DP2": {"flags": "--micro-batch-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"},
    "CP2": {"flags": "--context-parallel-size 2 --micro-batch-size 2"},
    "CP2 chunks": {"flags": "--context-parallel-size 2 --micro-batch-size 2 --use-distributed-optimizer", "chunk": 7},
    "TP2 chunks": {"flags": "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 2", "chunk": 7},
}


@pytest.fixture(scope="module")
def runs(run_cases):
    return {**run_cases("first_step.py", 1, ONE_RANK), **run_cases("first_step.py", 2, TWO_RANKS)}


@pytest.mark.parametrize("name", [*ONE_RANK, *TWO_RANKS])
def test_first_ratio_is_exactly_one(runs, name):
    first, second = runs[name]["metrics"]
    assert first["ratio/mean"] == first["ratio/min"] == first["ratio/max"] == 1.0
    assert first["clip_fraction"] == 0.0
    assert first["kl/old"] == 0.0 and abs(first["kl/ref"]) < 1e-8
    assert first["trained/tokens"] == 29 and first["trained/sequences"] == 7
    # The same rows after one step: had the step done nothing, the above would prove nothing.
    assert second["ratio/max"] > 1.01 and second["ratio/min"] < 0.99 and second["kl/ref"] > 1e-4


@pytest.mark.parametrize("name", TWO_RANKS)
def test_logps_are_the_same_in_every_layout(runs, rollout, name):
    for when in ("before", "after"):
        want, got = runs["one"][when], runs[name][when]
        assert list(want) == [tuple(i) for i in rollout.ids] and set(got) == set(want)
        for sample, row in want.items():
            torch.testing.assert_close(got[sample], row, rtol=1e-3 if when == "after" else 1e-5, atol=1e-4)
    moved = max(float((runs["one"]["after"][i] - row).abs().max()) for i, row in runs["one"]["before"].items())
    assert moved > 0.05


def test_logps_are_zero_where_nothing_is_trained(runs, rollout):
    for i, sample in enumerate(rollout.ids):
        row, mask = runs["one"]["before"][tuple(sample)], rollout["loss_mask"].row(i).bool()
        assert (row[~mask] == 0).all() and (row[mask] < 0).all()
