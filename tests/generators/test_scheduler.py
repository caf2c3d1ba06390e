"""The first rank of an engine: responses go into the dock beside the engine's steps, and none is lost."""

import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from mindspeed_rl_plugin.dock import Gone, Lease, Ragged, Rows, SampleId
from mindspeed_rl_plugin.dock.messages import Announced
from mindspeed_rl_plugin.generators import scheduler as scheduler_module
from mindspeed_rl_plugin.generators.scheduler import LONGEST_SECONDS, MOST, Scheduler, Spans, Turn
from mindspeed_rl_plugin.rows import Completion, Sampling

IDS = [SampleId(0, group, 0) for group in range(3)]


class Dock:
    """What an engine calls of it. answers: so many commits may end; failure: how they end; order: of each row; most:
    rows of one lease; asked: what each lease asked for beside rows."""

    def __init__(self) -> None:
        self.answers, self.failure, self.ended = threading.Semaphore(0), None, False
        self.leaves = False  # what it says when it is asked
        self.committed: list[SampleId] = []
        self.leases: list[int] = []  # of these
        self.released: list[int] = []
        self.left, self.order, self.most = list(IDS), [0, -1, 3, 1], 9
        self.asked: list[dict[str, object]] = []
        self.announced, announced = Announced(1, 0), lambda *asked: self.announced
        self.exchange = SimpleNamespace(news=announced, report=announced)

    def lease(self, state: str, max_rows: int, deadline: float, **of: object) -> Lease:
        self.asked.append(of)
        max_rows = min(max_rows, self.most)
        ids, self.left = self.left[:max_rows], self.left[max_rows:]
        prompts = Ragged.from_rows([torch.tensor([5]) for _ in ids], torch.int32)
        rows = Rows(tuple(ids), {"prompt": prompts, "order": torch.tensor([self.order] * len(ids))})
        return Lease(len(self.asked), state, rows)

    def commit_part(self, lease: Lease, rows: Rows) -> None:
        assert self.answers.acquire(timeout=20)
        if self.failure is not None:
            raise self.failure
        self.committed += rows.ids
        self.leases += [lease.token] * len(rows)

    def remaining(self, state: str, ids: list[SampleId]) -> int:
        return len({*ids} - {*self.committed})

    def has_left(self) -> bool:
        self.ended |= self.leaves
        return self.ended

    def release(self, lease: Lease) -> None:
        self.released.append(lease.token)


@pytest.fixture
def dock() -> Dock:
    return Dock()


@pytest.fixture
def lead(dock) -> Scheduler:
    """With weights in, and two rows in the making."""
    lead = engine(dock)
    lead.pull_ended(pulling(lead))
    lead.applied(lead.next().apply)
    assert begun(lead) == IDS[:2]
    return lead


def engine(dock: Dock, share: tuple[int, int] | None = None) -> Scheduler:
    """Which hears of version 0. share: of a strict order."""
    job = SimpleNamespace(sampling=Sampling(8), seed=0, inflight="keep", strict=share is not None, deadline=20.0)
    return Scheduler(dock, job, 2, 1, share, threading.Event())


def pulling(lead: Scheduler) -> int:
    """The version whose pull begins next."""
    while (turn := lead.next()).pull < 0:
        assert turn == Turn()
    return turn.pull


def begun(lead: Scheduler) -> list[SampleId]:
    """Rows that begin in the next turn."""
    return [request.id for _, request in lead.next().requests]


def response(row: SampleId) -> Completion:
    return Completion(row, (7,), (-1.0,), "stop", ((0, 0),))


def test_the_engine_goes_on_while_a_response_is_written(lead, dock) -> None:
    lead.done([response(IDS[0])], None)
    assert not dock.committed and begun(lead) == IDS[2:]
    threading.Timer(0.3, dock.answers.release).start()
    lead.done([response(IDS[1])], None)  # waits for the one before
    assert dock.committed[:1] == IDS[:1]
    lead.leaving.set()
    threading.Timer(0.3, dock.answers.release).start()
    assert lead.next().end and dock.committed == IDS[:2] and dock.released == [2]


def test_a_write_that_failed_ends_the_engine(lead, dock) -> None:
    dock.failure = ValueError("cells of another kind")
    dock.answers.release()
    lead.done([response(row) for row in IDS[:2]], None)
    with pytest.raises(ValueError, match="cells of another kind"):
        lead.next()


def test_a_job_that_has_left_needs_no_response(lead, dock) -> None:
    dock.failure, dock.ended = ConnectionError("gone"), True
    dock.answers.release()
    lead.done([response(IDS[0])], None)
    assert lead.next().end and not dock.released


def test_a_row_whose_lease_ran_out_goes_on_under_the_new_one(lead, dock) -> None:
    """The dock gives it out again, to the engine that samples it."""
    dock.answers.release(3)
    lead.done([response(IDS[0])], None)
    dock.left = [IDS[1]]
    assert begun(lead) == [] and [*lead.work.running] == [IDS[1]]
    dock.left = [IDS[2]]
    assert begun(lead) == [IDS[2]]
    lead.done([response(IDS[1])], None)
    lead.leaving.set()
    assert lead.next().end and dock.committed == IDS[:2]
    first, second = dock.leases
    assert second > first and dock.released == [second + 1]


