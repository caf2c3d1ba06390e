"""Generators apart from the trainers: real torchrun, real Megatron, real vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

AGREEMENT = 2e-5  # nats, fp32: log-probs of the engine against the trainer's
LAGGED = Path(__file__).with_name("lagged_script.py")
ASYNC = ("--rl-schedule", "async", "--rl-generators", "1", "--rl-correction", "truncate")
STRICT = ("--rl-async-order", "strict")
# Two optimizer steps of a rollout, so that publications are fewer than iterations.
SIZES = ("--rl-rollout-prompts", "8", "--rl-correction", "truncate")
COMPARED = ("reward/mean", "loss", "grad_norm", "entropy", "kl/ref", "rollout/kl", "response/length_mean", "version")


def numbers(result) -> list[list[float]]:
    return [[line.get(name) for name in COMPARED] for line in result.metrics]


@pytest.mark.parametrize("k", [0, pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_strict_order_is_a_lagged_synchronous_run_bit_by_bit(job, monkeypatch, k: int) -> None:
    """Six rollouts; at k = 0 the oracle is the synchronous schedule as it is."""
    monkeypatch.setenv("LAG", str(k))
    common = ("--train-iters", "12", *SIZES)
    order = (*STRICT, "--rl-max-staleness", str(k))
    strict = job(*common, *ASYNC, *order, ranks=2, name="async").run()
    oracle = job(*common, ranks=1, name="sync", **({"script": LAGGED} if k else {})).run()
    assert numbers(strict) == numbers(oracle)
    assert len({line["reward/mean"] for line in strict.metrics[::2]}) > 1, "rewards that never change show nothing"
    firsts = strict.metrics[::2]
    assert [line["version"] for line in firsts] == [2 * max(0, e - k) for e in range(6)]
    assert [line["lag/max"] for line in firsts] == [min(e, k) for e in range(6)]


# Few slots, and responses of many lengths, so that some are in the making at every publication.
FREE = (
    "--train-iters",
    "12",
    "--rl-max-response-length",
    "16",
    "--rl-max-running",
    "6",
    "--rl-stop-token-ids",
    "7",
    "8",
)


@pytest.mark.parametrize("inflight", ["keep", "recompute", "drain"])
def test_new_weights_come_while_responses_are_in_the_making(job, inflight: str) -> None:
    """The bound holds for each token; where responses go on under newer weights, some have several segments."""
    result = job(*FREE, *ASYNC, "--rl-inflight", inflight, "--rl-max-staleness", "2").run()
    lines = result.metrics
    assert len(lines) == 12 and all(line["lag/max"] <= 2 for line in lines)
    assert max(line["lag/max"] for line in lines) >= 1
    assert (max(line["segments/mean"] for line in lines) > 1) == (inflight != "drain")


LAYOUTS = {
    "TP2-to-TP2": ("--tensor-model-parallel-size", "2", "--rl-generate-tp", "2", "--rl-generators", "2"),
    "PP2-to-two-engines": ("--pipeline-model-parallel-size", "2", "--rl-generators", "2"),
    "DP2-to-TP1": ("--rl-generators", "1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_of_other_sizes_agree_with_the_trainers(job, nothing_left, layout: str) -> None:
    """Without lag each log-prob of the engine is the trainer's; weights are compared by digests."""
    flags = LAYOUTS[layout]
    ranks = 2 + int(flags[-1])
    result = job(
        "--train-iters", "4", *ASYNC, "--rl-max-staleness", "0", *flags, "--rl-verify-weights", ranks=ranks
    ).run()
    worst = [line["logp_diff/max"] for line in result.metrics]
    assert len(worst) == 4 and max(worst) < AGREEMENT, worst
    assert all(line["grad_norm"] > 1e-3 for line in result.metrics)
    nothing_left()


def test_an_evaluation_has_one_version_and_does_not_stop_training(job, arithmetic, nothing_left) -> None:
    """Accuracies are those of a synchronous run: greedy answers of the same weights."""
    data = ("--rl-eval-data", str(arithmetic / "heldout.jsonl"), "--rl-eval-every", "2", "--rl-eval-pass-k", "2")
    common = ("--train-iters", "4", "--rl-correction", "truncate", *data)
    apart = job(*common, *ASYNC, *STRICT, "--rl-max-staleness", "0", name="async").run()
    alone = job(*common, ranks=1, name="sync").run()
    names = ("iteration", "eval/accuracy", "eval/reward_mean", "eval/response_length", "eval/pass@1")
    assert [[e[n] for n in names] for e in apart.evaluations] == [[e[n] for n in names] for e in alone.evaluations]
    assert [e["iteration"] for e in apart.evaluations] == [0, 2, 4]
    nothing_left()
