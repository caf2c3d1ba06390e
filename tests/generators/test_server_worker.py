"""Whom a server's worker works for: one client at a time, as long as that one is heard of and its job goes on."""

import pytest

from mindspeed_rl_plugin.engine import vllm_api
from mindspeed_rl_plugin.generators import server_worker
from mindspeed_rl_plugin.generators.server_worker import HELD_SECONDS, ServerWorker, _Guest


class Guest(_Guest):
    """Joins nothing."""

    working = True

    def __init__(self, worker, client, address, secret, ranks) -> None:
        self.client, self.address, self.heard, self.gone = client, address, server_worker.time.monotonic(), False

    def state(self):
        return self.client

    def leave(self) -> None:
        self.gone = True


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(server_worker, "_Guest", Guest)
    for name in ("demand_plain_experts", "demand_base_format", "demand_processed_logprobs"):
        monkeypatch.setattr(vllm_api, name, lambda *_: True)
    monkeypatch.setattr(server_worker, "time", clock := Clock())
    return clock


def join(worker: ServerWorker, client: str, address: str = "h:1") -> str:
    """Why it is refused."""
    return worker.rl_join(client, address, "00", [])["refused"]


@pytest.mark.parametrize("address", ["h:1", "h:2"], ids=["the same job", "another job"])
def test_a_second_client_is_refused_while_the_first_is_heard_of(clock, address) -> None:
    worker = ServerWorker()
    assert not join(worker, "first")
    for _ in range(3):
        clock.now += HELD_SECONDS - 5
        refused = join(worker, "second", address)
        assert "for the job at h:1, whose engine process sent a sign of life 25.0 s ago" in refused
        assert "another server" in refused
        assert worker.rl_stay("first") == {"value": None, "refused": ""}
    clock.now += HELD_SECONDS + 1
    first = worker._rl_guest
    assert not join(worker, "second", address) and first.gone
    assert worker.rl_pulled("second")["value"] == "second"
    for call in (worker.rl_stay, worker.rl_pulled, worker.rl_apply, worker.rl_leave):
        assert "does not serve this client any more" in call("first")["refused"], call
    assert not worker._rl_guest.gone


def test_a_job_that_has_ended_holds_nothing(clock, monkeypatch) -> None:
    worker = ServerWorker()
    assert not join(worker, "first")
    monkeypatch.setattr(Guest, "working", False)
    assert not join(worker, "second", "h:2")
    assert not worker.rl_leave("second")["refused"]
    monkeypatch.setattr(Guest, "working", True)
    assert not join(worker, "third")