def test_a_row_that_only_newer_weights_may_sample_is_news_of_them(lead, dock) -> None:
    """Though the engine has work, and its next report is not due. A job admits rows, and then announces."""
    dock.answers.release(9)
    lead.done([response(IDS[0])], None)
    dock.order = [5, -1, 3, 1]
    assert begun(lead) == [] and lead.next() == Turn()
    dock.announced = Announced(2, 5)
    assert lead.next().pull == 5


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("at", ["lease", "commit_part"])
def test_a_connection_that_broke_is_the_end_of_a_job_that_leaves(lead, dock, monkeypatch, at, leaves) -> None:
    """Though it broke without a word, at a rank that is not the first."""

    monkeypatch.setattr(dock, at, Mock(side_effect=ConnectionError("lost the dock at rank 3")))
    dock.leaves = leaves
    dock.answers.release(9)

    def end() -> bool:
        for row in IDS[:2]:  # the second waits until the first is written
            lead.done([response(row)], None)
        return (lead.next(), lead.next())[1].end

    if leaves:
        assert end()
    else:
        with pytest.raises(ConnectionError, match="lost the dock at rank 3"):
            end()


def test_held_rows_that_were_taken_back_and_come_again_begin_once(lead, dock) -> None:
    """They begin in the turn in which they come again."""
    dock.answers.release(9)
    lead.done([response(row) for row in IDS[:2]], None)
    lead.announced = dock.announced = Announced(2, 5)
    assert pulling(lead) == 5
    dock.left, dock.order = IDS[2:], [5, -1, 3, 1]
    assert begun(lead) == [] and [row.request.id for row in lead.work.held] == IDS[2:]
    former = lead.work.held[0].lease
    lead.pull_ended(5)
    assert lead.next().apply == 5
    lead.applied(5)
    dock.left = IDS[2:]
    assert begun(lead) == IDS[2:] and [*lead.work.running] == IDS[2:]
    assert lead.work.running[IDS[2]].lease.token > former.token
    lead.done([response(IDS[2])], None)


def test_a_pull_that_ended_wakes_an_engine_without_weights(dock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "LOOK_SECONDS", 30.0)
    monkeypatch.setattr(scheduler_module, "REPORT_SECONDS", 60.0)  # a report takes spans away
    lead = engine(dock)
    version = pulling(lead)
    threading.Timer(0.2, lead.pull_ended, (version,)).start()
    began = time.monotonic()
    while (turn := lead.next()).apply < 0:
        assert turn == Turn() and time.monotonic() - began < 30
    assert turn.apply == version and lead.counts["version"] > 0.1, "it waited for it"
    assert ("pull", True) in [(what, end > begin) for what, begin, end in lead.spans.take(time.monotonic() + 1)]


def test_weights_that_are_gone_are_left_for_newer_ones(lead, dock) -> None:
    error = Gone(0, 5)
    lead.announced = dock.announced = Announced(2, 5)
    assert pulling(lead) == 5
    lead.pull_ended(5)
    assert lead.next().apply == 5
    lead.announced = dock.announced = Announced(3, 7)
    lead.missed(5, error)
    assert pulling(lead) == 7 and lead.work.version == 0


def test_weights_that_rows_must_be_sampled_by_may_not_be_gone(dock) -> None:
    dock.order = [0, 0, 3, 1]
    lead = engine(dock, (0, 1))
    assert begun(lead) == [], "strict: rows are taken first, and held"
    version = pulling(lead)
    lead.pull_ended(version)
    assert lead.next().apply == version == 0
    with pytest.raises(Gone, match="version 0 .* the newest is 5"):
        lead.missed(0, Gone(0, 5))
    lead.missed(4, Gone(4, 5))  # which none of them asks for
    dock.committed = list(IDS)  # by others, to which they were given while this engine was silent
    lead.missed(0, Gone(0, 5))
    assert not lead.work.held


def test_a_strict_share_is_taken_whole(dock) -> None:
    """However it comes: the engine's half of a rollout of 3 x 4 rows, here in parts of four rows."""
    rows = [SampleId(3, group, member) for group in range(3) for member in range(4)]
    dock.left, dock.most, dock.order = rows[6:], 4, [0, 0, 3, 4]
    lead = engine(dock, (1, 2))
    assert begun(lead) == [] and [row.request.id for row in lead.work.held] == rows[6:]
    taken = [of for of in dock.asked if "epoch" in of]
    assert dock.asked[0] == {"share": (1, 2)} and taken == [{"share": (1, 2), "epoch": 3}] * 2


def test_a_strict_share_that_does_not_come_ends_the_engine_in_time(dock) -> None:
    dock.left, dock.order = [SampleId(3, 0, 0)], [0, 0, 3, 4]
    lead = engine(dock, (0, 2))
    lead.job.deadline = 0.3
    with pytest.raises(TimeoutError, match=r"5 of 6 prompts of rollout 3 did not come within 0\.3 s"):
        lead.next()


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
