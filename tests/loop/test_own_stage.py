"""The example of `--rl-stage` on hand-made rows; in a whole job: test_agreement.py."""

from pathlib import Path

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
