"""Algorithms and rewards in whole jobs: presets with columns of their own, filtration, a reward model, bf16."""

import math

import pyarrow.parquet as pq
import pytest
import torch
from jobs import AGREEMENT
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

pytestmark = pytest.mark.slow
PRESETS = {
    "reinforce++": "--rl-algorithm reinforce++",
    "dapo": "--rl-algorithm dapo --rl-overlong-buffer 4",
    "pf-ppo": "--rl-algorithm pf-ppo",
    "grpo-pow": "--rl-filtration pow",
    "grpo-whole-batch": "--rl-filtration best-random --rl-filtration-whole-batch",
}
FILTERED = ("pf-ppo", "grpo-pow", "grpo-whole-batch")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_runs_end_to_end(job, preset):
    """Rollouts of two steps: the first starts at ratio 1, the later ones have moved."""
    correction = () if preset in FILTERED else ("--rl-correction", "truncate")
    more = (*PRESETS[preset].split(), "--train-iters", "4", "--rl-rollout-prompts", "8", "--lr", "3e-3", *correction)
    run = job(*more).dumping()
    result = run.run()
    assert [line["iteration"] for line in result.metrics] == [1, 2, 3, 4]
    result.check_log_probs()
    for line in result.metrics:
        assert line["grad_norm"] > 1e-3 and all(math.isfinite(v) for v in line.values() if isinstance(v, float))
        if correction and not line["rollout/stale"]:
            assert line["rollout/weight_mean"] == pytest.approx(1.0, abs=1e-5) and line["rollout/weight_outside"] == 0.0
    first, second, third, _ = result.metrics
    assert first["ratio/mean"] == first["ratio/max"] == 1.0 < second["ratio/max"] and third["ratio/max"] == 1.0
    if preset in FILTERED:  # each step trains as many responses as it has, some of them more than once
        assert first["trained/sequences"] == second["trained/sequences"] == 16
        assert 0 < first["filtration/distinct"] < 1
        if preset == "grpo-pow":
            assert first["filtration/reward_mean"] > first["reward/mean"], "large rewards are sampled more often"
        return
    # DAPO's second rollout begins with the groups that the first deferred, which older weights sampled.
    stale = [line["rollout/stale"] for line in result.metrics]
    assert stale[:2] == [0.0, 0.0]
    assert (max(stale[2:]) > 0) == (third.get("sampling/brought", 0.0) > 0) == (preset == "dapo")
    assert ("kl/ref" in first) == ("seconds/logp_ref" in first) == (preset == "reinforce++")
    check_advantages(run.save / "dump" / "rollout-000002.parquet", by_token=preset == "reinforce++")


def check_advantages(dump, by_token: bool) -> None:
    """KL in the reward of each token: with a policy that has moved, tokens of a response differ."""
    rows = pq.read_table(dump).to_pylist()
    advantages = [[a for a in row["advantages"] if a] for row in rows]
    assert any(len(set(row)) > 1 for row in advantages) == by_token
    if by_token:
        every = torch.tensor([a for row in rows for a in row["advantages"]])
        assert float(every.mean()) == pytest.approx(0.0, abs=1e-4)
        assert float(every.var()) == pytest.approx(1.0, rel=1e-3)


def test_a_reward_model_and_a_rule(job, arithmetic, tmp_path):
    """In the grader processes of both ranks."""
    tokenizer = AutoTokenizer.from_pretrained(arithmetic / "tokenizer")
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1)
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, initializer_range=0.5, **sizes)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    rewards = ("--rl-reward", f"model:{tmp_path / 'rm'}=0.5", "exact=2", "--rl-reward-timeout", "60")
    run = job("--train-iters", "2", *rewards).dumping()
    result = run.run(400)
    assert [line["reward/errors"] for line in result.metrics] == [0.0, 0.0]
    assert all(line["groups/informative"] == 1.0 and line["grad_norm"] > 1e-3 for line in result.metrics)
    for row in pq.read_table(run.save / "dump" / "rollout-000000.parquet").to_pylist():
        score, equal = row["reward_parts"]
        assert equal in (0.0, 1.0) and score not in (0.0, 1.0)
        assert row["reward"] == pytest.approx(0.5 * score + 2 * equal, abs=1e-5)


# Nats, bf16. An untrained model's logits are below 1 (initial std 0.02 x 8 = sqrt(hidden), times a normal), and bf16
# rounds them by up to 2^-9 on each side; hidden states rounded before them add as much again: 4 x 2^-9 for the
# worst token. One update at the learning rate of these tests moves log-probs by 0.1 and more.
AGREEMENT_BF16 = 2**-7
FAILS_OFTEN = """
def grade(prompt, response, answer):
    assert sum(map(ord, response)) % 3, 'a multiple of three'
    return sum(map(ord, response)) % 5 / 4
"""


def test_bf16_with_one_group_on_two_engines_and_failing_graders(job, arithmetic, tmp_path):
    """Fewer groups than ranks and engines, one evaluation prompt for two engines; failed grades count as zero."""
    (tmp_path / "grader.py").write_text(FAILS_OFTEN)
    few = ("--rl-rollout-prompts", "1", "--rl-samples-per-prompt", "8", "--global-batch-size", "8")
    graded = ("--rl-reward", f"{tmp_path}/grader.py:grade", "--rl-reward-on-error", "zero")
    held_out = ("--rl-eval-data", str(arithmetic / "heldout.jsonl"), "--rl-eval-every", "1", "--rl-eval-prompts", "1")
    small = job("--bf16", "--train-iters", "3", "--rl-verify-weights", *few, *graded, *held_out).dumping()
    result = small.run()
    assert all(line["ratio/mean"] == line["ratio/max"] == 1.0 for line in result.metrics)
    worst = [line["logp_diff/max"] for line in result.metrics]
    assert max(worst) < AGREEMENT_BF16, worst
    assert min(worst) > 10 * AGREEMENT, f"{worst}: not bf16"
    assert result.metrics[0]["kl/ref"] == 0.0 and result.metrics[2]["kl/ref"] > 1e-4
    assert [line["eval/accuracy"] in (0.0, 1.0) for line in result.evaluations] == [True] * 4
    for epoch, line in enumerate(result.metrics):
        rows = pq.read_table(small.save / "dump" / f"rollout-{epoch:06d}.parquet").to_pylist()
        assert [(row["group"], row["member"]) for row in rows] == [(0, member) for member in range(8)]
        sums = [sum(map(ord, row["response"])) for row in rows]
        assert [row["reward"] for row in rows] == [s % 5 / 4 if s % 3 else 0.0 for s in sums]
        assert line["reward/errors"] == sum(s % 3 == 0 for s in sums)
        assert line["groups/dropped"] == 0.0 and line["trained/sequences"] == 8
    assert sum(line["reward/errors"] for line in result.metrics) > 0
