"""How much a dock must hold: the longest rollout there may be, refused before anything runs."""

import pytest
import torch

from mindspeed_rl_plugin.dock import ColumnSpec, Limits, StateSpec, make_dock
from mindspeed_rl_plugin.dock.distributed.credits import missing
from mindspeed_rl_plugin.types import Ragged, Rows, SampleId

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


def test_rows_are_limited_too() -> None:
    Limits(rows=10).check(COLUMNS, STATES, 5, 2)
    with pytest.raises(ValueError, match="--rl-dock-rows 9: 5 groups of 2 samples on one machine are 10 rows"):
        Limits(rows=9).check(COLUMNS, STATES, 5, 2)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"bytes": 60, "rows": 2}, None),
        ({"bytes": 61, "rows": 2}, "40 of 100 bytes are taken or promised, the put needs 61 more"),
        ({"bytes": 1, "rows": 3}, "8 of 10 rows are taken or promised, the put needs 3 more"),
    ],
)
def test_a_put_waits_for_bytes_and_for_rows(wanted: dict, said: str | None) -> None:
    taken, limits = {"bytes": 40, "rows": 8}, {"bytes": 100, "rows": 10}
    assert missing(wanted, taken, limits, 1) == said
    assert missing(wanted, taken, {"bytes": None, "rows": None}, 1) is None


def test_what_an_empty_dock_does_not_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 11 rows.*holds 10; put fewer groups at once or raise --rl-dock-rows"):
        missing({"bytes": 1, "rows": 11}, {"bytes": 100, "rows": 0}, {"bytes": 100, "rows": 10}, 11)


@pytest.mark.parametrize("medium", ["local", "shm"])
def test_a_lone_rank_has_limits_too(medium: str) -> None:
    """Room for four rows: a third group waits for one to be cleared, and says so when none is."""
    limits = Limits(rows=4)
    dock = make_dock(COLUMNS, STATES, medium=medium, consumer=None, limits=limits, deadline=0.5)
    try:
        dock.open(0, 3, 2)
        prompts = [
            Rows((SampleId(0, g, 0),), {"prompt": Ragged.from_rows([torch.ones(3)], torch.int32)}) for g in range(3)
        ]
        dock.put(prompts[0])
        dock.put(prompts[1])
        with pytest.raises(TimeoutError, match="4 of 4 rows are taken or promised, the put needs 2 more"):
            dock.put(prompts[2])
        dock.clear(0, [0])
        dock.put(prompts[2])
        assert dock.remaining("generate") == 4
    finally:
        dock.close()
