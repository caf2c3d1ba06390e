"""The plan of steps and micro-batches is a pure function of ids, lengths and what rows have in common."""

import hashlib
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.forward.batching import TokenBudget, plan_batches, plan_tokens
from mindspeed_rl_plugin.forward.fragments import Trees, common_tokens
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


def test_without_sharing_plans_are_those_of_before():
    """Of commit 85ce3cf2, which knew no trees."""
    ids = rollout(24, 4)
    lengths = {i: 1 + (37 * i.group + 101 * i.member) % 89 for i in ids}
    plain = plan_batches(ids, global_batch_size=48, micro_batch_size=2, dp_size=4)
    near = {i: {2 * (i.group % 2), 2 * (i.group % 2) + 1} for i in ids}
    budgets = [(TokenBudget(256, packed, 8, rounds), n) for packed in (0, 1) for rounds in (1, 3) for n in (None, near)]
    plans = [[list(map(list, s.micro_batches)) for s in plan_tokens(plain, lengths, *each)] for each in budgets]
    assert hashlib.sha256(repr(plans).encode()).hexdigest()[:16] == "a13390c4e657207f"


def trie(rows):
    """Nodes of the tree of rows: their different beginnings."""
    return len({tuple(row[: n + 1]) for row in rows for n in range(len(row))})


def planned(tokens, budget, dp_size=1, near=None):
    """The only step's micro-batches, by rank. tokens: id -> its tokens."""
    ids = sorted(tokens)
    groups = {g: [np.array(tokens[i]) for i in rows] for g, rows in groupby(ids, key=lambda i: i[:2])}
    common = {group: common_tokens(rows) for group, rows in groups.items()}
    lengths = {i: len(tokens[i]) for i in ids}
    plain = plan_batches(ids, global_batch_size=len(ids), micro_batch_size=1, dp_size=dp_size)
    (step,) = plan_tokens(plain, lengths, budget, near, common)
    turned = [dict(reversed(each.items())) for each in (lengths, common)]
    assert plan_tokens(plain, turned[0], budget, near, turned[1]) == [step], "the same on every rank"
    assert step.ids == tuple(ids), "every row once"
    assert len({len(batches) for batches in step.micro_batches}) == 1, "as many micro-batches on every rank"
    assert {sum(map(len, batches)) for batches in step.micro_batches} == {len(ids) // dp_size}
    trees = Trees(lengths, common)
    for batch in (batch for batches in step.micro_batches for batch in batches):
        real = sum(trie([tokens[i] for i in rows]) for _, rows in groupby(batch, key=lambda i: i[:2]))
        assert trees.tokens(batch) == real and budget.cost([real]) <= budget.tokens and batch == tuple(sorted(batch))
    return step.micro_batches


def a_group(number, prompt, *responses):
    """Rows with a common prompt; no two responses begin alike."""
    return {SampleId(0, number, m): [9] * prompt + [m] * n for m, n in enumerate(responses)}


rows_of_tokens = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6)


@few
@given(
    st.lists(st.tuples(st.integers(0, 9), rows_of_tokens), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(24, 60),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.booleans(),
)
def test_tree_micro_batches_are_within_the_budget_by_the_size_of_their_trees(groups, dp, most, multiple, rounds, near):
    tokens = {SampleId(0, g, m): [7] * p + row for g, (p, rows) in enumerate(groups) for m, row in enumerate(rows)}
    kept = sorted(tokens)[: len(tokens) // (dp * rounds) * dp * rounds]
    if not kept:
        return
    places = {i: {i.group % dp} for i in kept} if near else None
    budget = TokenBudget(most, True, multiple, rounds, shared=True)
    ranks = planned({i: tokens[i] for i in kept}, budget, dp, places)
    assert len(ranks[0]) % rounds == 0


def test_whole_groups_stay_together_and_every_rank_has_as_many_tokens():
    tokens = {i: row for g, n in enumerate((40, 10, 20, 30)) for i, row in a_group(g, 100, n, n, n, n).items()}
    ranks = planned(tokens, TokenBudget(10_000, True, shared=True), 2)
    assert [sorted({i.group for batch in rank for i in batch}) for rank in ranks] == [[0, 1], [2, 3]]


def test_a_group_above_the_budget_runs_its_prompt_once_in_each_fragment():
    (batches,) = planned(a_group(0, 50, *[10] * 8), TokenBudget(90, True, shared=True))
    assert [len(batch) for batch in batches] == [4, 4]


def test_a_group_is_divided_between_ranks_if_the_prompt_costs_less_than_the_wait():
    for prompt, together in ((10, False), (500, True)):
        tokens = a_group(0, prompt, *[100] * 4) | a_group(1, prompt, *[10] * 4)
        ranks = planned(tokens, TokenBudget(5000, True, shared=True), 2)
        assert (len({i.group for batch in ranks[0] for i in batch}) == 1) == together


def test_groups_go_to_ranks_near_them_if_that_costs_no_time():
    tokens = {i: row for g in range(4) for i, row in a_group(g, 30, 5, 5).items()}
    near = {i: {1 - i.group // 2} for i in tokens}
    ranks = planned(tokens, TokenBudget(500, True, shared=True), 2, near)
    assert [{i.group for batch in rank for i in batch} for rank in ranks] == [{2, 3}, {0, 1}]


def test_pairs_are_never_divided():
    tokens = {i: row for g in range(6) for i, row in a_group(g, 20, 10 + g, 10).items()}
    budget = TokenBudget(100, True, rounds_of=3, shared=True, whole=True)
    ranks = planned(tokens, budget, 2)
    assert [len(rank) for rank in ranks] == [3, 3] and all(len(batch) == 2 for rank in ranks for batch in rank)
    with pytest.raises(ValueError, match="a pair has 45 tokens, more than --rl-max-tokens-per-microbatch 44"):
        planned(tokens, TokenBudget(44, True, shared=True, whole=True), 2)
