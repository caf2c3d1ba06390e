"""One micro-batch's part of the loss and its tally, of policy and critic, against loops over tokens."""

import dataclasses
import math

import pytest
import torch

from mindspeed_rl_plugin.algorithms import Totals, resolve
from mindspeed_rl_plugin.algorithms.aggregate import AGGREGATIONS
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.forward.collate import MicroBatch, collate
from mindspeed_rl_plugin.forward.settings import ForwardSettings
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId
from mindspeed_rl_plugin.update import tallies
from mindspeed_rl_plugin.update.objective import MAXIMA, objective
from mindspeed_rl_plugin.update.tallies import SUM_COUNT, to_metrics
from mindspeed_rl_plugin.update.value_step import TALLIED, value_metrics, value_objective

pytestmark = pytest.mark.quick

COUNTS = (3, 0, 1, 4)  # trained tokens of each row
WIDE = 6
CLIP = 0.2  # of values


def micro_batch(seed=0, **columns):
    """Four rows of six tokens, one of them trained nowhere, one an episode of two turns, with random columns in
    float64."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.zeros(len(COUNTS), WIDE, dtype=torch.bool)
    for row, count in enumerate(COUNTS):
        mask[row, 5 - count : 5] = True
    mask[3, :5] = torch.tensor([True, True, False, True, True])  # two turns
    values = {
        name: torch.randn(len(COUNTS), WIDE, generator=g, dtype=torch.float64)
        for name in ("logp_old", "advantages", "logp_ref", "logp_rollout")
    }
    values["logp_rollout"] = values["logp_old"] + 0.4 * values["logp_rollout"]
    shape = torch.zeros(len(COUNTS), WIDE, dtype=torch.int64)
    batch = MicroBatch(
        0, shape, shape, shape, False, mask, shape[:, 0], {**values, **columns}, torch.arange(len(COUNTS))
    )
    logp = (values["logp_old"] + 0.3 * torch.randn(mask.shape, generator=g, dtype=torch.float64)).requires_grad_()
    return batch, logp, torch.rand(mask.shape, generator=g, dtype=torch.float64).requires_grad_()


def part_of(algorithm, batch, weights, logp, entropy, fresh=None):
    """Every row counts once; fresh: None for all."""
    fresh = torch.ones(len(weights), dtype=torch.bool) if fresh is None else fresh
    return objective(algorithm, batch, weights, torch.ones(len(weights)), fresh, logp, entropy)


def weights_by_loops(batch, level):
    """Importance weight of each trained token, {(row, position): weight}."""
    gap = batch.columns["logp_old"] - batch.columns["logp_rollout"]
    weights = {}
    for row, at in batch.mask.nonzero().tolist():
        mine = [float(gap[row, t]) for t in range(WIDE) if batch.mask[row, t]]
        product = math.prod(math.exp(g) for g in mine)
        by_level = {"token": math.exp(gap[row, at]), "sequence": product, "geometric": product ** (1 / len(mine))}
        weights[row, at] = by_level[level]
    return weights


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("correction", ["off", "truncate", "mask", "decoupled", "decoupled-clip"])
def test_objective_is_the_loop(correction, level):
    bounds = {"low": 0.7, "high": 1.3}
    algorithm = resolve(
        AlgorithmConfig(
            algorithm="grpo",
            aggregation="token-mean",
            kl_loss_coef=0.1,
            entropy_coef=0.05,
            correction=correction,
            correction_level=level,
            correction_low=0.7,
            correction_high=1.3,
        )
    )
    batch, logp, entropy = micro_batch(seed=4)
    weights = torch.where(torch.tensor(COUNTS) > 0, torch.tensor([0.2, 9.0, 0.5, 0.3], dtype=torch.float64), 0.0)
    loss, tally = part_of(algorithm, batch, weights, logp, entropy)

    importance = {name: weights_by_loops(batch, name) for name in ("token", "sequence", "geometric")}
    total, policy_part = 0.0, 0.0
    for (row, at), w in importance[level].items():
        clipped = min(max(w, 0.7), 1.3)
        kinds = {"off": 1.0, "truncate": clipped, "decoupled-clip": clipped}
        c = kinds.get(correction, w if 0.7 <= w <= 1.3 else 0.0)
        a, old = batch.columns["advantages"][row, at], batch.columns["logp_old"][row, at]
        ratio = (logp[row, at] - old).exp()
        one, two = -a * ratio, -a * ratio.clamp(0.8, 1.2)
        x = batch.columns["logp_ref"][row, at] - logp[row, at]
        policy = c * (one if float(one) > float(two) else two)
        kl = (x.exp() - x - 1).clamp(max=10)
        total = total + weights[row] * (policy + 0.1 * kl - 0.05 * entropy[row, at])
        policy_part += float(weights[row] * policy.detach())
    assert float(loss.detach()) == pytest.approx(float(total.detach()), rel=1e-12)
    for leaf in (logp, entropy):
        got = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
        want = torch.autograd.grad(total, leaf, retain_graph=True)[0]
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)

    assert tally.shape == (SUM_COUNT + len(MAXIMA),)
    metrics = to_metrics(tally, Totals(sum(COUNTS), 3))
    assert metrics["loss/policy"] == pytest.approx(policy_part, rel=1e-5)
    token = list(importance["token"].values())
    assert metrics["rollout/weight_mean"] == pytest.approx(sum(token) / 8, rel=1e-5)
    assert metrics["rollout/weight_max"] == pytest.approx(max(token), rel=1e-5)
    out = sum(not bounds["low"] <= w <= bounds["high"] for w in token)
    assert metrics["rollout/weight_outside"] == pytest.approx(out / 8) and 0 < out < 8
    for name in ("sequence", "geometric"):
        whole = [next(w for (r, _), w in importance[name].items() if r == row) for row in (0, 2, 3)]
        assert metrics[f"rollout/{name}_weight_mean"] == pytest.approx(sum(whole) / 3, rel=1e-5)
        out = sum(not 0.7 <= w <= 1.3 for w in whole)
        assert metrics[f"rollout/{name}_weight_outside"] == pytest.approx(out / 3) and out > 0
    gaps = [math.log(w) for w in token]
    assert metrics["rollout/kl"] == pytest.approx(sum(math.exp(g) - g - 1 for g in gaps) / 8, rel=1e-5)


def rows_of(batch, rows):
    """A micro-batch of some rows of another."""
    columns = {name: column[rows] for name, column in batch.columns.items()}
    taken = {name: getattr(batch, name)[rows] for name in ("tokens", "labels", "position_ids", "mask", "lengths")}
    return dataclasses.replace(batch, **taken, columns=columns)


@pytest.mark.parametrize("rows", [([0, 1], [2, 3]), ([3], [1], [0, 2]), ([3, 2, 1, 0],)])
def test_masked_responses_count_in_the_loss_however_they_are_split(rows):
    """A row that its geometric mean masks out takes no part in the gradient, and changes no other row's."""
    flags = {"correction": "mask", "correction_level": "geometric", "correction_low": 0.8, "correction_high": 1.25}
    algorithm = resolve(AlgorithmConfig(algorithm="grpo", aggregation="token-mean", kl_loss_coef=0.0, **flags))
    batch, logp, entropy = micro_batch(seed=11)
    weights = torch.full((4,), 1 / sum(COUNTS), dtype=torch.float64)
    loss, tally = part_of(algorithm, batch, weights, logp, entropy)
    (whole,) = torch.autograd.grad(loss, logp)
    means = weights_by_loops(batch, "geometric")
    kept = {row for (row, _), w in means.items() if 0.8 <= w <= 1.25}
    assert kept == {0, 3} == {row for row in range(4) if whole[row].any()}
    parts = [part_of(algorithm, rows_of(batch, r), weights[r], logp[r], entropy[r]) for r in rows]
    (summed,) = torch.autograd.grad(sum(part for part, _ in parts), logp)
    torch.testing.assert_close(summed, whole, rtol=1e-12, atol=1e-15)
    sums = sum(part[:SUM_COUNT] for _, part in parts)
    torch.testing.assert_close(sums, tally[:SUM_COUNT], rtol=1e-5, atol=1e-6)


