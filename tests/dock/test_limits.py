"""How much a dock must hold: the longest rollout there may be, refused before anything runs."""

import bisect
from typing import NamedTuple

import pytest
import torch

from mindspeed_rl_plugin.dock import ColumnSpec, DistributedDock, Limits, StateSpec, make_dock
from mindspeed_rl_plugin.dock.distributed.credits import missing
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

COLUMNS = [
    ColumnSpec("prompt", torch.int32, "group", ragged=True),
    ColumnSpec("tokens", torch.int32, "token", ragged=True),
    ColumnSpec("parts", torch.int64, "sample", ragged=True, trailing=(2,), longest=3),
    ColumnSpec("reward", torch.float32, "sample", ragged=False),
]
STATES = [StateSpec("generate", ("prompt",), ("tokens", "parts")), StateSpec("grade", ("tokens",), ("reward",))]
ROW = (100 * 4 + 128) + (3 * 16 + 128) + (4 + 128)  # tokens, parts, reward, and two lines each
GROUP = 7 * 64  # 100 * 4 bytes in whole lines


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
    said = rf"5 groups of 2 samples on one machine may need {need} bytes .* with 100 entries a cell of prompt;"
    with pytest.raises(ValueError, match=said):
        Limits(capacity=need - 1, max_tokens=100).check(COLUMNS, STATES, 5, 2)


class Extra(NamedTuple):
    """A column more, for a case; produced: by a put, else by a state."""

    spec: ColumnSpec
    produced: bool


EXTRA = [
    Extra(ColumnSpec("more", torch.uint8, "group", ragged=True), True),
    Extra(ColumnSpec("more", torch.float32, "sample", ragged=False, trailing=(3,)), True),
    Extra(ColumnSpec("more", torch.float32, "group", ragged=False), False),
    Extra(ColumnSpec("more", torch.float32, "token", ragged=True), False),
]


@pytest.mark.parametrize("extra", EXTRA, ids=lambda e: f"{e.spec.level} {'put' if e.produced else 'written back'}")
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "by group"])
def test_the_longest_rollout_fits_at_exactly_the_capacity_that_passes(members, extra: Extra, at_once: bool) -> None:
    columns = [*COLUMNS, extra.spec]
    reads, writes = (("prompt", "more"), ()) if extra.produced else (("prompt",), ("more",))
    states = [StateSpec("generate", reads, ("tokens", "parts", *writes)), STATES[1]]
    groups, size = 3, 2

    def passes(capacity: int) -> bool:
        try:
            Limits(capacity, max_tokens=100).check(columns, states, groups, size)
        except ValueError:
            return False
        return True

    need = bisect.bisect(range(1 << 20), False, key=passes)
    (member,) = members(columns, states, ["here"], limits=Limits(need, max_tokens=100))
    dock, house = DistributedDock(columns, states, member.connections, deadline=0.5), member.host.warehouse
    dock.open(0, groups, size)
    ids = tuple(SampleId(0, g, m) for g in range(groups) for m in range(size))

    def longest(rows: tuple[SampleId, ...], *names: str) -> Rows:
        return Rows(rows, {c.name: full(c, len(rows)) for c in columns if c.name in names})

    put = ("prompt", "more") if extra.produced else ("prompt",)
    for part in [ids] if at_once else [ids[i : i + size] for i in range(0, len(ids), size)]:
        dock.put(longest(part, *put))
    assert house.arena.used + house.outstanding <= need
    if not at_once and (extra.spec.level, extra.produced) != ("sample", True):  # else cells of a put share lines
        assert house.arena.used + house.outstanding == need
    for state in states:
        lease = dock.lease(state.name, min_rows=len(ids), deadline=5)
        dock.commit(lease, longest(lease.rows.ids, *state.writes))
        assert house.arena.used + house.outstanding <= need


def full(column: ColumnSpec, rows: int) -> torch.Tensor | Ragged:
    """The longest cells of a column."""
    if not column.ragged:
        return torch.ones(rows, *column.trailing, dtype=column.dtype)
    cell = torch.ones(column.longest or 100, *column.trailing, dtype=column.dtype)
    return Ragged.from_rows([cell] * rows, column.dtype)


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
    with pytest.raises(ValueError, match="needs 11 rows.*holds 10; lower --rl-rollout-prompts or raise --rl-dock-rows"):
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
