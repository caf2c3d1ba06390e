"""Memory of a warehouse over many rollouts: within its limit whatever comes, and warm where rollouts are alike."""

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.dock import ColumnSpec
from mindspeed_rl_plugin.dock.distributed.arena import LEAST, Arena, Extent, Segments
from mindspeed_rl_plugin.dock.distributed.ranges import cut, insert, overlap, take
from mindspeed_rl_plugin.dock.distributed.records import Shape
from mindspeed_rl_plugin.dock.distributed.warehouse import Block, Warehouse

SEGMENT = 256 << 10
LIMIT = 6 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    """In shared memory, where pages go back to the machine."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        found = Arena(directory, SEGMENT)
        found.limit = LIMIT
        yield found


def resident(arena: Arena) -> int:
    """Bytes that its files take of the machine."""
    return sum(path.stat().st_blocks * 512 for path in arena.directory.glob("segment-*"))


def slack(arena: Arena, extents: int) -> int:
    """Bytes above the limit that are allowed: a least segment, and parts of pages around what is in use."""
    return arena.limit // LEAST + 2 * mmap.PAGESIZE * (extents + len(arena._free))


def rollout(arena: Arena, sizes: list[int]) -> int:
    """Blocks of one rollout come and go; most bytes that the segments took."""
    extents, most = [], 0
    for size in sizes:
        extents.append(arena.allocate(size))
        arena.view(*extents[-1])[:] = 7
        assert resident(arena) <= arena.reserved + mmap.PAGESIZE * len(arena._free)
        most = max(most, arena.reserved)
    for extent in extents:
        arena.free(extent)
    return most


class Counted:
    """How often an arena takes memory from the machine or gives some back."""

    def __init__(self, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        for name in ("_make", "_give_back", "_wet"):
            monkeypatch.setattr(arena, name, self.counting(getattr(arena, name)))

    def counting(self, work):
        def counted(*args):
            self.times += 1
            return work(*args)

        return counted


def test_blocks_that_grow_from_rollout_to_rollout_stay_within_the_limit(arena: Arena) -> None:
    """Of 45 rollouts, each 2% longer, only a few make segments."""
    made = []
    for n in range(45):
        sizes = [int(0.5e6 * 1.02**n)] * 4 + [int(1e5 * 1.02**n)]
        before = arena._next
        assert rollout(arena, sizes) <= LIMIT + slack(arena, 5)
        made.append(arena._next > before)
    assert sum(made) <= 8 and arena.used == 0


def test_a_warehouse_keeps_its_memory_within_its_capacity(arena: Arena) -> None:
    """One block a rollout that grows by 5%, committed and cleared."""
    columns = {"tokens": ColumnSpec("tokens", torch.int32, "token", ragged=True)}
    arena.limit = None
    house = Warehouse(0, columns, arena, capacity=LIMIT)
    for epoch in range(50):
        entries = int(1e5 * 1.05**epoch)
        (extent,) = house.reservations.make("me", [4 * entries])
        block = Block("tokens", np.zeros(1, np.int32), np.array([entries], np.int32), extent)
        house.commit("me", epoch, Shape(1, 1), [block])
        assert arena.used <= LIMIT and arena.reserved <= LIMIT + slack(arena, 1)
        house.clear(epoch, Shape(1, 1), np.zeros(1, np.int64))


def test_without_a_limit_twice_the_most_in_use_is_kept(arena: Arena) -> None:
    arena.limit = None
    for n in range(60):
        most = rollout(arena, [int(3e5 * 1.05**n)] * 3)
        assert most <= 2 * arena._most + SEGMENT


def test_blocks_that_leave_half_of_each_segment_stay_within_the_limit(arena: Arena, monkeypatch) -> None:
    """What lies free behind each goes back; the next rollouts find all as it was."""
    sizes = [int(0.57 * SEGMENT)] * 40
    assert sum(sizes) < LIMIT < 40 * SEGMENT
    assert rollout(arena, sizes) <= LIMIT + slack(arena, 40)
    counted = Counted(arena, monkeypatch)
    for _ in range(3):
        rollout(arena, sizes)
    assert counted.times == 0, "pages are touched once"


@pytest.mark.parametrize("seed", range(6))
def test_rollouts_alike_find_warm_memory(arena: Arena, monkeypatch, seed: int) -> None:
    """Blocks of all sizes that take nine tenths of the limit: after the first rollouts nothing is taken or given."""
    random = np.random.default_rng(seed)
    sizes = []
    while sum(sizes) < 0.9 * LIMIT:
        sizes.append(int(random.choice([1e3, 3e4, 2e5, 6e5]) * random.uniform(0.5, 1)))
    sizes.pop()
    for _ in range(3):
        assert rollout(arena, sizes) <= LIMIT + slack(arena, len(sizes))
    counted = Counted(arena, monkeypatch)
    for _ in range(3):
        rollout(arena, sizes)
    assert counted.times == 0


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 120_000)), max_size=50), st.integers(20, 500))
@settings(max_examples=80, deadline=None)
def test_whatever_comes_the_limit_holds_and_nobodys_bytes_change(steps: list[tuple[int, int]], pages: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        arena, reader = Arena(directory, 32 << 10), Segments(directory)
        arena.limit = pages * mmap.PAGESIZE
        held: list[tuple[Extent, int]] = []
        for step, (kind, size) in enumerate(steps):
            if kind < 60 and arena.used + size + 64 <= arena.limit:
                held.append((arena.allocate(size), step % 251))
                reader.view(*held[-1][0])[:] = step % 251
            elif held:
                extent, value = held.pop(kind % len(held))
                assert (arena.view(*extent) == value).all()
                arena.free(extent)
            assert arena.used == sum(e.nbytes for e, _ in held)
            assert arena.reserved <= arena.limit + slack(arena, len(held))
            assert resident(arena) <= arena.reserved + mmap.PAGESIZE * len(arena._free)
        assert all((reader.view(*extent) == value).all() for extent, value in held)


def test_memory_of_a_removed_segment_goes_back_although_a_reader_maps_it(arena: Arena) -> None:
    reader = Segments(arena.directory)
    old = arena.allocate(4 << 20)
    reader.view(*old)[:] = 1
    kept = reader.view(*old)
    with open(arena.path(old.segment), "rb") as file:
        arena.free(old)
        new = arena.allocate(5 << 20)
        assert os.fstat(file.fileno()).st_blocks == 0 and not arena.path(old.segment).exists()
    assert new.segment > old.segment, "no number comes twice"
    reader.view(*new)[:] = 2
    assert not kept.any() and list(reader._arrays) == [new.segment], "what is gone is let go with the next mapping"
    with pytest.raises(FileNotFoundError):
        reader.view(*old)
    assert len(reader.view(old.segment, 0, 0)) == 0, "of a cell without entries nothing is asked"


def test_mapping_a_segment_does_not_bring_back_what_was_given_back(arena: Arena) -> None:
    kept = arena.allocate(SEGMENT // 2)
    arena._shrink(None, 0)
    before = resident(arena)
    assert before < SEGMENT
    Segments(arena.directory).view(*kept)
    assert resident(arena) == before


def test_a_machine_without_room_gives_what_is_free_first(arena: Arena, monkeypatch) -> None:
    arena.free(arena.allocate(2 << 20))
    arena.limit, free = 1 << 40, (2 << 20) + (1 << 19)
    reserve = os.posix_fallocate

    def scarce(handle: int, offset: int, nbytes: int) -> None:
        if resident(arena) + nbytes > free:
            raise OSError(28, "No space left on device")
        reserve(handle, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", scarce)
    assert arena.allocate((2 << 20) + 64).nbytes == (2 << 20) + 64
    with pytest.raises(OSError, match="no room for 1048576 bytes .* lower --rl-dock-gb"):
        arena.allocate(1 << 20)
    assert len(list(Path(arena.directory).iterdir())) == 1


@given(st.lists(st.tuples(st.sampled_from(["add", "take", "cut"]), st.integers(0, 20), st.integers(1, 6)), max_size=30))
def test_ranges_are_a_set_of_bytes(steps: list[tuple[str, int, int]]) -> None:
    ranges, model = [], set()
    for step, begin, size in steps:
        span = set(range(begin, begin + size))
        assert overlap(ranges, begin, begin + size) == len(span & model)
        if step == "add" and not span & model:
            insert(ranges, begin, begin + size)
            model |= span
        elif step == "take":
            assert take(ranges, begin, begin + size) == (span <= model)
            model -= span if span <= model else set()
        elif step == "cut":
            out = cut(ranges, begin, begin + size)
            assert {i for b, n in out for i in range(b, b + n)} == span & model
            model -= span
        assert [i for b, n in ranges for i in range(b, b + n)] == sorted(model)
        assert all(a + n < b for (a, n), (b, _) in zip(ranges, ranges[1:], strict=False))