RULES = [("grpo", name, "off", "token") for name in AGGREGATIONS]
RULES += [("gspo", "seq-mean-token-mean", "off", "token")]
RULES += [("grpo", "token-mean", "truncate", level) for level in ("sequence", "geometric")]


@pytest.mark.parametrize("preset, aggregation, correction, level", RULES)
@pytest.mark.parametrize("packed", [False, True])
def test_an_episode_that_forks_is_one_sequence(preset, aggregation, correction, level, packed):
    """Its loss is that of a linear one with the same trained tokens, whichever paths they are in."""
    algorithm = resolve(
        AlgorithmConfig(algorithm=preset, aggregation=aggregation, correction=correction, correction_level=level)
    )
    g, names = torch.Generator().manual_seed(1), ("logp_old", "advantages", "logp_rollout", "logp")
    trained, counts = torch.randn(len(names), 8, generator=g, dtype=torch.float64), torch.tensor([5, 3])
    trained[2] = trained[0] + 0.1 * trained[2]
    masks = {
        "linear": [[0, 0, 1, 1, 0, 1, 1, 1], [0, 1, 1, 0, 1]],
        "forked": [[0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1], [0, 1, 0, 1, 0, 1]],  # paths begin at 0, 6; 0, 2, 4
    }
    paths = Ragged.from_rows([torch.tensor([[0, 2], [6, 4]]), torch.tensor([[0, 1], [2, 1], [4, 1]])])
    losses = []
    for kind, mask in masks.items():
        mask = Ragged.from_rows([torch.tensor(row) for row in mask])
        columns = {name: torch.zeros(len(mask.values), dtype=torch.float64) for name in names}
        for name, values in zip(names, trained, strict=True):
            columns[name][mask.values.bool()] = values
        rows = Rows(
            (SampleId(0, 0, 0), SampleId(0, 0, 1)),
            {"tokens": Ragged(torch.arange(len(mask.values)), mask.offsets), "loss_mask": mask}
            | {name: Ragged(column, mask.offsets) for name, column in columns.items()}
            | ({"paths": paths} if kind == "forked" else {}),
        )
        batch = collate(rows, ForwardSettings(2, 16, 99, max_tokens=99, packed=packed), columns=names)
        logp = batch.columns["logp"].clone().requires_grad_()
        weights = algorithm.weights(counts, Totals(8, 2, 16 if aggregation == "token-sum-norm" else None))
        loss, tally = part_of(algorithm, batch, weights, logp, torch.ones_like(logp))
        losses.append((loss.detach(), tally, torch.autograd.grad(loss, logp)[0][batch.mask]))
    for one, other in zip(*losses, strict=True):
        assert torch.equal(one, other) and one.isfinite().all()
    assert losses[0][2].any()


