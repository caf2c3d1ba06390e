"""The first rank of an engine: responses go into the dock beside the engine's steps, and none is lost."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl_plugin.dock import Lease, Ragged, Rows, SampleId
from mindspeed_rl_plugin.generators.lead import Lead
from mindspeed_rl_plugin.rows import Completion, Sampling

IDS = [SampleId(0, group, 0) for group in range(3)]


class Dock:
    """What an engine calls of it. answers: so many commits may end; failure: how they end."""

    def __init__(self) -> None:
        self.answers, self.failure, self.ended = threading.Semaphore(0), None, False
        self.committed: list[SampleId] = []
        self.released: list[int] = []
        self.left = list(IDS)
        self.exchange = SimpleNamespace(news=self._news, report=lambda *counts: None)

    def _news(self, after: int, deadline: float) -> SimpleNamespace:
        if after:
            threading.Event().wait()
        return SimpleNamespace(number=1, version=0)

    def lease(self, state: str, max_rows: int, deadline: float) -> Lease:
        ids, self.left = self.left[:max_rows], self.left[max_rows:]
        prompts = Ragged.from_rows([torch.tensor([5]) for _ in ids] or [torch.tensor([])])
        rows = Rows(tuple(ids), {"prompt": prompts, "order": torch.tensor([[0, -1, 3, 1]] * len(ids))})
        return Lease(len(self.left) + 1, state, rows)

    def commit_part(self, lease: Lease, rows: Rows) -> None:
        assert self.answers.acquire(timeout=20)
        if self.failure is not None:
            raise self.failure
        self.committed += rows.ids

    def release(self, lease: Lease) -> None:
        self.released.append(lease.token)


@pytest.fixture
def dock() -> Dock:
    return Dock()


@pytest.fixture
def lead(dock) -> Lead:
    """With weights in, and two rows in the making."""
    job = SimpleNamespace(sampling=Sampling(8), seed=0, inflight="keep", strict=False, deadline=20.0)
    lead = Lead(dock, job, 2, 1, None, threading.Event())
    while (turn := lead.next()).pull < 0:
        pass
    lead.pull_ended(turn.pull)
    lead.applied(lead.next().apply)
    assert [request.id for _, request in lead.next().requests] == IDS[:2]
    return lead


def response(row: SampleId) -> Completion:
    return Completion(row, (7,), (-1.0,), "stop", ((0, 0),))


def test_the_engine_goes_on_while_a_response_is_written(lead, dock) -> None:
    lead.done([response(IDS[0])], None)
    assert not dock.committed and [request.id for _, request in lead.next().requests] == IDS[2:]
    threading.Timer(0.3, dock.answers.release).start()
    lead.done([response(IDS[1])], None)  # waits for the one before
    assert dock.committed[:1] == IDS[:1]
    lead.leaving.set()
    threading.Timer(0.3, dock.answers.release).start()
    assert lead.next().end and dock.committed == IDS[:2] and dock.released == [1]


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
