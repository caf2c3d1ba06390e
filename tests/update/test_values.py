"""The critic's step: against loops, and the same in every layout through Megatron's own train_step."""

import pytest
import torch
from test_objective import COUNTS, micro_batch

from mindspeed_rl_plugin.update.value_step import TALLIED, value_metrics, value_objective

CLIP = 0.2


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
    loss, tally = value_objective(batch, weights, values, CLIP)
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


ONE_RANK = {f"micro-batch {n}": f"--micro-batch-size {n}" for n in (1, 4)}
ONE_RANK["per token loss"] = "--micro-batch-size 2 --calculate-per-token-loss"
PACKED = {"packed": {"flags": "--micro-batch-size 2", "budget": 40}}
TWO_RANKS = {  # pipelines first, for core 0.12 leaves groups of them behind
    "PP2 packed": {"flags": "--pipeline-model-parallel-size 2 --micro-batch-size 2", "budget": 32},
    "PP2": "--pipeline-model-parallel-size 2 --micro-batch-size 2",
    "TP2": "--tensor-model-parallel-size 2 --micro-batch-size 2",
    "TP2 sequence parallel": "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 2",
    "DP2": "--micro-batch-size 2 --use-distributed-optimizer",
    "CP2": "--context-parallel-size 2 --micro-batch-size 4",
    "CP2 per token loss": "--context-parallel-size 2 --micro-batch-size 2 --calculate-per-token-loss",
    "DP2 overlapped": "--micro-batch-size 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "TP2 packed": {"flags": "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 2", "budget": 32},
    "DP2 packed": {"flags": "--micro-batch-size 4 --use-distributed-optimizer", "budget": 30},
}
FILTERED = {
    "repeated": {"flags": "--micro-batch-size 4", "rows": "repeated"},
    "filtered": {"flags": "--micro-batch-size 2", "rows": "filtered"},
    "filtered per token": {"flags": "--micro-batch-size 4 --calculate-per-token-loss", "rows": "filtered"},
    "filtered packed": {"flags": "--micro-batch-size 2", "budget": 40, "rows": "filtered"},
}


def test_a_row_that_counts_twice_teaches_the_critic_as_two_copies_of_it(assert_same, run_cases):
    """PF-PPO's critic; a row that was never sampled teaches it nothing."""
    plain = {"plain": "--micro-batch-size 4"}
    layouts = run_cases("values.py", 1, {**plain, **FILTERED})
    want, plain = layouts.pop("repeated"), layouts.pop("plain")
    for layout, got in layouts.items():
        assert_same(got, want, layout)
    assert want["grad_norm"] > 1e-3 and abs(want["grad_norm"] / plain["grad_norm"] - 1) > 1e-2
    assert 0 < want["metrics"]["critic/clip_fraction"] != plain["metrics"]["critic/clip_fraction"]


@pytest.mark.slow
def test_the_critic_takes_the_same_step_in_every_layout(assert_same, run_cases):
    layouts = {**run_cases("values.py", 1, {**ONE_RANK, **PACKED}), **run_cases("values.py", 2, TWO_RANKS)}
    want = layouts["micro-batch 1"]
    assert want["grad_norm"] > 1e-3 and 0 < want["metrics"]["critic/clip_fraction"] < 1
    assert want["values"].abs().max() > 0.5 and want["gradients"]["output_layer.weight"].abs().max() > 1e-3
    for layout, got in layouts.items():
        torch.testing.assert_close(got["values"], want["values"], rtol=1e-4, atol=1e-5, msg=lambda m, n=layout: n + m)
        assert_same(got, want, layout)
