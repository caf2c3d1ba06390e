"""The first rank of an engine: responses go into the dock beside the engine's steps, and none is lost."""

import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from mindspeed_rl_plugin.dock import Gone, Lease, Ragged, Rows, SampleId, VersionBound
from mindspeed_rl_plugin.generators import scheduler as scheduler_module
from mindspeed_rl_plugin.generators.scheduler import LONGEST_SECONDS, MOST, Scheduler, Spans
from mindspeed_rl_plugin.rows import Completion, Sampling
from mindspeed_rl_plugin.service.notes import Announced

pytestmark = pytest.mark.quick

IDS = [SampleId(0, group, 0) for group in range(3)]


class Dock:
    """What an engine calls of it. answers: so many commits may end; failure: how they end; bound: of each row; asked:
    what each lease asked for."""

    def __init__(self) -> None:
        self.answers, self.failure, self.ended = threading.Semaphore(0), None, False
        self.leaves = False  # what it says when it is asked
        self.committed: list[SampleId] = []
        self.leases: list[int] = []  # of these
        self.released: list[int] = []
        self.left, self.bound = list(IDS), VersionBound(0)
        self.asked: list[dict[str, object]] = []
        self.announced, announced = Announced(1, 0), lambda *asked: self.announced
        self.news = self.report = announced

    def lease(self, state: str, deadline: float, version: int, max_rows: int = 9, **of: object) -> Lease:
        self.asked.append(of)
        allowed = self.bound.allows(version)
        ids, self.left = (self.left[:max_rows], self.left[max_rows:]) if allowed else ([], self.left)
        rows = Rows(tuple(ids), {"prompt": Ragged.from_rows([torch.tensor([5]) for _ in ids], torch.int32)})
        return Lease(len(self.asked), state, rows, None if allowed or not self.left else self.bound)

    def version_bound(self, epoch: int) -> VersionBound:
        return self.bound

    def commit_part(self, lease: Lease, rows: Rows) -> None:
        assert self.answers.acquire(timeout=20)
        if self.failure is not None:
            raise self.failure
        self.committed += rows.ids
        self.leases += [lease.token] * len(rows)

    def has_left(self) -> bool:
        self.ended |= self.leaves
        return self.ended

    def release(self, lease: Lease) -> None:
        self.released.append(lease.token)


@pytest.fixture
def dock() -> Dock:
    return Dock()


@pytest.fixture
def scheduler(dock) -> Scheduler:
    """With weights in, and two rows in the making."""
    scheduler = engine(dock)
    scheduler.pull_ended(pulling(scheduler))
    scheduler.state.applied(scheduler.next().apply)
    assert begun(scheduler) == IDS[:2]
    return scheduler


def engine(dock: Dock, share: tuple[int, int] | None = None) -> Scheduler:
    """Which hears of version 0. share: of a strict order."""
    job = SimpleNamespace(sampling=Sampling(8), seed=0, inflight="keep", strict=share is not None, deadline=20.0)
    return Scheduler(dock, job, 2, 1, share, threading.Event())


def pulling(scheduler: Scheduler) -> int:
    """The version whose pull begins next."""
    while (action := scheduler.next()).pull < 0:
        assert not action.requests and action.apply < 0
    return action.pull


def begun(scheduler: Scheduler) -> list[SampleId]:
    """Rows that begin next."""
    return [request.id for _, request in scheduler.next().requests]


def response(row: SampleId) -> Completion:
    return Completion(row, (7,), (-1.0,), "stop", ((0, 0),))


def test_the_engine_goes_on_while_a_response_is_written(scheduler, dock) -> None:
    scheduler.done([response(IDS[0])], None)
    assert not dock.committed and begun(scheduler) == IDS[2:]
    threading.Timer(0.3, dock.answers.release).start()
    scheduler.done([response(IDS[1])], None)  # waits for the one before
    assert dock.committed[:1] == IDS[:1]
    scheduler.leaving.set()
    threading.Timer(0.3, dock.answers.release).start()
    assert scheduler.next().end and dock.committed == IDS[:2] and dock.released == [2]


def test_a_row_whose_lease_ran_out_goes_on_under_the_new_one(scheduler, dock) -> None:
    """The dock gives it out again, to the engine that samples it."""
    dock.answers.release(3)
    scheduler.done([response(IDS[0])], None)
    dock.left = [IDS[1]]
    assert begun(scheduler) == [] and [*scheduler.state.running] == [IDS[1]]
    dock.left = [IDS[2]]
    assert begun(scheduler) == [IDS[2]]
    scheduler.done([response(IDS[1])], None)
    scheduler.leaving.set()
    assert scheduler.next().end and dock.committed == IDS[:2]
    first, second = dock.leases
    assert second > first and dock.released == [second + 1]


def test_a_row_that_only_newer_weights_may_sample_is_news_of_them(scheduler, dock) -> None:
    """Though the engine has work, and its next report is not due. A job admits rows, and then announces."""
    dock.answers.release(9)
    scheduler.done([response(IDS[0])], None)
    dock.bound = VersionBound(5)
    assert begun(scheduler) == [] and scheduler.next().pull < 0
    dock.announced = Announced(2, 5)
    assert scheduler.next().pull == 5


