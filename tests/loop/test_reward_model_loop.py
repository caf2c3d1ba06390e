"""A reward model grades in the loop, beside a rule, in the grader processes of both ranks."""

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification


@pytest.mark.slow
def test_a_reward_model_and_a_rule(job, arithmetic, tmp_path):
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
