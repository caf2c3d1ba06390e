"""The plan of steps and micro-batches is a pure function of ids."""

import random

import pytest

from mindspeed_rl_plugin.forward.batching import plan_batches
from mindspeed_rl_plugin.types import SampleId


def rollout(groups, members):
    return [SampleId(3, g, m) for g in range(groups) for m in range(members)]


@pytest.mark.parametrize(
    ("groups", "members", "global_batch", "micro_batch", "dp"),
    [(4, 4, 8, 2, 2), (4, 4, 16, 1, 1), (2, 8, 8, 4, 1), (6, 2, 4, 1, 4), (3, 1, 3, 1, 3), (8, 4, 32, 2, 4)],
)
def test_every_row_once_in_id_order(groups, members, global_batch, micro_batch, dp):
    ids = rollout(groups, members)
    steps = plan_batches(ids, global_batch_size=global_batch, micro_batch_size=micro_batch, dp_size=dp)
    assert [i for step in steps for i in step.ids] == ids
    for step in steps:
        assert len(step.micro_batches) == dp and len(step.ids) == global_batch
        for rank in range(dp):
            assert len(step.of_rank(rank)) == global_batch // micro_batch // dp
            assert all(len(batch) == micro_batch for batch in step.of_rank(rank))


def test_arrival_order_does_not_matter():
    ids = rollout(4, 4)
    sizes = {"global_batch_size": 8, "micro_batch_size": 2, "dp_size": 2}
    want = plan_batches(ids, **sizes)
    random.Random(0).shuffle(ids)
    assert plan_batches(ids, **sizes) == want


def test_deal_out():
    (step,) = plan_batches(rollout(2, 4), global_batch_size=8, micro_batch_size=2, dp_size=2)
    members = [[[i.group * 4 + i.member for i in batch] for batch in rank] for rank in step.micro_batches]
    assert members == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize(
    ("ids", "sizes", "message"),
    [
        (rollout(2, 4), (6, 2, 2), "6 is not a multiple of --micro-batch-size 2 x 2 data parallel ranks"),
        (rollout(3, 4), (8, 2, 2), "a rollout of 12 rows does not fill steps of --global-batch-size 8"),
        ([], (8, 2, 2), "a rollout of 0 rows"),
        (rollout(2, 4) + rollout(1, 1), (1, 1, 1), "1 of 9 ids occur twice"),
    ],
)
def test_what_does_not_divide_is_refused(ids, sizes, message):
    with pytest.raises(ValueError) as error:
        plan_batches(ids, global_batch_size=sizes[0], micro_batch_size=sizes[1], dp_size=sizes[2])
    assert message in str(error.value)
