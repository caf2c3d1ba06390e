"""What is in flight over rollouts: a virtual clock draws responses of all lengths; nothing is too old, lost or
trained twice, and nobody waits for ever."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.loop.schedules.in_flight import InFlight, level
from mindspeed_rl_plugin.rows import SampleId

pytestmark = pytest.mark.quick


class Job:
    """Engines that finish one token of each row in a tick, with slots, and a trainer. drops: share of the finished
    groups that dynamic sampling replaces; None without it."""

    def __init__(
        self, in_flight: InFlight, rollouts: int, engines: int, slots: int, drops: float | None, seed: int
    ) -> None:
        self.in_flight, self.rollouts, self.engines, self.slots, self.drops = in_flight, rollouts, engines, slots, drops
        self.rng, self.epoch, self.ticks = random.Random(seed), -1, 0
        self.rows: dict[SampleId, list] = {}  # tokens left, versions so far
        self.ready: list[tuple[int, int]] = []  # judged, with signal
        self.admitted, self.trained, self.dropped = [], [], []
        self.lags: list[int] = []
        self.most = 0

    def run(self) -> None:
        for number in range(self.rollouts):
            self.in_flight.begin(10 * number)
            trained = self.rollout(self.rollouts - number)
            self.lags += [self.in_flight.lag(min(v)) for g in trained for v in self.versions(g)]
            self.in_flight.end(trained)
            self.trained += trained

    def rollout(self, left: int) -> list[tuple[int, int]]:
        while True:
            self.admit(left)
            while not self.in_flight.enough():
                self.tick()
            groups = list(self.in_flight.take(None if self.drops is not None else self.in_flight.prompts))
            if self.drops is None:
                return groups
            lost = [g for g in groups if self.rng.random() < self.drops]
            self.in_flight.end(lost)
            self.dropped += lost
            self.ready = sorted([*self.ready, *(g for g in groups if g not in lost)])
            if len(self.ready) >= self.in_flight.prompts:
                trained, self.ready = self.ready[: self.in_flight.prompts], self.ready[self.in_flight.prompts :]
                return trained

    def admit(self, left: int) -> None:
        if wanted := self.in_flight.wanted(left):
            self.epoch += 1
            groups = [(self.epoch, g) for g in range(wanted)]
            self.in_flight.start(groups, self.engines)
            self.admitted += groups
            lengths = [1, 2, 3, 50]
            self.rows |= {
                SampleId(*g, m): [self.rng.choice(lengths), []] for g in groups for m in range(self.in_flight.members)
            }
        self.most = max(self.most, len(self.in_flight.started))

    def tick(self) -> None:
        self.ticks += 1
        assert self.ticks < 5000, "nobody comes to an end"
        done = []
        for engine in range(self.engines):
            for row in self.in_flight.rows_of(engine)[: self.slots]:
                self.rows[row][0] -= 1
                self.rows[row][1].append(self.in_flight.versions[-1])
                done += [row] if not self.rows[row][0] else []
        self.in_flight.finish(done)

    def versions(self, group: tuple[int, int]) -> list[list[int]]:
        return [self.rows[SampleId(*group, m)][1] for m in range(self.in_flight.members)]


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
    in_flight = InFlight(prompts, 2, most_of(prompts, factor, k), k)
    job = Job(in_flight, 6, engines, slots, drops, seed)
    job.run()
    assert max(job.lags) <= k
    assert sorted(job.trained + job.dropped) == sorted(job.admitted), "all that is admitted is trained, or replaced"
    assert len(set(job.trained)) == len(job.trained) == 6 * prompts
    assert job.most <= in_flight.most
    assert not in_flight.started and not in_flight.unfinished and not in_flight.engine_of


def test_a_run_without_long_responses_waits_for_none_and_the_bound_is_used() -> None:
    in_flight = InFlight(4, 2, 12, 2)
    job = Job(in_flight, 20, 2, 100, None, 1)
    job.run()
    assert max(job.lags) == 2 and min(job.lags) == 0
    assert any(len(set(versions)) > 1 for g in job.trained for versions in job.versions(g)), "some have two parts"


def test_where_nothing_goes_on_nothing_is_waited_for() -> None:
    in_flight = InFlight(2, 2, 3, 0)
    in_flight.begin(0)
    in_flight.start([(0, 0), (0, 1), (0, 2)], 2)
    in_flight.finish([SampleId(0, g, m) for g in (1, 2) for m in range(2)])
    assert in_flight.enough() and in_flight.take(2) == ((0, 1), (0, 2))
    in_flight.end([(0, 0)])
    assert not in_flight.engine_of and in_flight.wanted(None) == 1


def test_the_last_rollouts_begin_with_no_more_than_is_trained() -> None:
    in_flight = InFlight(4, 1, 6, 1)
    assert (in_flight.wanted(9), in_flight.wanted(2), in_flight.wanted(1)) == (6, 6, 4)


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
    in_flight = InFlight(2, 2, 4, 1)
    in_flight.begin(3)
    in_flight.start([(0, g) for g in range(4)], 2)
    in_flight.finish([SampleId(0, 0, m) for m in range(2)])
    in_flight.take(1)  # deferred, say
    in_flight.finish([SampleId(0, 1, 0)])
    for engines, same in ((2, True), (1, False)):
        resumed = InFlight(2, 2, 4, 1)
        resumed.load(in_flight.state(), [(0, 0)], engines)
        assert (resumed == in_flight) is same and set(resumed.engine_of) == set(in_flight.engine_of)
        assert set(resumed.engine_of.values()) == set(range(engines))
    resumed.load(in_flight.state(), [], 2)
    assert (0, 0) not in resumed.started, "it was dropped with what deferred it"
