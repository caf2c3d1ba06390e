"""Advantages and what shapes the reward before them, against loops in float64, on shapes that hypothesis picks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.algorithms import ADVANTAGES, Moments, RewardBatch, whiten
from mindspeed_rl_plugin.algorithms.estimators import returns
from mindspeed_rl_plugin.algorithms.rewards import overlong_penalty
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.rows import Ragged, SampleId, group_index, spread

pytestmark = pytest.mark.quick

few = settings(max_examples=60, deadline=None)
DEFAULT = AlgorithmConfig()

# Rewards of one group: often 0 or 1, sometimes all equal, down to a single response.
rewards_of_group = st.one_of(
    st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=6),
    st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=6),
    st.tuples(st.floats(-3, 3, width=32), st.integers(1, 6)).map(lambda x: [x[0]] * x[1]),
)
seeds = st.integers(0, 2**31 - 1)
# Masks of responses: empty, one token, fully masked, masked between trained tokens.
masks = st.lists(st.lists(st.sampled_from([0, 1, 1]), max_size=6), min_size=1, max_size=6)


def ragged(rows, dtype=torch.float64):
    return Ragged.from_rows([torch.tensor(row, dtype=dtype) for row in rows], dtype=dtype)


def shuffled(by_group, seed):
    """Rewards (rounded to float32) and group numbers of all rows in a random order."""
    rows = [(reward, group * 7 - 3) for group, rewards in enumerate(by_group) for reward in rewards]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    return [torch.tensor(rows[i][0], dtype=torch.float32).item() for i in order], [rows[i][1] for i in order]


def by_loops(name, rewards, groups, eps=1e-6):
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = sum(mine) / len(mine)
        if len(set(mine)) == 1:
            out.append(0.0)
        elif name == "group-norm":
            std = math.sqrt(sum((r - mean) ** 2 for r in mine) / (len(mine) - 1))
            out.append((reward - mean) / (std + eps))
        elif name == "rloo":
            out.append(reward - (sum(mine) - reward) / (len(mine) - 1))
        else:
            out.append(reward - mean)
    return out


@pytest.mark.parametrize("name", ["group-norm", "group-mean", "rloo", "reinforce++-baseline"])
def test_group_estimators_are_the_loops_in_any_row_order(name):
    @few
    @given(st.lists(rewards_of_group, min_size=1, max_size=5), seeds)
    def check(by_group, seed):
        rewards, groups = shuffled([g for g in by_group if name != "rloo" or len(g) > 1] or [[0.0, 1.0]], seed)
        got = ADVANTAGES[name].function(RewardBatch(torch.tensor(rewards), torch.tensor(groups)), DEFAULT)
        want = torch.tensor(by_loops(name, rewards, groups), dtype=got.dtype)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)

    check()


@pytest.mark.parametrize("name", ["group-norm", "group-mean", "reinforce++-baseline"])
@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_equal_rewards_and_single_responses_give_exactly_zero(name, eps):
    rewards = torch.tensor([0.1, 0.1, 0.1, 7.0, 1e-30, 1e-30])
    batch = RewardBatch(rewards, torch.tensor([0, 0, 0, 1, 2, 2]))
    assert ADVANTAGES[name].function(batch, AlgorithmConfig(advantage_eps=eps)).tolist() == [0.0] * 6


def token_estimates_by_loops(rewards, masks, costs, values, gamma, lam):
    """Advantages token by token; without values those of REINFORCE++."""
    out = []
    for reward, mask, cost, value in zip(rewards, masks, costs, values, strict=True):
        row, last = [0.0] * len(mask), True
        next_value, next_advantage = 0.0, 0.0
        for t in range(len(mask) - 1, -1, -1):
            if not mask[t]:
                continue
            gain = (reward if last else 0.0) - cost[t]
            delta = gain + gamma * next_value - value[t]
            next_value, next_advantage, last = value[t], delta + gamma * lam * next_advantage, False
            row[t] = next_advantage
        out.append(row)
    return out


@few
@given(masks, seeds, st.sampled_from([1.0, 0.9, 0.0]), st.sampled_from([1.0, 0.95, 0.0]), st.booleans())
def test_token_estimators_are_the_loops(masks, seed, gamma, lam, kl):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randn(len(masks), generator=g).tolist()
    costs, values = ([torch.randn(len(m), generator=g).tolist() for m in masks] for _ in range(2))
    zero = [[0.0] * len(m) for m in masks]
    mask = ragged(masks, torch.uint8)
    batch = RewardBatch(
        torch.tensor(rewards), torch.arange(len(masks)), mask, ragged(costs) if kl else None, ragged(values)
    )
    known = AlgorithmConfig(gamma=gamma, gae_lambda=lam)
    cost = costs if kl else zero
    for name, value, factor in (("reinforce++", zero, 1.0), ("gae", values, lam)):
        got = ADVANTAGES[name].function(batch, known)
        want = ragged(token_estimates_by_loops(rewards, masks, cost, value, gamma, factor))
        torch.testing.assert_close(got.values, want.values, rtol=1e-6, atol=1e-6)
        assert torch.equal(got.offsets, mask.offsets)
    learnt = returns(got, batch.values, mask)
    for row, advantage, value, trained in zip(learnt.rows(), got.rows(), batch.values.rows(), masks, strict=True):
        wanted = [(a + v) * m for a, v, m in zip(advantage.tolist(), value.tolist(), trained, strict=True)]
        assert row.tolist() == pytest.approx(wanted)


@few
@given(masks, seeds, st.integers(1, 4), st.booleans())
def test_whitening_is_over_the_global_batch_however_it_is_cut(masks, seed, cut, constant):
    """Ranks hold parts of the rows, some none and some no trained token; all join with what they have."""
    g = torch.Generator().manual_seed(seed)
    rows = [torch.full((len(m),), 0.1) if constant else torch.randn(len(m), generator=g) for m in masks]
    column, mask = ragged([r.tolist() for r in rows]), ragged(masks, torch.uint8)
    starts = range(0, len(masks) + cut, cut)  # the last rank has no row
    parts = []
    for start in starts:
        index = list(range(start, min(start + cut, len(masks))))
        parts.append(Moments.of(column.take(index).values, mask.take(index).values))
    got = whiten(column.values, Moments.merged(parts))
    trained = [x for row, m in zip(rows, masks, strict=True) for x, keep in zip(row.tolist(), m, strict=True) if keep]
    assert Moments.merged(parts).count == len(trained)
    if len(set(trained)) < 2:
        assert not got.any()
        return
    mean = sum(trained) / len(trained)
    variance = sum((x - mean) ** 2 for x in trained) / (len(trained) - 1)
    want = [(float(x) - mean) / math.sqrt(variance + 1e-8) for x in column.values]
    assert got.tolist() == pytest.approx(want, rel=1e-6, abs=1e-9)


def test_moments_of_samples_count_each_of_their_tokens():
    values, tokens = torch.tensor([1.0, 3.0, 9.0]), torch.tensor([3, 1, 0])
    assert Moments.of(values, tokens) == Moments.of(torch.tensor([1.0, 1.0, 1.0, 3.0]), torch.ones(4))
    assert Moments.of(values, torch.zeros(3)) == Moments.merged([]) == Moments()


@few
@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 40), st.data())
def test_overlong_penalty_is_the_loop(lengths, limit, data):
    lengths = [min(n, limit) for n in lengths]
    buffer, factor = data.draw(st.integers(1, limit)), data.draw(st.floats(0, 3))
    got = overlong_penalty(torch.tensor(lengths, dtype=torch.int64), limit, buffer, factor)
    want = [min(0.0, -min(n - (limit - buffer), buffer) / buffer * factor) for n in lengths]
    assert got.tolist() == pytest.approx(want, rel=1e-12)
    assert not overlong_penalty(torch.tensor(lengths), limit, 0, factor).any()


def test_bad_rewards_are_named():
    with pytest.raises(ValueError, match="nan.*row 1.*2"):
        RewardBatch(torch.tensor([0.0, math.nan]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="one length"):
        RewardBatch(torch.zeros(2), torch.zeros(3, dtype=torch.int64))


def test_group_index_and_spread():
    ids = [SampleId(1, 4, 0), SampleId(2, 4, 0), SampleId(1, 4, 1), SampleId(1, 0, 0)]
    assert group_index(ids).tolist() == [0, 1, 0, 2]
    mask = ragged([[0, 1, 1], [0], [0, 0, 1]], torch.uint8)
    assert spread(torch.tensor([2.0, 3.0, -1.0]), mask).values.tolist() == [0, 2, 2, 0, 0, 0, -1]