@pytest.mark.parametrize("stale", [(), (2,), (0, 3), (0, 2, 3)])
def test_rows_of_older_weights_tell_nothing_of_engine_and_trainer(stale):
    """They are off-policy, so they count in the weights; their log-probs differ because the weights do."""
    batch, logp, entropy = micro_batch()
    fresh = torch.tensor([row not in stale for row in range(4)])
    weights = torch.full((4,), 0.1, dtype=torch.float64)
    algorithm = resolve(AlgorithmConfig(algorithm="grpo"))
    _, tally = part_of(algorithm, batch, weights, logp, entropy, fresh=fresh)
    got, all_fresh = (
        to_metrics(t, Totals(sum(COUNTS), 3)) for t in (tally, part_of(algorithm, batch, weights, logp, entropy)[1])
    )
    gap = (batch.columns["logp_old"] - batch.columns["logp_rollout"]).abs()
    gaps = [float(gap[row, at]) for row, at in batch.mask.nonzero().tolist() if fresh[row]]
    assert got["rollout/stale"] == pytest.approx(1 - len(gaps) / sum(COUNTS))
    if gaps:
        assert got["logp_diff/mean"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-5)
        assert got["logp_diff/max"] == pytest.approx(max(gaps), rel=1e-5)
    else:
        assert not {"logp_diff/mean", "logp_diff/max"} & got.keys()
    ours = {"logp_diff/mean", "logp_diff/max", "rollout/stale"}
    assert {k: v for k, v in got.items() if k not in ours} == {k: v for k, v in all_fresh.items() if k not in ours}


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo", "rloo", "dapo", "dr-grpo", "reinforce++"])
def test_a_micro_batch_without_a_trained_token_adds_nothing(algorithm):
    """A rank with no trained token still runs its step."""
    batch, logp, entropy = micro_batch()
    batch.mask.zero_()
    loss, tally = part_of(resolve(AlgorithmConfig(algorithm=algorithm)), batch, torch.zeros(4), logp, entropy)
    loss.backward()
    assert float(loss) == 0.0 and not logp.grad.any()
    metrics = to_metrics(tally, Totals(0, 0))
    assert metrics["ratio/mean"] == metrics["rollout/weight_mean"] == 1.0 and "ratio/max" not in metrics


@pytest.mark.parametrize("correction", ["off", "truncate"])
@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo"])
def test_old_logps_of_the_update_itself_are_those_it_computes(algorithm, correction):
    """Loss, gradient and tally are those of a column that holds the same numbers."""
    algorithm = resolve(AlgorithmConfig(algorithm=algorithm, correction=correction, kl_loss_coef=0.1))
    batch, logp, entropy = micro_batch()
    batch.columns["logp_old"] = logp.detach().clone()
    weights = torch.full((4,), 0.1, dtype=torch.float64)
    expected = part_of(algorithm, batch, weights, logp, entropy)
    (wanted,) = torch.autograd.grad(expected[0], logp)
    del batch.columns["logp_old"]
    loss, tally = part_of(dataclasses.replace(algorithm, old_logps=False), batch, weights, logp, entropy)
    (got,) = torch.autograd.grad(loss, logp)
    assert torch.equal(loss, expected[0]) and torch.equal(tally, expected[1]) and torch.equal(got, wanted)
    assert wanted.abs().max() > 0


