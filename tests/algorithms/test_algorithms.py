"""Every part of an algorithm against a float64 reference written as loops, on shapes that hypothesis picks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.algorithms import RewardBatch, Totals, TrainedTokens, group_index, resolve, spread
from mindspeed_rl_plugin.algorithms.advantages import group_norm
from mindspeed_rl_plugin.algorithms.aggregate import AGGREGATIONS, sequence_weights
from mindspeed_rl_plugin.algorithms.kl import KL_ESTIMATORS
from mindspeed_rl_plugin.algorithms.losses import Bounds, clip
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.types import Ragged, SampleId

GRPO = AlgorithmConfig(algorithm="grpo")
few = settings(max_examples=60, deadline=None)

# Rewards of one group: often 0 or 1, sometimes all equal, down to a single response.
rewards_of_group = st.one_of(
    st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=6),
    st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=6),
    st.tuples(st.floats(-3, 3, width=32), st.integers(1, 6)).map(lambda x: [x[0]] * x[1]),
)
seeds = st.integers(0, 2**31 - 1)
# Trained tokens of each sequence: fully masked rows and one-token responses included.
lengths = st.lists(st.integers(0, 5), min_size=1, max_size=8)


def group_norm_reference(rewards, groups, eps):
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(mine) == 1 or len(set(mine)) == 1:
            out.append(0.0)
            continue
        mean = sum(mine) / len(mine)
        std = math.sqrt(sum((r - mean) ** 2 for r in mine) / (len(mine) - 1))
        out.append((reward - mean) / (std + eps))
    return out


@few
@given(st.lists(rewards_of_group, min_size=1, max_size=5), seeds)
def test_group_norm_is_the_reference_in_any_row_order(by_group, seed):
    rows = [(reward, group * 7 - 3) for group, rewards in enumerate(by_group) for reward in rewards]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    rewards = [torch.tensor(rows[i][0], dtype=torch.float32).item() for i in order]
    groups = [rows[i][1] for i in order]
    got = group_norm(RewardBatch(torch.tensor(rewards), torch.tensor(groups)), eps=1e-6)
    want = torch.tensor(group_norm_reference(rewards, groups, 1e-6))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_equal_rewards_and_single_responses_give_exactly_zero():
    rewards = torch.tensor([0.1, 0.1, 0.1, 7.0, 1e-30, 1e-30])
    got = group_norm(RewardBatch(rewards, torch.tensor([0, 0, 0, 1, 2, 2])), eps=1e-6)
    assert got.tolist() == [0.0] * 6
    assert group_norm(RewardBatch(rewards, torch.tensor([0, 0, 0, 1, 2, 2])), eps=0.0).tolist() == [0.0] * 6


def test_bad_rewards_are_named():
    with pytest.raises(ValueError, match="reward nan at row 1 .1 such rows of 2."):
        RewardBatch(torch.tensor([0.0, math.nan]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="two vectors of one length"):
        RewardBatch(torch.zeros(2), torch.zeros(3, dtype=torch.int64))


def test_group_index_and_spread():
    ids = [SampleId(1, 4, 0), SampleId(2, 4, 0), SampleId(1, 4, 1), SampleId(1, 0, 0)]
    assert group_index(ids).tolist() == [0, 1, 0, 2]
    mask = Ragged.from_rows([torch.tensor([0, 1, 1]), torch.tensor([0]), torch.tensor([0, 0, 1])], dtype=torch.uint8)
    assert spread(torch.tensor([2.0, 3.0, -1.0]), mask).values.tolist() == [0, 2, 2, 0, 0, 0, -1]


def clip_reference(logp, old, advantage, low, high, dual):
    ratio = math.exp(min(max(logp - old, -20.0), 20.0))
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    if dual is not None and advantage < 0:
        loss = min(loss, -dual * advantage)
    return loss, ratio


@few
@given(st.integers(0, 40), seeds, st.sampled_from([None, 1.5, 3.0]), st.floats(0, 0.9), st.floats(0, 2))
def test_clip_is_the_reference(count, seed, dual, low, high):
    g = torch.Generator().manual_seed(seed)
    logp, old = torch.randn(2, count, generator=g, dtype=torch.float64) * 2
    if count:
        logp[0] = old[0] + 30
    advantages = torch.randn(count, generator=g, dtype=torch.float64)
    leaf = logp.clone().requires_grad_()
    terms = clip(TrainedTokens(leaf, old, advantages, torch.zeros(count, dtype=torch.int64)), Bounds(low, high, dual))
    for t in range(count):
        want, ratio = clip_reference(float(logp[t]), float(old[t]), float(advantages[t]), low, high, dual)
        assert float(terms.loss.detach()[t]) == pytest.approx(want, rel=1e-12)
        assert float(terms.ratio[t]) == pytest.approx(ratio, rel=1e-12)
        assert bool(terms.clipped[t]) == (want != pytest.approx(-float(advantages[t]) * ratio, rel=1e-12))
    terms.loss.sum().backward()
    # Where the bound decides, the token pulls on nothing.
    assert not leaf.grad[terms.clipped].any()


def test_first_ratio_is_one_and_its_gradient_is_the_policy_gradient():
    logp = torch.tensor([-1.3, -0.2, -7.0], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.0])
    terms = clip(
        TrainedTokens(logp, logp.detach().clone(), advantages, torch.zeros(3, dtype=torch.int64)), Bounds(0.2, 0.2)
    )
    terms.loss.sum().backward()
    assert terms.ratio.tolist() == [1.0, 1.0, 1.0] and not terms.clipped.any()
    assert torch.equal(logp.grad, -advantages)


@few
@given(st.integers(0, 20), seeds)
def test_kl_estimators_are_the_reference(count, seed):
    logp, ref = torch.randn(2, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = [float(b - a) for a, b in zip(logp, ref, strict=True)]
    want = {
        "k1": [-v for v in x],
        "k2": [v * v / 2 for v in x],
        "k3": [min(math.exp(v) - v - 1, 10.0) for v in x],
    }
    want["k3-unbiased"] = want["k3"]
    gradient = {"k1": [1.0] * count, "k2": [-v for v in x]}
    gradient["k3"] = [1 - math.exp(v) if math.exp(v) - v - 1 < 10 else 0.0 for v in x]
    gradient["k3-unbiased"] = gradient["k2"]
    assert set(want) == set(KL_ESTIMATORS)
    for name, estimator in KL_ESTIMATORS.items():
        leaf = logp.clone().requires_grad_()
        value = estimator(leaf, ref)
        value.sum().backward()
        torch.testing.assert_close(value.detach(), torch.tensor(want[name], dtype=torch.float64), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(leaf.grad, torch.tensor(gradient[name], dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_kl_is_clamped_and_zero_on_equal_logps():
    logp = torch.tensor([-1.0, -50.0, -1.0])
    for estimator in KL_ESTIMATORS.values():
        assert estimator(logp, logp).abs().max() == 0.0
    assert KL_ESTIMATORS["k1"](logp, torch.tensor([-1.0, -1.0, -99.0])).tolist() == [0.0, -20.0, 20.0]
    assert KL_ESTIMATORS["k3"](logp, torch.tensor([-1.0, -1.0, -99.0])).tolist() == [0.0, 10.0, 10.0]


def aggregate_reference(name, per_sequence, norm_length):
    rows = [row for row in per_sequence if row]
    tokens = sum(len(row) for row in rows)
    if not rows:
        return 0.0
    return {
        "token-mean": sum(map(sum, rows)) / tokens,
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / len(rows),
        "seq-mean-token-sum": sum(map(sum, rows)) / len(rows),
        "token-sum-norm": sum(map(sum, rows)) / (len(rows) * norm_length),
    }[name]


@few
@given(lengths, seeds, st.sampled_from(sorted(AGGREGATIONS)), st.integers(1, 9))
def test_aggregations_are_the_reference_however_the_batch_is_cut(counts, seed, name, cut):
    g = torch.Generator().manual_seed(seed)
    losses = [torch.randn(n, generator=g, dtype=torch.float64).tolist() for n in counts]
    totals = Totals(sum(counts), sum(n > 0 for n in counts), norm_length=11)
    total = 0.0
    for start in range(0, len(counts), cut):
        weights = sequence_weights(name, torch.tensor(counts[start : start + cut]), totals)
        total += sum(float(w) * sum(row) for w, row in zip(weights, losses[start : start + cut], strict=True))
    assert total == pytest.approx(aggregate_reference(name, losses, 11), rel=1e-12, abs=1e-12)


def test_a_sequence_without_trained_tokens_counts_nowhere():
    counts = torch.tensor([4, 0, 2])
    for name in AGGREGATIONS:
        with_empty = sequence_weights(name, counts, Totals(6, 2, norm_length=8))
        without = sequence_weights(name, counts[[0, 2]], Totals(6, 2, norm_length=8))
        assert with_empty[1] == 0.0 and torch.equal(with_empty[[0, 2]], without)


def test_token_sum_norm_needs_its_length():
    with pytest.raises(ValueError, match="give the response limit"):
        sequence_weights("token-sum-norm", torch.tensor([1]), Totals(1, 1))


def test_grpo_row():
    algorithm = resolve(GRPO)
    assert (algorithm.advantage, algorithm.loss, algorithm.aggregation) == ("group-norm", "clip", "seq-mean-token-mean")
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (0.2, 0.2, None)
    assert (algorithm.kl_loss_coef, algorithm.kl_estimator, algorithm.advantage_eps) == (0.001, "k3", 1e-6)
    assert algorithm.needs_reference


def test_explicit_flags_win():
    algorithm = resolve(
        AlgorithmConfig(
            algorithm="grpo",
            loss="clip-higher",
            aggregation="token-mean",
            clip_low=0.1,
            kl_loss_coef=0.0,
            kl_estimator="k1",
        )
    )
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.aggregation) == (0.1, 0.28, "token-mean")
    assert algorithm.kl_estimator == "k1" and not algorithm.needs_reference


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"algorithm": "grop"}, "--rl-algorithm 'grop' is unknown; known: grpo"),
        ({"advantage": "gae2"}, "--rl-advantage 'gae2' is unknown; known: group-norm"),
        ({"loss": "pg"}, "--rl-loss 'pg' is unknown; known: clip, clip-higher"),
        ({"aggregation": "mean"}, "--rl-aggregation 'mean' is unknown; known: token-mean, seq-mean"),
        ({"kl_estimator": "k4"}, "--rl-kl-estimator 'k4' is unknown; known: k1, k2"),
        ({"clip_low": -0.1}, "--rl-clip-low is -0.1; give a finite number >= 0"),
        ({"kl_loss_coef": math.inf}, "--rl-kl-loss-coef is inf"),
        ({"dual_clip": 1.0}, "--rl-dual-clip is 1.0; the bound must be above 1"),
        ({"ppo_epochs": 0}, "--rl-ppo-epochs is 0; give at least 1"),
    ],
)
def test_bad_settings_are_refused(flags, message):
    with pytest.raises(ValueError) as error:
        resolve(AlgorithmConfig(**{"algorithm": "grpo", **flags}))
    assert message in str(error.value)
