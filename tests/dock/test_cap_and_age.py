"""Two promises under random work: a full dock never stops for good, and rows that are too old are never given out."""

import random
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.dock import ColumnSpec, DistributedDock, Limits, LocalDock, StateSpec
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

COLUMNS = [
    ColumnSpec("prompt", torch.int32, "group", ragged=True),
    ColumnSpec("tokens", torch.int32, "token", ragged=True),
    ColumnSpec("logp", torch.float32, "token", ragged=True),
    ColumnSpec("reward", torch.float32, "sample", ragged=False),
]
STATES = [
    StateSpec("generate", ("prompt",), ("tokens",)),
    StateSpec("logp", ("tokens",), ("logp",)),
    StateSpec("reward", ("tokens", "prompt"), ("reward",)),
    StateSpec("update", ("tokens", "logp", "reward"), (), whole_groups=True),
]
GROUPS, MEMBERS, LONGEST = 24, 2, 64
ROW = 4 * LONGEST + 4 * LONGEST + 4 + 3 * 2 * 64  # bytes that a row's write-backs are promised


class Rollout:
    """Threads that put, work, train and clear one epoch through one dock of little room."""

    def __init__(self, dock: DistributedDock, house, seed: int) -> None:
        self.dock, self.house, self.random = dock, house, random.Random(seed)
        self.trained: list[SampleId] = []
        self.failed: list[BaseException] = []
        self.fullest = 0

    def run(self, seconds: float) -> None:
        """Raises what a thread raised, and AssertionError where they do not come to an end."""
        self.dock.open(0, GROUPS, MEMBERS)
        order = self.random.sample(range(GROUPS), GROUPS)
        jobs = [(self.produce, order[::2]), (self.produce, order[1::2])]
        jobs += [(self.work, state, column) for state, column in
                 (("generate", "tokens"), ("generate", "tokens"), ("logp", "logp"), ("reward", "reward"))]  # fmt: skip
        jobs += [(self.train,), (self.train,)]
        threads = [threading.Thread(target=self.guard, args=job, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.1, end - time.monotonic()))
        if self.failed:
            raise self.failed[0]
        assert not any(t.is_alive() for t in threads), f"stopped with {len(self.trained)} rows trained"

    def guard(self, function, *args) -> None:
        try:
            function(*args)
        except BaseException as error:  # noqa: BLE001
            self.failed.append(error)

    def produce(self, groups: list[int]) -> None:
        while groups:
            some, groups = groups[: (n := self.random.randint(1, 3))], groups[n:]
            prompts = [torch.full((self.random.randint(1, 9),), g, dtype=torch.int32) for g in some]
            self.dock.put(Rows(tuple(SampleId(0, g, 0) for g in some), {"prompt": Ragged.from_rows(prompts)}))
            self.look()

    def work(self, state: str, column: str) -> None:
        while len(lease := self.dock.lease(state, max_rows=self.random.randint(1, 5), deadline=60)):
            if column == "reward":
                back = torch.ones(len(lease))
            elif column == "logp":
                back = Ragged(lease.rows["tokens"].values.float(), lease.rows["tokens"].offsets)
            else:
                lengths = [self.random.choice([0, 1, LONGEST]) for _ in range(len(lease))]
                back = Ragged.from_rows([torch.ones(n, dtype=torch.int32) for n in lengths], dtype=torch.int32)
            self.dock.commit(lease, Rows(lease.rows.ids, {column: back}))
            self.look()

    def train(self) -> None:
        while len(lease := self.dock.lease("update", max_rows=MEMBERS, deadline=60)):
            assert [i.member for i in lease.rows.ids] == list(range(MEMBERS))
            self.dock.commit(lease)
            self.trained += lease.rows.ids
            self.dock.clear(0, [lease.rows.ids[0].group])

    def look(self) -> None:
        self.fullest = max(self.fullest, self.house.used)
        assert self.house.used <= (self.house.capacity or self.house.used)
        assert self.house.rows <= (self.house.max_rows or self.house.rows)


@pytest.mark.parametrize(
    ("seed", "limits"),
    [
        (0, {"capacity": 5 * (MEMBERS * ROW + 64), "max_tokens": LONGEST}),
        (1, {"capacity": 5 * (MEMBERS * ROW + 64), "max_tokens": LONGEST}),
        (2, {"rows": 5 * MEMBERS}),
    ],
    ids=["bytes 0", "bytes 1", "rows"],
)
def test_a_full_dock_never_stops_for_good(members, seed: int, limits: dict) -> None:
    """Room for five groups of twenty-four: producers wait, write-backs never do, every group comes through once."""
    made = members(COLUMNS, STATES, ["one"], limits=Limits(segment_bytes=1 << 16, **limits))
    house = made[0].host.warehouse
    admit, refused = house.admit, []
    house.admit = lambda *put: refused.append(1) or why if (why := admit(*put)) else None
    rollout = Rollout(DistributedDock(COLUMNS, STATES, made[0].connections, deadline=60), house, seed)
    rollout.run(100)
    assert sorted(rollout.trained) == [SampleId(0, g, m) for g in range(GROUPS) for m in range(MEMBERS)]
    assert refused and rollout.fullest > 0 and house.used == house.outstanding == house.rows == 0


AGED = [
    ColumnSpec("tokens", torch.int32, "token", ragged=True),
    ColumnSpec("version", torch.int64, "sample", ragged=False),
]
WORK = [StateSpec("work", ("tokens", "version"), ())]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 9)),  # a row of weights so many updates old
        st.tuples(st.just("update"), st.integers(1, 2)),
        st.tuples(st.just("take"), st.integers(1, 4)),
    ),
    min_size=1,
    max_size=30,
)


@given(STEPS, st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_whatever_comes_when_no_row_is_given_out_too_old(steps: list, most: int) -> None:
    """A model in four lines: a row is given out once, or never if it had grown too old when somebody asked."""
    dock, newest = LocalDock(AGED, WORK, "version"), 9
    dock.open(0, len(steps), 1)
    waiting: dict[int, int] = {}
    for number, (step, size) in enumerate(steps):
        if step == "put":
            waiting[number] = newest - size
            tokens = Ragged.from_rows([torch.tensor([number], dtype=torch.int32)])
            dock.put(Rows((SampleId(0, number, 0),), {"tokens": tokens, "version": torch.tensor([newest - size])}))
        elif step == "update":
            newest += size
        else:
            waiting = {row: version for row, version in waiting.items() if version >= newest - most}
            expected = sorted(waiting)[:size]
            ask = {"max_rows": size, "newest": newest, "max_staleness": most}
            if not expected:
                with pytest.raises(TimeoutError):
                    dock.lease("work", deadline=0, **ask)
                continue
            lease = dock.lease("work", deadline=0, **ask)
            assert [i.group for i in lease.rows.ids] == expected
            dock.commit(lease)
            waiting = {row: version for row, version in waiting.items() if row not in expected}