def test_a_write_that_failed_ends_the_engine_unless_the_job_has_left(scheduler, dock) -> None:
    dock.failure = ValueError("cells of another kind")
    dock.answers.release(2)
    scheduler.done([response(IDS[0])], None)
    with pytest.raises(ValueError, match="cells of another kind"):
        scheduler.done([response(IDS[1])], None)
    scheduler._writing, dock.failure, dock.ended = None, ConnectionError("it ended"), True
    scheduler.done([response(IDS[1])], None)
    assert scheduler.next().end and not dock.released


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("at", ["lease", "commit_part"])
def test_a_connection_that_broke_is_the_end_of_a_job_that_leaves(scheduler, dock, monkeypatch, at, leaves) -> None:
    """Though it broke without a word, at a rank that is not the first."""

    monkeypatch.setattr(dock, at, Mock(side_effect=ConnectionError("lost the dock at rank 3")))
    dock.leaves = leaves
    dock.answers.release(9)

    def end() -> bool:
        for row in IDS[:2]:  # the second waits until the first is written
            scheduler.done([response(row)], None)
        return (scheduler.next(), scheduler.next())[1].end

    if leaves:
        assert end()
    else:
        with pytest.raises(ConnectionError, match="lost the dock at rank 3"):
            end()


def test_rows_that_others_take_meanwhile_are_not_waited_for(scheduler, dock) -> None:
    """An engine without rows is at work again as soon as the dock has some that its weights may sample."""
    dock.answers.release(9)
    scheduler.done([response(row) for row in IDS[:2]], None)
    dock.bound = VersionBound(5)
    assert begun(scheduler) == [] and scheduler.next().wait
    dock.bound = VersionBound(0)
    assert begun(scheduler) == IDS[2:]
    scheduler.done([response(IDS[2])], None)


def test_a_pull_that_ended_wakes_an_engine_without_weights(dock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "NEWS_SECONDS", 30.0)
    monkeypatch.setattr(scheduler_module, "REPORT_SECONDS", 60.0)  # a report takes spans away
    scheduler = engine(dock)
    version = pulling(scheduler)
    threading.Timer(0.2, scheduler.pull_ended, (version,)).start()
    began = time.monotonic()
    while (action := scheduler.next()).apply < 0:
        assert action.wait and time.monotonic() - began < 30
    assert action.apply == version and scheduler.counts["version"] > 0.1, "it waited for it"
    assert ("pull", True) in [(what, end > begin) for what, begin, end in scheduler.spans.take(time.monotonic() + 1)]


def test_weights_that_are_gone_are_left_for_newer_ones(scheduler, dock) -> None:
    error = Gone(0, 5)
    dock.announced, scheduler.state.announced = Announced(2, 5), 5
    assert pulling(scheduler) == 5
    scheduler.pull_ended(5)
    assert scheduler.next().apply == 5
    dock.announced, scheduler.state.announced = Announced(3, 7), 7
    scheduler.missed(5, error)
    assert pulling(scheduler) == 7 and scheduler.state.version == 0


def test_weights_that_rows_must_be_sampled_by_may_not_be_gone(dock) -> None:
    """But others may have sampled them while this engine was silent."""
    dock.bound = VersionBound(0, 0)
    scheduler = engine(dock, (0, 1))
    version = pulling(scheduler)
    scheduler.pull_ended(version)
    assert scheduler.next().apply == version == 0
    scheduler.missed(0, Gone(0, 5))
    left, dock.left = dock.left, []
    assert begun(scheduler) == []
    dock.left = left
    with pytest.raises(Gone, match="version 0 .* the newest is 5"):
        scheduler.next()


def test_under_a_strict_order_a_share_is_taken_for_which_the_weights_are_there(dock) -> None:
    dock.bound = VersionBound(0, 0)
    scheduler = engine(dock, (1, 2))
    scheduler.pull_ended(pulling(scheduler))
    assert dock.left == IDS, "it holds no rows before"
    scheduler.state.applied(scheduler.next().apply)
    dock.left, dock.bound = IDS[:2], VersionBound(0, 0)
    assert begun(scheduler) == IDS[:2] and dock.asked[-1] == {"share": (1, 2)}
    dock.left = IDS[2:]
    assert begun(scheduler) == [], "one rollout after the other"


def test_neighbours_of_a_kind_are_one_and_what_goes_on_is_not_told():
    spans = Spans()
    for first in (100.0, 100.2, 100.4):
        spans.add("generate", first, first + 0.195)
    spans.add("pull", 100.1, 100.3)  # beside it
    spans.add("generate", 101.0, 101.2)
    offset = time.time() - time.monotonic()
    told = {(what, round(begin - offset, 3), round(end - offset, 3)) for what, begin, end in spans.take(101.21)}
    assert told == {("generate", 100.0, 100.595), ("pull", 100.1, 100.3)}
    assert [what for what, *_ in spans.take(101.3)] == ["generate"] and spans.take(200) == []


def test_spans_are_bounded():
    spans = Spans()
    spans.add("generate", 0.0, LONGEST_SECONDS + 1)
    assert len(spans.take(LONGEST_SECONDS + 1)) == 1, "a long one is told while it goes on"
    for k in range(MOST + 10):
        spans.add("pull", float(k), k + 0.5)
    told = spans.take(1e9)
    assert len(told) == MOST
    assert told[-1][2] - told[0][2] == pytest.approx(MOST - 1)