def test_what_a_step_counts_is_reduced_once_for_each_data_parallel_rank(monkeypatch) -> None:
    """Eight ranks: TP2 PP2 DP2, of which the last four hold the end of the model, or the first (a folded pipeline)."""
    given = []

    def gathered(others):
        monkeypatch.setattr(tallies, "gather_all", lambda mine: given.append(mine) or others)

    monkeypatch.setattr(tallies.parallel_state, "get_data_parallel_rank", lambda: 1)
    dp = (0, 0, 1, 1) * 2
    gathered([(rank, [10 * rank + 1, 2**40]) for rank in dp])
    assert tallies.summed(torch.tensor([11, 2**40])) == [12, 2**41] and given == [(1, [11, 2**40])]
    ends = [(0, [0.1, 1e17, -3.0]), (0, [0.1, 1e17, -3.5]), (1, [0.2, 1.0, -5.0]), (1, [0.2, 1.5, -5.0])]
    others = [(rank, None) for rank in dp[:4]]
    mine = [torch.tensor([0.5, 1.0, -9.0]), torch.tensor([-0.25, 0.0, -5.0])]
    for every, tally in ((others + ends, None), (ends + others, mine)):  # the first one of tensor parallel ranks counts
        gathered(every)
        whole = tallies.reduce_tallies(tally, 2)
        assert whole.dtype == torch.float64 and whole.tolist() == [0.1 + 0.2, 1e17 + 1.0, -3.0]
    assert given[1:] == [(1, None), (1, [0.25, 1.0, -5.0])]


def test_value_objective_is_the_loop():
    batch, values, _ = micro_batch()
    old, returns = (batch.columns[name] for name in ("logp_old", "advantages"))
    batch.columns.update(values=old, returns=returns)
    weights = torch.tensor([0.1, 9.0, 0.3, 0.2], dtype=torch.float64)
    want, grad, clipped = 0.0, torch.zeros_like(values), 0
    for row, at in batch.mask.nonzero().tolist():
        v, o, r = (float(x[row, at]) for x in (values.detach(), old, returns))
        bounded = min(max(v, o - CLIP), o + CLIP)
        plain = (v - r) ** 2 >= (bounded - r) ** 2
        want += float(weights[row]) * 0.5 * max((v - r) ** 2, (bounded - r) ** 2)
        clipped += not plain
        grad[row, at] = float(weights[row]) * (v - r) if plain or abs(v - o) < CLIP else 0.0
    loss, tally = value_objective(batch, weights, torch.ones(4), values, CLIP)
    loss.backward()
    assert float(loss) == pytest.approx(want) and 0 < clipped < sum(COUNTS)
    torch.testing.assert_close(values.grad, grad)
    sums = dict(zip(TALLIED, tally.tolist(), strict=True))
    metrics = value_metrics(sums, sum(COUNTS))
    trained_old, trained = old[batch.mask], returns[batch.mask]
    explained = 1 - (trained - trained_old).var(unbiased=False) / trained.var(unbiased=False)
    assert metrics["critic/explained_variance"] == pytest.approx(float(explained), rel=1e-5)
    assert metrics["critic/clip_fraction"] == pytest.approx(clipped / sum(COUNTS))
    assert metrics["critic/value_mean"] == pytest.approx(float(trained_old.mean()), rel=1e-5)


def test_a_perfect_critic_a_constant_one_and_equal_returns():
    def measured(old, returns):
        error = returns - old
        sums = (0.0, 0.0, old.sum(), returns.sum(), returns.square().sum(), error.sum(), error.square().sum())
        return value_metrics(dict(zip(TALLIED, map(float, sums), strict=True)), len(returns))

    returns = torch.tensor([0.0, 1.0, 1.0, 3.0])
    assert measured(returns, returns)["critic/explained_variance"] == pytest.approx(1.0)
    assert measured(torch.full((4,), 7.0), returns)["critic/explained_variance"] == pytest.approx(0.0)
    assert measured(-returns, returns)["critic/explained_variance"] == pytest.approx(-3.0)
    assert "critic/explained_variance" not in measured(returns, torch.full((4,), 0.3))
    assert "critic/explained_variance" not in value_metrics(dict.fromkeys(TALLIED, 0.0), 0)
