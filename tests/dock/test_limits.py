"""How much a dock must hold: the longest rollout there may be, refused before anything runs."""

import pytest
import torch

from mindspeed_rl_plugin.dock import ColumnSpec, Limits, StateSpec

COLUMNS = [
    ColumnSpec("prompt", torch.int32, "group", ragged=True),
    ColumnSpec("tokens", torch.int32, "token", ragged=True),
    ColumnSpec("parts", torch.int64, "sample", ragged=True, trailing=(2,), longest=3),
    ColumnSpec("reward", torch.float32, "sample", ragged=False),
]
STATES = [StateSpec("generate", ("prompt",), ("tokens", "parts")), StateSpec("grade", ("tokens",), ("reward",))]
ROW = (100 * 4 + 64) + (3 * 16 + 64) + (4 + 64)  # tokens, parts, reward, and a line each
GROUP = 100 * 4 + 64


def test_write_backs_are_the_longest_cells() -> None:
    limits = Limits(capacity=1, max_tokens=100)
    assert limits.write_backs(COLUMNS, STATES) == {"tokens": 400, "parts": 48, "reward": 4}
    assert Limits().write_backs(COLUMNS, STATES) == {}
    with pytest.raises(ValueError, match="must know the longest sample"):
        Limits(capacity=1).write_backs(COLUMNS, STATES)


def test_a_dock_below_one_rollout_is_refused() -> None:
    need = 5 * (2 * ROW + GROUP)
    Limits(capacity=need, max_tokens=100).check(COLUMNS, STATES, 5, 2)
    Limits().check(COLUMNS, STATES, 5, 2)
    with pytest.raises(ValueError, match=rf"5 groups of 2 samples on one machine may need {need} bytes"):
        Limits(capacity=need - 1, max_tokens=100).check(COLUMNS, STATES, 5, 2)
