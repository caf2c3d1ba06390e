"""Losses and KL estimators, value and gradient, against loops in float64 that autograd follows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.algorithms import AGGREGATIONS, LOSSES, Totals, TrainedTokens
from mindspeed_rl_plugin.algorithms.aggregate import sequence_weights
from mindspeed_rl_plugin.algorithms.kl import KL_ESTIMATORS
from mindspeed_rl_plugin.algorithms.losses import Bounds
from mindspeed_rl_plugin.algorithms.pair_losses import PAIR_LOSSES, PairBatch, pair_terms
from mindspeed_rl_plugin.algorithms.value_loss import value_loss
from mindspeed_rl_plugin.config import AlgorithmConfig

pytestmark = pytest.mark.quick

few = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**31 - 1)
# Trained tokens of each sequence: fully masked rows and one-token responses included, also none at all.
lengths = st.lists(st.integers(0, 5), min_size=1, max_size=8)
NAMES = sorted(LOSSES)


def batch(counts, seed, gap=1.0):
    """(logp leaf, logp_old, advantages, sequence) of all trained tokens; the first one far outside every bound."""
    g = torch.Generator().manual_seed(seed)
    old = -3.0 * torch.rand(sum(counts), generator=g, dtype=torch.float64)
    logp = old + gap * torch.randn(sum(counts), generator=g, dtype=torch.float64)
    if sum(counts):
        logp[0] = old[0] + 30
    advantages = torch.randn(sum(counts), generator=g, dtype=torch.float64)
    sequence = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return logp.requires_grad_(), old, advantages, sequence


def bounds_of(name, low=None, high=None, dual=None):
    spec = LOSSES[name]
    low = spec.clip_low if low is None else low
    high = spec.clip_high if high is None else high
    return Bounds(low or 0.0, high or 0.0, dual if spec.dual else None)


def limited(x, low, high):
    return x if low <= float(x) <= high else x.new_tensor(low if float(x) < low else high)


def loss_by_loops(name, logp, old, advantages, counts, bounds):
    """(loss, ratio) of each token as a graph of scalars; sequences lie one behind the other."""
    losses, ratios, start = [], [], 0
    for count in counts:
        tokens = range(start, start + count)
        start += count
        gaps = [logp[t] - old[t] for t in tokens]
        for t, gap in zip(tokens, gaps, strict=True):
            a = advantages[t]
            ratio = limited(gap, -20.0, 20.0).exp()
            low, high = 1 - bounds.low, 1 + bounds.high
            if name == "gspo":
                # its own part of the gradient of exp(mean): the mean is a number, the token's gap the variable
                mean = sum(float(g.detach()) for g in gaps) / count
                exponent = gap - gap.detach() + mean
                ratio = exponent.exp() if mean <= 10.0 else gap.new_tensor(math.exp(10.0))
            if name in ("clip", "clip-higher", "gspo"):
                one, two = -a * ratio, -a * limited(ratio, low, high)
                loss = one if float(one) >= float(two) else two
                if bounds.dual is not None and float(a) < 0 and float(loss) > -bounds.dual * float(a):
                    loss = -bounds.dual * a
            elif name == "cispo":
                loss = -limited(ratio, low, high).detach() * a * logp[t]
            elif name == "sapo":
                tau = 1.0 if float(a) > 0 else 1.05
                loss = -a * (4 / tau) / (1 + torch.exp(-tau * (ratio - 1)))
            else:
                loss = -a * ratio.detach() * logp[t]
            losses.append(loss)
            ratios.append(float(ratio.detach()))
    return losses, ratios


def gradient(total, leaf):
    """Gradient of a sum that may hold no token at all."""
    if not torch.is_tensor(total) or not total.requires_grad:
        return torch.zeros_like(leaf)
    return torch.autograd.grad(total, leaf, allow_unused=True)[0]


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_the_loops(name):
    @few
    @given(lengths, seeds, st.sampled_from([None, 1.5, 3.0]), st.floats(0, 0.9), st.floats(0, 2))
    def check(counts, seed, dual, low, high):
        logp, old, advantages, sequence = batch(counts, seed)
        bounds = bounds_of(name, low, high, dual)
        terms = LOSSES[name].function(TrainedTokens(logp, old, advantages, sequence, len(counts)), bounds)
        losses, ratios = loss_by_loops(name, logp, old, advantages, counts, bounds)
        assert terms.loss.tolist() == pytest.approx([float(x.detach()) for x in losses], rel=1e-12)
        assert terms.ratio.tolist() == pytest.approx(ratios, rel=1e-12)
        assert not terms.ratio.requires_grad and not terms.clipped.requires_grad
        got, want = gradient(terms.loss.sum(), logp), gradient(sum(losses), logp)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
        if name in ("clip", "clip-higher", "gspo"):
            # Where the bound decides, the token pulls on nothing.
            assert not got[terms.clipped].any()
            plain = [-float(a) * r for a, r in zip(advantages, ratios, strict=True)]
            assert terms.clipped.tolist() == [
                x != pytest.approx(y, rel=1e-12) for x, y in zip(terms.loss.tolist(), plain, strict=True)
            ]

    check()


@pytest.mark.parametrize("name", NAMES)
def test_first_ratio_is_exactly_one_and_its_gradient_is_the_policy_gradient(name):
    logp = torch.tensor([-1.3, -0.2, -7.0], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.0])
    tokens = TrainedTokens(logp, logp.detach().clone(), advantages, torch.tensor([0, 0, 2]), 3)
    terms = LOSSES[name].function(tokens, bounds_of(name))
    terms.loss.sum().backward()
    assert terms.ratio.tolist() == [1.0, 1.0, 1.0] and not terms.clipped.any()
    assert torch.equal(logp.grad, -advantages) or name == "sapo"
    torch.testing.assert_close(logp.grad, -advantages)


def test_gspo_keeps_small_ratios_apart_in_float32():
    """Its bounds are a few 1e-4 while log-probs are tens: the ratio is as exact as the mean difference itself."""
    old = torch.linspace(-90.0, -0.5, 64)
    logp = (old.double() + 3e-4).float()
    sequence = torch.arange(8).repeat_interleave(8)
    terms = LOSSES["gspo"].function(TrainedTokens(logp, old, torch.ones(64), sequence, 8), bounds_of("gspo"))
    means = (logp - old).double().view(8, 8).mean(1).repeat_interleave(8)
    torch.testing.assert_close(terms.ratio.double(), means.exp(), rtol=2e-7, atol=0.0)


def test_gspo_is_the_gradient_of_the_sequence_ratio():
    """With one advantage a sequence and its mean over tokens, the token form is the paper's sequence form."""
    logp, old, _, sequence = batch([3, 1, 4], seed=3, gap=0.2)
    logp = (logp.detach().clamp(max=0.0)).requires_grad_()
    advantage, counts = torch.tensor([1.0, -0.5, -2.0], dtype=torch.float64), torch.tensor([3, 1, 4])
    terms = LOSSES["gspo"].function(TrainedTokens(logp, old, advantage[sequence], sequence, 3), Bounds(9.0, 1e9))
    got = gradient((terms.loss / counts[sequence]).sum(), logp)
    sums = torch.zeros(3, dtype=torch.float64).index_add(0, sequence, logp - old)
    want = gradient((-advantage * (sums / counts).exp()).sum(), logp)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def aggregate_by_loops(name, per_sequence, norm_length):
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


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_weighted_sums_are_the_loops_however_the_batch_is_cut(aggregation):
    """Micro-batches of `cut` sequences, in any order; one without a trained token is a rank that has none."""

    @few
    @given(lengths, seeds, st.integers(1, 9))
    def check(counts, seed, cut):
        losses = torch.randn(sum(counts), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        of_rows, value = losses.split(counts), 0.0
        totals = Totals(sum(counts), sum(n > 0 for n in counts), norm_length=11)
        for start in range(0, len(counts), cut):
            weights = sequence_weights(aggregation, torch.tensor(counts[start : start + cut]), totals)
            value += sum(float(w) * float(row.sum()) for w, row in zip(weights, of_rows[start:], strict=False))
        want = aggregate_by_loops(aggregation, [row.tolist() for row in of_rows], 11)
        assert value == pytest.approx(want, rel=1e-11, abs=1e-12)

    check()


@few
@given(st.integers(0, 20), seeds)
def test_kl_estimators_are_the_loops(count, seed):
    logp, ref = torch.randn(2, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = [float(b - a) for a, b in zip(logp, ref, strict=True)]
    want = {
        "k1": [-v for v in x],
        "k2": [v * v / 2 for v in x],
        "k3": [min(math.exp(v) - v - 1, 10.0) for v in x],
    }
    want["k3-unbiased"] = want["k3"]
    gradients = {"k1": [1.0] * count, "k2": [-v for v in x]}
    gradients["k3"] = [1 - math.exp(v) if math.exp(v) - v - 1 < 10 else 0.0 for v in x]
    gradients["k3-unbiased"] = gradients["k2"]
    assert set(want) == set(KL_ESTIMATORS)
    for name, estimator in KL_ESTIMATORS.items():
        leaf = logp.clone().requires_grad_()
        value = estimator(leaf, ref)
        value.sum().backward()
        torch.testing.assert_close(value.detach(), torch.tensor(want[name], dtype=torch.float64), rtol=1e-9, atol=1e-12)
        wanted = torch.tensor(gradients[name], dtype=torch.float64)
        torch.testing.assert_close(leaf.grad, wanted, rtol=1e-9, atol=1e-12)


def test_kl_is_clamped_and_zero_on_equal_logps():
    logp = torch.tensor([-1.0, -50.0, -1.0])
    for estimator in KL_ESTIMATORS.values():
        assert estimator(logp, logp).abs().max() == 0.0
    assert KL_ESTIMATORS["k1"](logp, torch.tensor([-1.0, -1.0, -99.0])).tolist() == [0.0, -20.0, 20.0]
    assert KL_ESTIMATORS["k3"](logp, torch.tensor([-1.0, -1.0, -99.0])).tolist() == [0.0, 10.0, 10.0]


def pair_loss_by_loops(kind, h, beta, smoothing):
    """(loss, its derivative by h) of one pair."""
    if kind == "hinge":
        return max(0.0, 1 - beta * h), -beta if 1 - beta * h > 0 else 0.0
    if kind == "ipo":
        return (h - 1 / (2 * beta)) ** 2, 2 * (h - 1 / (2 * beta))
    right, wrong = 1 / (1 + math.exp(-beta * h)), 1 / (1 + math.exp(beta * h))
    loss = (1 - smoothing) * math.log1p(math.exp(-beta * h)) + smoothing * math.log1p(math.exp(beta * h))
    return loss, beta * (smoothing * right - (1 - smoothing) * wrong)


@pytest.mark.parametrize("kind", sorted(PAIR_LOSSES))
@pytest.mark.parametrize("length_norm", [False, True])
def test_pair_losses_are_the_loops(kind, length_norm):
    @few
    @given(st.integers(0, 6), seeds, st.floats(0.01, 1), st.floats(0, 0.4))
    def check(count, seed, beta, smoothing):
        g = torch.Generator().manual_seed(seed)
        sums = torch.randn(4, count, generator=g, dtype=torch.float64) * 5
        tokens = torch.randint(0, 9, (2, count), generator=g)
        chosen, rejected = (row.clone().requires_grad_() for row in sums[:2])
        flags = dict(dpo_beta=beta, dpo_label_smoothing=smoothing, dpo_length_norm=length_norm)
        terms = pair_terms(PairBatch(chosen, rejected, *sums[2:], *tokens), AlgorithmConfig(dpo_loss=kind, **flags))
        terms.loss.sum().backward()
        for p in range(count):
            per = [max(int(n), 1) if length_norm else 1 for n in tokens[:, p]]
            h = float(sums[0, p] - sums[2, p]) / per[0] - float(sums[1, p] - sums[3, p]) / per[1]
            want, slope = pair_loss_by_loops(kind, h, beta, smoothing)
            assert float(terms.loss[p].detach()) == pytest.approx(want, rel=1e-9, abs=1e-12)
            assert float(terms.margin[p]) == pytest.approx(beta * h, rel=1e-9, abs=1e-12)
            assert float(chosen.grad[p]) == pytest.approx(slope / per[0], rel=1e-9, abs=1e-12)
            # A pull on the chosen response is the same push on the rejected one.
            assert float(rejected.grad[p]) * per[1] == pytest.approx(-float(chosen.grad[p]) * per[0], rel=1e-9)

    check()


@few
@given(st.integers(0, 30), seeds, st.sampled_from([None, 0.2, 1.0]))
def test_value_loss_is_the_loop(count, seed, clip):
    g = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, count, generator=g, dtype=torch.float64)
    leaf = values.clone().requires_grad_()
    terms = value_loss(leaf, old, returns, clip)
    terms.loss.sum().backward()
    for t in range(count):
        v, o, r = float(values[t]), float(old[t]), float(returns[t])
        bounded = v if clip is None else min(max(v, o - clip), o + clip)
        wins = (bounded - r) ** 2 > (v - r) ** 2
        assert float(terms.loss[t]) == pytest.approx(0.5 * max((v - r) ** 2, (bounded - r) ** 2), rel=1e-12)
        assert bool(terms.clipped[t]) == wins
        assert float(leaf.grad[t]) == pytest.approx(0.0 if wins else v - r, rel=1e-12, abs=1e-15)
