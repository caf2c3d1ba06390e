"""How much a dock must hold: the longest rollout there may be, refused before anything runs; what a process outside of
the job remembers of epochs."""

import bisect
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from dock_help import Maker, ids

from mindspeed_rl_plugin.dock import ColumnSpec, DockLimits, Ragged, Rows, SampleId, StateSpec
from mindspeed_rl_plugin.dock.calls import KEPT, Epochs
from mindspeed_rl_plugin.dock.messages import Grant, Shape

pytestmark = pytest.mark.quick

COLUMNS = [
    ColumnSpec("prompt", torch.int32, "group", ragged=True),
    ColumnSpec("tokens", torch.int32, "token", ragged=True),
    ColumnSpec("parts", torch.int64, "sample", ragged=True, trailing=(2,), longest=3),
    ColumnSpec("reward", torch.float32, "sample", ragged=False),
]
STATES = [StateSpec("generate", ("prompt",), ("tokens", "parts")), StateSpec("grade", ("tokens",), ("reward",))]
ROW = (100 * 4 + 128) + (3 * 16 + 128) + (4 + 128)  # tokens, parts, reward, and two lines each
GROUP = 7 * 64  # 100 * 4 bytes in whole lines


def test_a_dock_below_one_rollout_is_refused() -> None:
    need = 5 * (2 * ROW + GROUP)
    DockLimits(capacity=need, max_tokens=100).check(COLUMNS, STATES, 5, 2)
    DockLimits().check(COLUMNS, STATES, 5, 2)
    with pytest.raises(ValueError, match="longest sample"):
        DockLimits(capacity=need).check(COLUMNS, STATES, 5, 2)
    said = rf"5 groups of 2 samples on one machine may need {need} bytes .* with 100 entries per cell of prompt;"
    with pytest.raises(ValueError, match=said):
        DockLimits(capacity=need - 1, max_tokens=100).check(COLUMNS, STATES, 5, 2)


EXTRA = {  # a column more
    "group put": ColumnSpec("more", torch.uint8, "group", ragged=True),
    "sample put": ColumnSpec("more", torch.float32, "sample", ragged=False, trailing=(3,)),
    "group written back": ColumnSpec("more", torch.float32, "group", ragged=False),
    "token written back": ColumnSpec("more", torch.float32, "token", ragged=True),
}


@pytest.mark.parametrize("extra", EXTRA)
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "by group"])
def test_the_longest_rollout_fits_at_exactly_the_capacity_that_passes(
    make_one: Maker, extra: str, at_once: bool
) -> None:
    columns, produced = [*COLUMNS, EXTRA[extra]], "put" in extra
    reads, writes = (("prompt", "more"), ()) if produced else (("prompt",), ("more",))
    states = [StateSpec("generate", reads, ("tokens", "parts", *writes)), STATES[1]]
    groups, size = 3, 2

    def passes(capacity: int) -> bool:
        try:
            DockLimits(capacity, max_tokens=100).check(columns, states, groups, size)
        except ValueError:
            return False
        return True

    need = bisect.bisect(range(1 << 20), False, key=passes)
    dock = make_one(columns, states, limits=DockLimits(need, max_tokens=100))
    (house,) = make_one.houses
    dock.open(0, groups, size)
    rows = ids(groups, size)

    def longest(rows: tuple[SampleId, ...], names: Sequence[str]) -> Rows:
        return Rows(rows, {c.name: full(c, len(rows)) for c in columns if c.name in names})

    for part in [rows] if at_once else [rows[i : i + size] for i in range(0, len(rows), size)]:
        dock.put(longest(part, reads))
    assert house.taken()["bytes"] <= need
    assert at_once or extra == "sample put" or house.taken()["bytes"] == need  # else cells of a put share lines
    for state in states:
        lease = dock.lease(state.name, ids=rows, deadline=5)
        dock.commit(lease, longest(lease.rows.ids, state.writes))
        assert house.slabs.used <= house.taken()["bytes"] <= need


def full(column: ColumnSpec, rows: int) -> torch.Tensor | Ragged:
    """The longest cells of a column."""
    if not column.ragged:
        return torch.ones(rows, *column.trailing, dtype=column.dtype)
    cell = torch.ones(column.longest or 100, *column.trailing, dtype=column.dtype)
    return Ragged.from_rows([cell] * rows, column.dtype)


