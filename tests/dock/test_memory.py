"""Memory of a warehouse: nobody's twice, all of it back, within its limit, and the same again for rollouts alike."""

from __future__ import annotations

import numpy as np
import pytest
from dock_help import COLUMNS, ids, prompts, ragged, sid, tokens
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.dock import DockLimits, Rows
from mindspeed_rl_plugin.dock.memory import LINE, SEGMENT_DIVISOR, Segments, Slabs

SEGMENT = 64 << 10
STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3 * SEGMENT)), max_size=60)


@given(STEPS, st.sampled_from([None, 4 * SEGMENT]))
@example([(0, 151745), (1, 110337), (1, 151745), (0, 1), (0, 1), (1, 1)], 4 * SEGMENT)
@example([(1, 3 * SEGMENT), (1, 1), (0, 0), (1, 1), (1, 3 * SEGMENT), (0, 2), (1, 1), (1, 3 * SEGMENT)], 4 * SEGMENT)
@settings(max_examples=60, deadline=None)
def test_extents_never_overlap_and_all_comes_back(steps: list[tuple[int, int]], limit: int | None) -> None:
    """What is reserved has no bound of its own, as one small extent keeps its whole segment (the examples). Where a new
    segment passes the limit, no free one is left, and it is no larger than it must be."""
    memory, held = Slabs(SEGMENT, limit), []
    readers = Segments(memory.place)
    for what, size in steps:
        if what == 0 and held:
            extent, value = held.pop(size % len(held))
            assert (readers.view(*extent) == value).all(), "nobody else wrote there"
            memory.free(*extent)
            continue
        fresh = memory._next
        extent = memory.allocate(size)
        assert extent.nbytes >= size and extent.offset % LINE == extent.nbytes % LINE == 0
        value = len(held) % 251 + 1
        memory.view(*extent)[:] = value
        held.append((extent, value))
        if extent.segment == fresh and memory.reserved > (2 * memory._most if limit is None else limit):
            sizes = {segment: made for segment, (_, made) in memory._files.items()}
            assert all(memory._free[segment] != [(0, made)] for segment, made in sizes.items()), "each holds something"
            assert limit is None or sizes[fresh] == max(extent.nbytes, limit // SEGMENT_DIVISOR)
    for extent, value in held:
        assert (readers.view(*extent) == value).all()
        memory.free(*extent)
    assert memory.used == 0 and all(free == [(0, memory._files[s][1])] for s, free in memory._free.items())
    memory.close()


def test_memory_of_a_removed_segment_goes_back_although_a_reader_maps_it() -> None:
    memory = Slabs(SEGMENT, 2 * SEGMENT)
    reader = Segments(memory.place)
    first = memory.allocate(SEGMENT)
    memory.view(*first)[:] = 7
    seen = reader.view(*first)
    memory.free(*first)
    second = memory.allocate(2 * SEGMENT)
    assert memory.reserved == 2 * SEGMENT and not seen.any(), "its pages are gone, and nobody crashes"
    reader.view(*second)
    assert list(reader._arrays) == [second.segment], "what it maps of it goes with the next segment that it maps"
    with pytest.raises(ValueError, match="segment 0"):
        Segments(memory.place).view(*first)
    memory.close()


def test_a_machine_without_memory_is_named(make_one, monkeypatch: pytest.MonkeyPatch) -> None:
    dock = make_one()
    dock.open(0, 1, 1)
    monkeypatch.setattr("mindspeed_rl_plugin.dock.memory.host_available", lambda: 1000)
    with pytest.raises(ValueError, match="1000 are free.*--rl-dock-gb"):
        dock.put(tokens([sid(0, 0)], 100_000))
    monkeypatch.undo()
    dock.put(tokens([sid(0, 0)], 100_000))


def test_the_line_in_which_a_neighbour_begins_is_not_freed(make_one) -> None:
    """Of two cells of 100 bytes the first is cleared: only its first line can be written again."""
    dock = make_one()
    dock.open(0, 2, 1)
    dock.open(1, 1, 1)
    dock.put(tokens(ids(2, 1), 25, 25))
    dock.clear(0, [0])
    assert make_one.houses[0].slabs.used == 3 * LINE
    dock.put(tokens([sid(0, 0, 1)], 2 * LINE // 4, start=100))
    assert dock.read([sid(1, 0)], ["tokens"])["tokens"].values.tolist() == [*range(25)]


@pytest.mark.parametrize("limits", [DockLimits(None, None, SEGMENT), DockLimits(3 << 20, 4000, SEGMENT)])
def test_rollouts_that_grow_leave_memory_flat(make_one, limits: DockLimits) -> None:
    """A hundred, half of every third deferred to the next: what is free is used again."""
    dock = make_one(limits=limits, deadline=5)
    (house,) = make_one.houses
    rng, groups, size = np.random.default_rng(0), 8, 4
    segments = []
    for epoch in range(100):
        dock.open(epoch, groups, size)
        dock.put(prompts(groups, epoch))
        for state in ("generate", "logp", "reward", "update"):
            lease = dock.lease(state, ids=ids(groups, size, epoch), deadline=5)
            if state == "generate":
                longest = 1000 + 30 * epoch
                rows = tokens(lease.rows.ids, *rng.integers(1, longest, len(lease)).tolist())
            elif state == "logp":
                lengths = lease.rows["tokens"].lengths.tolist()
                rows = Rows(lease.rows.ids, {"logp": ragged(*lengths, dtype=COLUMNS[2].dtype)})
            elif state == "reward":
                rows = Rows(lease.rows.ids, {"reward": lease.rows["prompt"].lengths.float()})
            dock.commit(lease, None if state == "update" else rows)
        before = house.slabs.used
        dock.clear(epoch, range(0, groups, 2) if epoch % 3 == 0 else None)
        assert house.slabs.used < 0.9 * before, "half of the groups, half of the bytes"
        if epoch % 3 == 1:
            dock.clear(epoch - 1)
        if epoch % 3:
            assert house.slabs.used == house.taken()["rows"] == 0 and not house._epochs
            assert limits.capacity is None or not house.taken()["bytes"]
        segments.append(house.slabs._next)
        most = 3 * house.slabs._most if limits.capacity is None else limits.capacity
        assert house.slabs.reserved <= most + 4 * SEGMENT
    assert len(dock.calls.epochs.known) <= 1 and not dock.calls.held
    assert segments[-1] - segments[50] <= 40, "rollouts alike find their memory again"
    assert all(len(c._epochs) <= 1 and not c._leases for c in make_one.members[0].core.controllers.values())
