"""What is in the making over rollouts: a virtual clock draws responses of all lengths; nothing is too old, lost or
trained twice, and nobody waits for ever."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.loop.schedules.making import Making, level
from mindspeed_rl_plugin.rows import SampleId


class Job:
    """Engines that finish one token of each row in a tick, with slots, and a trainer. drops: share of the finished
    groups that dynamic sampling replaces; None without it."""

    def __init__(self, making: Making, rollouts: int, engines: int, slots: int, drops: float | None, seed: int) -> None:
        self.making, self.rollouts, self.engines, self.slots, self.drops = making, rollouts, engines, slots, drops
        self.rng, self.epoch, self.ticks = random.Random(seed), -1, 0
        self.rows: dict[SampleId, list] = {}  # tokens left, versions so far
        self.ready: list[tuple[int, int]] = []  # judged, with signal
        self.admitted, self.trained, self.dropped = [], [], []
        self.lags: list[int] = []
        self.most = 0

    def run(self) -> None:
        for number in range(self.rollouts):
            self.making.begin(10 * number)
            trained = self.rollout(self.rollouts - number)
            self.lags += [self.making.lag(min(v)) for g in trained for v in self.versions(g)]
            self.making.end(trained)
            self.trained += trained

    def rollout(self, left: int) -> list[tuple[int, int]]:
        while True:
            self.admit(left)
            while not self.making.enough():
                self.tick()
            groups = list(self.making.take(None if self.drops is not None else self.making.prompts))
            if self.drops is None:
                return groups
            lost = [g for g in groups if self.rng.random() < self.drops]
            self.making.end(lost)
            self.dropped += lost
            self.ready = sorted([*self.ready, *(g for g in groups if g not in lost)])
            if len(self.ready) >= self.making.prompts:
                trained, self.ready = self.ready[: self.making.prompts], self.ready[self.making.prompts :]
                return trained

    def admit(self, left: int) -> None:
        if wanted := self.making.wanted(left):
            self.epoch += 1
            groups = [(self.epoch, g) for g in range(wanted)]
            self.making.start(groups, self.engines)
            self.admitted += groups
            lengths = [1, 2, 3, 50]
            self.rows |= {
                SampleId(*g, m): [self.rng.choice(lengths), []] for g in groups for m in range(self.making.members)
            }
        self.most = max(self.most, len(self.making.started))

    def tick(self) -> None:
        self.ticks += 1
        assert self.ticks < 5000, "nobody comes to an end"
        done = []
        for engine in range(self.engines):
            for row in self.making.rows_of(engine)[: self.slots]:
                self.rows[row][0] -= 1
                self.rows[row][1].append(self.making.versions[-1])
                done += [row] if not self.rows[row][0] else []
        self.making.finish(done)

    def versions(self, group: tuple[int, int]) -> list[list[int]]:
        return [self.rows[SampleId(*group, m)][1] for m in range(self.making.members)]


def most_of(prompts: int, factor: float, k: int) -> int:
    return min(math.ceil(prompts * factor), (k + 1) * prompts)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.floats(1.0, 5.0),
    st.integers(1, 3),
    st.integers(1, 12),
    st.sampled_from([None, 0.0, 0.5]),
    st.integers(0, 10**6),
)
def test_no_token_is_older_than_the_bound_and_each_group_is_trained_once(
    k, prompts, factor, engines, slots, drops, seed
):
    making = Making(prompts, 2, most_of(prompts, factor, k), k)
    job = Job(making, 6, engines, slots, drops, seed)
    job.run()
    assert max(job.lags) <= k
    assert sorted(job.trained + job.dropped) == sorted(job.admitted), "all that is admitted is trained, or replaced"
    assert len(set(job.trained)) == len(job.trained) == 6 * prompts
    assert job.most <= making.most and not making.started and not making.left and not making.places


def test_a_run_without_long_responses_waits_for_none_and_the_bound_is_used() -> None:
    making = Making(4, 2, 12, 2)
    job = Job(making, 20, 2, 100, None, 1)
    job.run()
    assert max(job.lags) == 2 and min(job.lags) == 0
    assert any(len(set(versions)) > 1 for g in job.trained for versions in job.versions(g)), "some have two parts"


def test_where_nothing_goes_on_nothing_is_waited_for() -> None:
    making = Making(2, 2, 3, 0)
    making.begin(0)
    making.start([(0, 0), (0, 1), (0, 2)], 2)
    making.finish([SampleId(0, g, m) for g in (1, 2) for m in range(2)])
    assert making.enough() and making.take(2) == ((0, 1), (0, 2))
    making.end([(0, 0)])
    assert not making.places and making.wanted(None) == 1


def test_the_last_rollouts_begin_with_no_more_than_is_trained() -> None:
    making = Making(4, 1, 6, 1)
    assert (making.wanted(9), making.wanted(2), making.wanted(1)) == (6, 6, 4)


@pytest.mark.parametrize(
    ("held", "items", "parts"),
    [
        ([0, 0], 5, [0, 0, 0, 1, 1]),
        ([3, 0, 1], 4, [1, 1, 2, 2]),
        ([5, 0], 2, [1, 1]),
        ([2, 0], 0, []),
        ([4], 2, [0, 0]),
    ],
)
def test_rows_are_dealt_so_that_all_engines_have_equally_many(held, items, parts) -> None:
    dealt = level(held, items)
    assert sorted(dealt) == dealt and len(dealt) == items
    total = [h + dealt.count(p) for p, h in enumerate(held)]
    best = [h + parts.count(p) for p, h in enumerate(held)]
    assert sorted(total) == sorted(best)


def test_a_resume_goes_on_with_rows_at_their_engines() -> None:
    making = Making(2, 2, 4, 1)
    making.begin(3)
    making.start([(0, g) for g in range(4)], 2)
    making.finish([SampleId(0, 0, m) for m in range(2)])
    making.take(1)  # deferred, say
    making.finish([SampleId(0, 1, 0)])
    for engines, same in ((2, True), (1, False)):
        resumed = Making(2, 2, 4, 1)
        resumed.load(making.state(), [(0, 0)], engines)
        assert (resumed == making) is same and set(resumed.places) == set(making.places)
        assert set(resumed.places.values()) == set(range(engines))
    resumed.load(making.state(), [], 2)
    assert (0, 0) not in resumed.started, "it was dropped with what deferred it"
