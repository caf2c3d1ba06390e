"""Admission: a virtual clock draws jobs of all speeds; no token is older than the bound, nothing waits for ever."""

import heapq
import random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.forward import plan_batches
from mindspeed_rl_plugin.loop.rollout_plan import of_epoch, samples
from mindspeed_rl_plugin.loop.schedules.admission import Admission
from mindspeed_rl_plugin.loop.schedules.apart import AsyncSchedule
from mindspeed_rl_plugin.stages.groups import GroupStats, Rounds

pytestmark = pytest.mark.quick


class Job:
    """Generators with slots and a trainer, on a virtual clock; groups carry the publication of their oldest token."""

    def __init__(self, admission: Admission, slots: int, drops: float, seed: int) -> None:
        self.admission, self.slots, self.drops, self.rng = admission, slots, drops, random.Random(seed)
        self.now, self.events, self.waiting, self.order = 0.0, [], [], []
        self.running, self.finished, self.lags, self.busy = 0, {}, [], False
        self.trained: list[int] = []
        self.number = 0

    def run(self) -> None:
        self.publish(0)
        while self.admission.published < self.admission.rollouts:
            assert self.events, f"everybody waits at publication {self.admission.published}"
            self.now, _, done, argument = heapq.heappop(self.events)
            done(argument)

    def publish(self, number: int) -> None:
        self.admission.publish(10 * number, number)
        if number < self.admission.rollouts:
            self.work()

    def work(self) -> None:
        while groups := self.admission.next_epoch:
            self.admission.admitted += groups
            fresh = range(self.number, self.number + groups)
            self.number += groups
            self.waiting += fresh
            self.order += fresh
        while self.waiting and self.running < self.slots:
            group, self.running = self.waiting.pop(0), self.running + 1
            self.at(self.rng.choice([0.1, 1.0, 1.0, 20.0]), self.sampled, (group, 10 * self.admission.published))
        self.train()

    def sampled(self, what: tuple[int, int]) -> None:
        self.running -= 1
        if self.rng.random() < self.drops:
            self.order.remove(what[0])
            self.admission.dropped += 1
        else:
            self.finished[what[0]] = what[1]
        self.work()

    def train(self) -> None:
        rollout = self.order[: self.admission.rollout]
        if self.busy or len(rollout) < self.admission.rollout or any(g not in self.finished for g in rollout):
            return
        self.busy = True
        self.lags += [self.admission.lag(self.finished[g]) for g in rollout]
        self.trained += rollout
        del self.order[: self.admission.rollout]
        self.at(self.rng.choice([0.1, 1.0, 10.0]), self.updated, None)

    def updated(self, _: None) -> None:
        self.busy = False
        self.publish(self.admission.published + 1)

    def at(self, seconds: float, done: object, argument: object) -> None:
        heapq.heappush(self.events, (self.now + seconds, len(self.trained) + self.rng.random(), done, argument))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4), st.integers(1, 6), st.integers(1, 30), st.floats(0, 0.7), st.integers(0, 10**6))
def test_no_token_is_older_than_the_bound_and_each_group_is_trained_once(k, rollout, slots, drops, seed) -> None:
    admission = Admission(rollout, k, rollouts=7)
    job = Job(admission, slots, drops, seed)
    job.run()
    assert max(job.lags) <= k
    assert len(job.trained) == len(set(job.trained)) == 7 * rollout
    assert job.trained == sorted(job.trained), "first in, first out"
    assert admission.admitted - admission.dropped == 7 * rollout, "no more is admitted than is trained"


def test_the_bound_is_used() -> None:
    """With k = 2 and a slow trainer generation runs two rollouts ahead."""
    admission = Admission(4, 2, rollouts=50)
    job = Job(admission, 100, 0.0, 1)
    job.run()
    assert max(job.lags) == 2


@pytest.mark.parametrize(("version", "lag"), [(0, 3), (5, 2), (7, 2), (10, 1), (15, 0), (19, 0)])
def test_lag_counts_publications(version: int, lag: int) -> None:
    admission = Admission(8, 3, rollouts=9)
    for number in range(4):
        admission.publish(5 * number, number)
    assert admission.lag(version) == lag


def test_a_resume_goes_on_with_the_counts() -> None:
    admission = Admission(8, 1, rollouts=9)
    admission.publish(0, 0)
    admission.admitted, admission.dropped = 16, 3
    admission.publish(2, 1)
    resumed = Admission(8, 1, rollouts=9)
    under_way = SimpleNamespace(overdue=False, versions=[2])  # an evaluation is begun anew
    running = SimpleNamespace(admission=admission, evaluations=under_way, strict=False, offers=Mock())
    saved = {"admission": AsyncSchedule.state(running)["admission"]}
    schedule = SimpleNamespace(admission=resumed, evaluations=SimpleNamespace(overdue=False))
    AsyncSchedule.load(schedule, saved)
    assert resumed == admission and resumed.allowed == 8 + 3, "what was dropped is replaced"
    assert schedule.evaluations.overdue
    resumed.publish(3, 1)  # in the middle of a rollout of several steps
    assert resumed.lag(3) == 0 and resumed.lag(0) == 1


def sampled_rollouts(admission: Admission, limit: int, informative: float, dice: random.Random) -> int:
    """Rollouts of a run under dynamic sampling, as the asynchronous schedule collects them; ends with what Rounds
    raises. Checks that each takes about as many groups as the limit allows."""
    wanted, deferred, queue, fates, opened = admission.rollout, (), [], [], 0
    sizes = {"global_batch_size": wanted, "micro_batch_size": 1, "dp_size": 1}
    cut = lambda groups: plan_batches(samples(groups, 1), **sizes)  # noqa: E731

    def admit() -> None:
        nonlocal opened
        while groups := admission.next_epoch:
            admission.admitted += groups
            queue.append(of_epoch(opened, groups))
            opened += 1

    for number in range(admission.rollouts):
        admission.publish(number, number)
        admit()
        rounds, whole = Rounds(deferred, wanted, limit, cut), False
        while not whole:
            graded = {group: GroupStats(False, dice.random() < informative, 1.0) for group in queue.pop(0)}
            try:
                whole = rounds.add(graded)
            except ValueError as error:
                assert "--rl-dynamic-sampling-rounds" in str(error) and limit * wanted <= rounds.sampled
                return number
            finally:
                assert rounds.sampled < (limit + 2) * wanted, "it goes on past its limit"
            selection = rounds.selection
            admission.dropped += len(selection.dropped)
            fates += [*selection.dropped, *selection.trained]
            deferred = selection.deferred
            admit()
        assert len(selection.trained) == wanted
    assert len(fates) == len(set(fates)) == admission.admitted, "each group that was admitted has one fate"
    return admission.rollouts


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 4), st.integers(1, 8), st.integers(1, 4), st.sampled_from([0.0, 0.1, 0.3, 0.8]), st.integers(0))
def test_dynamic_sampling_ends_within_its_limit(k, rollout, limit, informative, seed) -> None:
    sampled_rollouts(Admission(rollout, k, rollouts=7), limit, informative, random.Random(seed))


def test_groups_without_signal_fill_rollouts_up_where_rounds_are_small() -> None:
    """Of a run with few informative groups the last rollouts, too, are trained on what there is."""
    runs = [sampled_rollouts(Admission(8, 2, rollouts=7), 2, 0.3, random.Random(seed)) for seed in range(20)]
    assert runs == [7] * 20
