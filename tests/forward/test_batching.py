"""The plan of steps and micro-batches is a pure function of ids."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.forward.batching import TokenBudget, plan_batches, plan_tokens
from mindspeed_rl_plugin.rows import SampleId

pytestmark = pytest.mark.quick


def rollout(groups, members):
    return [SampleId(3, g, m) for g in range(groups) for m in range(members)]


@pytest.mark.parametrize(
    ("groups", "members", "global_batch", "micro_batch", "dp"),
    [(4, 4, 8, 2, 2), (4, 4, 16, 1, 1), (2, 8, 8, 4, 1), (6, 2, 4, 1, 4), (3, 1, 3, 1, 3), (8, 4, 32, 2, 4)],
)
def test_every_row_once_in_the_given_order(groups, members, global_batch, micro_batch, dp):
    ids = rollout(groups, members)
    steps = plan_batches(ids, global_batch_size=global_batch, micro_batch_size=micro_batch, dp_size=dp)
    assert [i for step in steps for i in step.ids] == ids
    for step in steps:
        assert len(step.micro_batches) == dp and len(step.ids) == global_batch
        for rank in range(dp):
            assert len(step.of_rank(rank)) == global_batch // micro_batch // dp
            assert all(len(batch) == micro_batch for batch in step.of_rank(rank))


def test_deal_out():
    (step,) = plan_batches(rollout(2, 4), global_batch_size=8, micro_batch_size=2, dp_size=2)
    members = [[[i.group * 4 + i.member for i in batch] for batch in rank] for rank in step.micro_batches]
    assert members == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize(
    ("ids", "sizes"),
    [
        (rollout(2, 4), (6, 2, 2)),
        (rollout(3, 4), (8, 2, 2)),
        ([], (8, 2, 2)),
        (rollout(2, 4) + rollout(1, 1), (1, 1, 1)),
    ],
)
def test_what_does_not_divide_or_occurs_twice_is_refused(ids, sizes):
    with pytest.raises(ValueError):
        plan_batches(ids, global_batch_size=sizes[0], micro_batch_size=sizes[1], dp_size=sizes[2])


few = settings(max_examples=60, deadline=None)


@few
@given(
    st.lists(st.integers(1, 50), min_size=2, max_size=40),
    st.integers(1, 4),
    st.integers(50, 120),
    st.booleans(),
    st.sampled_from([1, 2]),
)
def test_micro_batches_by_tokens_are_within_the_budget_and_balanced(sizes, dp_size, tokens, packed, multiple):
    sizes = sizes[: len(sizes) // dp_size * dp_size] or [1] * dp_size
    ids = [SampleId(0, i, 0) for i in range(len(sizes))]
    lengths = dict(zip(ids, sizes, strict=True))
    plain = plan_batches(ids, global_batch_size=len(ids), micro_batch_size=1, dp_size=dp_size)
    budget = TokenBudget(tokens, packed, multiple)
    (step,) = plan_tokens(plain, lengths, budget)
    assert plan_tokens(plain, dict(reversed(lengths.items())), budget) == [step], "a function of ids and lengths"
    assert step.ids == tuple(ids)
    ranks = [step.of_rank(rank) for rank in range(dp_size)]
    assert len({len(batches) for batches in ranks}) == 1, "as many micro-batches on every rank"
    assert {sum(map(len, batches)) for batches in ranks} == {len(ids) // dp_size}
    for batch in (batch for batches in ranks for batch in batches):
        rows = [lengths[i] for i in batch]
        padded = [-(-n // multiple) * multiple for n in ([sum(rows)] if packed else [max(rows)] * len(rows))]
        assert rows and sum(padded) <= tokens
    loads = [sum(lengths[i] for batch in batches for i in batch) for batches in ranks]
    assert max(loads) - min(loads) <= max(sizes), "by no more than one row"
    # No rank could do with fewer micro-batches everywhere: packed, the tokens of the fullest one say so.
    if packed and multiple == 1:
        assert len(ranks[0]) <= max(2 * -(-load // tokens) for load in loads)


def test_steps_keep_their_rows_and_interleaved_pipelines_get_whole_rounds():
    ids = [SampleId(0, i, 0) for i in range(16)]
    lengths = {i: 10 + i.group for i in ids}
    plain = plan_batches(ids, global_batch_size=8, micro_batch_size=2, dp_size=2)
    steps = plan_tokens(plain, lengths, TokenBudget(200, packed=True, rounds_of=2))
    assert [s.ids for s in steps] == [s.ids for s in plain]
    assert [len(s.of_rank(0)) for s in steps] == [2, 2], "one would do"
    with pytest.raises(ValueError, match="1 rows"):
        few = plan_batches(ids[:2], global_batch_size=2, micro_batch_size=1, dp_size=2)
        plan_tokens(few, lengths, TokenBudget(200, rounds_of=2))


def test_a_row_beyond_the_budget_is_named():
    ids = [SampleId(0, 0, 0), SampleId(0, 0, 1)]
    plain = plan_batches(ids, global_batch_size=2, micro_batch_size=1, dp_size=1)
    with pytest.raises(ValueError, match="31 tokens.*--rl-max-tokens-per-microbatch 31"):
        plan_tokens(plain, {ids[0]: 3, ids[1]: 31}, TokenBudget(31, multiple=2))
