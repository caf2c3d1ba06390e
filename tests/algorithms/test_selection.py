"""Off-policy corrections, dynamic sampling's decision and PF-PPO's resampling, against loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.algorithms.corrections import CORRECTIONS, importance_weights
from mindspeed_rl_plugin.algorithms.selection import FILTRATIONS, carries_signal, resample, uniform_draws
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.rows import SampleId

pytestmark = pytest.mark.quick
few = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**31 - 1)


@few
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), seeds, st.sampled_from(["token", "sequence", "geometric"]))
def test_importance_weights_and_corrections_are_the_loops(counts, seed, level):
    g = torch.Generator().manual_seed(seed)
    old, rollout = torch.randn(2, sum(counts), generator=g, dtype=torch.float64)
    if sum(counts):
        old[0] = rollout[0] + 40
    old.requires_grad_()
    sequence = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    got = importance_weights(old, rollout, sequence, len(counts), level)
    want, at = [], 0
    for count in counts:
        gaps = [float(old[t] - rollout[t]) for t in range(at, at + count)]
        at += count
        whole = {"sequence": [sum(gaps)] * count, "geometric": [sum(gaps) / max(count, 1)] * count}.get(level, gaps)
        want += [math.exp(min(max(gap, -20.0), 20.0)) for gap in whole]
    assert got.tolist() == pytest.approx(want, rel=1e-9) and not got.requires_grad
    for low, high in ((0.0, 2.0), (0.5, 2.0), (0.9, math.inf)):
        inside = [w if low <= w <= high else 0.0 for w in want]
        assert CORRECTIONS["mask"].function(got, low, high).tolist() == pytest.approx(inside)
        assert CORRECTIONS["decoupled"].function(got, low, high).tolist() == pytest.approx(inside)
        clipped = [min(max(w, low), high) for w in want]
        assert CORRECTIONS["truncate"].function(got, low, high).tolist() == pytest.approx(clipped)
        assert CORRECTIONS["decoupled-clip"].function(got, low, high).tolist() == pytest.approx(clipped)


def test_a_correction_that_is_off_only_measures():
    weights = torch.tensor([0.4, 1.0, 2.5])
    off, cut = (resolve(AlgorithmConfig(algorithm="grpo", correction=name)) for name in ("off", "truncate"))
    assert off.corrected(weights) is None and off.out_of_bounds(weights).tolist() == [True, False, True]
    assert cut.corrected(weights).tolist() == pytest.approx([0.4, 1.0, 2.0])
    assert cut.out_of_bounds(weights).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("flags", "corrected"),
    [
        ({"correction": "decoupled"}, [0.0, 0.4, 1.0, 1.0005, 1.002, 5.0, 0.0]),
        ({"correction": "decoupled-clip"}, [0.0, 0.4, 1.0, 1.0005, 1.002, 5.0, 5.0]),
        ({"correction": "decoupled", "correction_high": 1e9}, [0.0, 0.4, 1.0, 1.0005, 1.002, 5.0, 6.0]),
        ({"correction": "decoupled-clip", "correction_level": "geometric"}, [0.0, 0.4, 1.0, 1.0005, 1.002, 5.0, 5.0]),
        ({"correction": "mask", "correction_level": "sequence"}, [0.0, 0.0, 1.0, 1.0005, 1.002, 0.0, 0.0]),
        ({"correction": "mask", "correction_level": "geometric"}, [0.0, 0.0, 1.0, 1.0005, 0.0, 0.0, 0.0]),
        ({"correction": "mask", "correction_level": "geometric", "correction_high": 1.0}, [0, 0, 1.0, 0, 0, 0, 0]),
    ],
)
def test_bounds_that_are_published_for_each_correction_and_level(flags, corrected):
    """AReaL caps the behaviour policy's weight at 5; verl keeps a geometric mean between 0.999 and 1.001."""
    weights = torch.tensor([0.0, 0.4, 1.0, 1.0005, 1.002, 5.0, 6.0], dtype=torch.float64)
    algorithm = resolve(AlgorithmConfig(algorithm="grpo", **flags))
    assert algorithm.corrected(weights).tolist() == corrected


groups_of_rewards = st.lists(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, -1.0]), min_size=1, max_size=5), min_size=1, max_size=5
)


@few
@given(groups_of_rewards, seeds)
def test_groups_that_carry_signal(by_group, seed):
    rows = [(r, g) for g, rewards in enumerate(by_group) for r in rewards]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = [rows[i] for i in order]
    got = carries_signal(torch.tensor([r for r, _ in rows]), torch.tensor([g for _, g in rows]))
    assert got.tolist() == [len(set(by_group[g])) > 1 for _, g in rows]


def weights_by_loops(rule, rewards, power):
    best, worst = max(rewards), min(rewards)
    if rule == "best-worst":
        return [1.0 if r in (best, worst) else 0.0 for r in rewards]
    if rule == "best-random":
        return [0.4 if r == best else 0.1 for r in rewards]
    weights = [abs(r) ** power for r in rewards]
    return weights if any(weights) else [1.0] * len(weights)


@pytest.mark.parametrize("rule", sorted(FILTRATIONS))
def test_resampling_inverts_the_distribution_of_each_prompt(rule):
    @few
    @given(groups_of_rewards, seeds, st.sampled_from([1.0, 2.0]))
    def check(by_group, seed, power):
        rewards = [r for group in by_group for r in group]
        groups = [g for g, group in enumerate(by_group) for _ in group]
        draws = torch.rand(len(rewards), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        got = resample(torch.tensor(rewards), torch.tensor(groups), draws, rule=rule, power=power).tolist()
        for row, chosen in enumerate(got):
            mine = [i for i, g in enumerate(groups) if g == groups[row]]
            weights = weights_by_loops(rule, [rewards[i] for i in mine], power)
            point, edge, want = float(draws[row]) * sum(weights), 0.0, None
            for i, weight in zip(mine, weights, strict=True):
                edge += weight
                if want is None and weight and point < edge:
                    want = i
            assert chosen == want

    check()


def test_the_last_row_can_be_drawn_and_a_weightless_one_never():
    group = torch.zeros(3, dtype=torch.int64)
    for draw in (0.0, 0.5, 1 - 2**-53):
        draws = torch.full((3,), draw, dtype=torch.float64)
        chosen = resample(torch.tensor([0.5, 0.0, 1.0]), group, draws, rule="best-worst").tolist()
        assert chosen == [1 + (draw >= 0.5)] * 3
        chosen = resample(torch.tensor([1.0, 0.0, 0.0]), group, draws, rule="pow").tolist()
        assert chosen == [0, 0, 0]


def test_draws_belong_to_the_id_and_not_to_its_place():
    ids = [SampleId(3, g, m) for g in range(4) for m in range(4)]
    draws = uniform_draws(7, ids)
    assert ((draws >= 0) & (draws < 1)).all() and len(set(draws.tolist())) == 16
    assert torch.equal(uniform_draws(7, ids[::-1]), draws.flip(0))
    assert not torch.equal(uniform_draws(8, ids), draws)
