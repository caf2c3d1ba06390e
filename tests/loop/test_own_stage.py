"""`--rl-stage` in a whole job: the example's reward is trained on, and its column is in the dump."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from tensordict import TensorDict

from mindspeed_rl_plugin.stages.user import load_stages

FILE = Path(__file__).parents[2] / "examples" / "stages" / "short_first.py"


def test_the_example_changes_the_reward_and_takes_cut_responses_out():
    ((spec, stage),) = load_stages([f"{FILE}:ShortFirst"], 1)
    ids = torch.tensor([[0, g, m] for g in range(2) for m in range(3)])
    rows = {
        "ids": ids,
        "reward": torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0]),
        "response_length": torch.tensor([3, 5, 1, 2, 2, 8]),
        "finish": torch.tensor([0, 0, 0, 0, 0, 1], dtype=torch.int8),
    }
    got = stage.compute(TensorDict(rows, batch_size=[6]))
    assert got["reward"].tolist() == pytest.approx([1.0, 0.9, 0.0, 0.0, 0.0, 1.0])
    assert got["is_shortest"].tolist() == [True, False, False, False, False, True]
    assert got["valid"].tolist() == [True] * 5 + [False] and spec.whole_groups


def test_a_stage_of_ones_own_in_a_job(job):
    done = job("--train-iters", "2", "--rl-stage", f"{FILE}:ShortFirst", ranks=1).dumping()
    result = done.run()
    cut = 0.0
    dumps = sorted((done.save / "dump").glob("*.parquet"))  # one whose rows were all cut is sampled again
    for path, line in zip(dumps, result.metrics, strict=True):
        table = pq.read_table(path).to_pydict()
        assert set(table["is_shortest"]) <= {0, 1}
        parts, rewards = (parts[0] for parts in table["reward_parts"]), table["reward"]
        for part, reward, shortest in zip(parts, rewards, table["is_shortest"], strict=True):
            right = part >= 1
            assert reward == pytest.approx(part - 0.1 * (right and not shortest)) and (right or not shortest)
        share = sum(finish == "length" for finish in table["finish"]) / len(rewards)
        assert line["groups/dropped"] == pytest.approx(share)
        cut += share
        valid = [r for r, finish in zip(rewards, table["finish"], strict=True) if finish != "length"]
        assert line["reward/mean"] == pytest.approx(sum(valid) / len(valid))
    assert cut > 0, "some responses reach the limit"
