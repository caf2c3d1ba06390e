"""Waits for messages on an accelerator end by the channel's deadline: its work ignores the limit that it is given."""

from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl_plugin.weights import p2p
from mindspeed_rl_plugin.weights.p2p import MessageBatch, P2PChannel


class Work:
    """Of nccl or hccl: `wait` lets the stream wait and returns at once, whatever its limit; done: after so many
    questions, "never", or an error of the device instead of an answer."""

    def __init__(self, done) -> None:
        self.done, self.asked, self.queued = done, 0, 0

    def is_completed(self) -> bool:
        self.asked += 1
        if isinstance(self.done, Exception):
            raise self.done
        return self.done != "never" and self.asked > self.done

    def wait(self, timeout=None) -> bool:
        self.queued += 1
        return True


def batch(*works: Work, deadline: float = 5.0) -> MessageBatch:
    on_device = torch.empty(4, device="meta")
    return MessageBatch(P2PChannel(3, deadline=deadline), "bucket 7", {5, 4}, lambda: list(works), [on_device])


def test_the_stream_waits_for_what_has_arrived() -> None:
    works = Work(0), Work(4)
    batch(*works).wait()
    assert [(w.asked, w.queued) for w in works] == [(1, 1), (5, 1)]


def test_what_never_arrives_ends_by_the_deadline() -> None:
    late = Work("never")
    with pytest.raises(TimeoutError, match=r"rank 3 .*bucket 7 .*\[4, 5\]"):
        batch(Work(0), late, deadline=0.05).wait()
    assert late.queued == 0  # else the stream, and whoever synchronizes it, would wait for ever


@pytest.mark.parametrize("true", [1.3e-3, 0.0107, 0.05])
def test_five_times_as_long_is_measured_as_such(monkeypatch, true) -> None:
    """By `doctor`; a pause of the system's clock is longer than asked for."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + 6e-5

    monkeypatch.setattr(p2p, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))

    def measured(seconds: float) -> float:
        nonlocal now
        now, work = 0.0, Work(0)
        work.is_completed = lambda: now >= seconds
        batch(work).wait()
        return now

    assert 4.5 < measured(5 * true) / measured(true) < 5.5


def test_an_error_of_the_device_names_the_batch() -> None:
    with pytest.raises(ConnectionError, match=r"rank 3 .*\[4, 5\] in bucket 7: HCCL error"):
        batch(Work(RuntimeError("HCCL error: remote"))).wait()