def test_a_put_waits_for_rows_and_for_bytes_until_groups_are_cleared(make_one) -> None:
    """Space for two groups: a third waits until one is cleared, and says so when none is."""
    DockLimits(rows=10).check(COLUMNS, STATES, 5, 2)
    with pytest.raises(ValueError, match="--rl-dock-rows 9: 5 groups of 2 .* 10 rows"):
        DockLimits(rows=9).check(COLUMNS, STATES, 5, 2)
    for limits, unit in ((DockLimits(rows=4), "rows"), (DockLimits(2 * (2 * ROW + GROUP), max_tokens=100), "bytes")):
        dock = make_one(COLUMNS, STATES, limits=limits)
        dock.open(0, 3, 2)
        put = [Rows((SampleId(0, group, 0),), {"prompt": full(COLUMNS[0], 1)}) for group in range(3)]
        for rows in put[:2]:
            dock.put(rows)
        with pytest.raises(TimeoutError, match=rf"(\d+) of \1 {unit} .* \d+ more"):
            dock.put(put[2])
        with pytest.raises(ValueError, match=f"a put of 3 groups needs .* {unit}"):  # an empty dock does not hold it
            dock.open(1, 3, 2)
            dock.put(Rows(ids(3, 2, 1)[::2], {"prompt": full(COLUMNS[0], 3)}))
        timer = threading.Timer(0.05, lambda dock=dock: dock.clear(0, [0]))
        timer.start()
        dock.put(put[2])
        timer.join()
        assert len(dock.lease("generate", deadline=5)) == 4


def test_text_that_a_state_writes_counts_as_long_as_it_is(make_one: Maker) -> None:
    """Nothing bounds it: what is longer than the promise is no error, and a producer waits for it."""
    columns = [*COLUMNS, ColumnSpec("text", torch.uint8, "sample", ragged=True)]
    states = [StateSpec("generate", ("prompt",), ("tokens", "parts", "text")), STATES[1]]
    row = ROW + 100 + 128
    dock = make_one(columns, states, limits=DockLimits(2 * (row + GROUP), max_tokens=100))
    (house,) = make_one.houses
    dock.open(0, 2, 1)
    puts = [Rows((SampleId(0, group, 0),), {"prompt": full(COLUMNS[0], 1)}) for group in range(2)]
    dock.put(puts[0])
    assert house.taken()["bytes"] == row + GROUP
    lease = dock.lease("generate", deadline=5)
    text = Ragged.from_rows([torch.ones(1000, dtype=torch.uint8)], torch.uint8)
    made = {c.name: full(c, 1) for c in COLUMNS if c.name in states[0].writes}
    dock.commit(lease, Rows(lease.rows.ids, {**made, "text": text}))
    assert house.taken()["bytes"] == row + GROUP + 900
    with pytest.raises(TimeoutError, match="bytes are used or reserved"):
        dock.put(puts[1])
    dock.clear(0, [0])
    dock.put(puts[1])
    assert house.taken()["bytes"] == row + GROUP


def grant(*epochs: int) -> Grant:
    """The first row of each epoch, of 4 groups x 2 members, all in warehouse 1."""
    ids = np.array([(epoch, 0, 0) for epoch in epochs], np.int64)
    empty = Grant.empty(1)
    places, shapes = (empty.segment, empty.offset, empty.length), [(epoch, Shape(4, 2)) for epoch in epochs]
    return Grant(1, ids, np.full(len(ids), 1, np.int32), *places, shapes)


def test_epochs_that_are_learned_do_not_grow_without_bound() -> None:
    """The oldest are forgotten, which reads like a cleared one, and come back with a lease."""
    epochs = Epochs(None)
    for number in range(3 * KEPT):
        epochs.learn(grant(number))
    assert list(epochs.known) == list(range(2 * KEPT, 3 * KEPT))
    assert list(epochs.owned("read", np.array([(3 * KEPT - 1, 0, 0)]))) == [(3 * KEPT - 1, 1)]
    old = np.array([(5, 0, 0)])
    assert epochs.cleared("read", old).all() and not epochs.owned("commit", old)
    epochs.learn(grant(5))
    assert list(epochs.owned("commit", old)) == [(5, 1)] and len(epochs.known) == KEPT
    with pytest.raises(ValueError, match="epoch 9999 was not opened"):
        epochs.opened("read", 9999)
    epochs.learn(grant(5, *range(9000, 9000 + KEPT)))
    assert {5, *range(9000, 9000 + KEPT)} == epochs.known.keys(), "what one lease brings is all known"
