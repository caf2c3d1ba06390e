"""Who stops because of whom: links that break, that are silent, and those that leave in order."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import dataclass, field

import pytest

from mindspeed_rl_plugin.dock import machines, watch
from mindspeed_rl_plugin.dock.messages import Bye, Ping, Stopped
from mindspeed_rl_plugin.dock.rpc import Stream, thread
from mindspeed_rl_plugin.dock.server import DockServer
from mindspeed_rl_plugin.dock.watch import Watch
from mindspeed_rl_plugin.processes import machine
from mindspeed_rl_plugin.service import guest_dock
from mindspeed_rl_plugin.service.job_service import JobService


@dataclass(eq=False)
class Link:
    rank: int
    node: str
    heard: float = 0.0
    sent: list = field(default_factory=list)

    def note(self, message) -> None:
        self.sent.append(message)


class Case:
    """Rank 1 of three, linked to the others; `ended`: exit statuses."""

    def __init__(self) -> None:
        self.now, self.ended = 0.0, []
        self.watch = Watch(1, 8.0, self.ended.append, lambda: self.now)
        self.links = [Link(0, "a 1"), Link(2, "b 2")]
        for link in self.links:
            self.watch.add(link)

    def pass_time(self, seconds: float, *live: Link) -> None:
        for _ in range(int(seconds / self.watch.pause())):
            self.now += self.watch.pause()
            for link in live:
                link.heard = self.now
            self.watch.tick()


@pytest.fixture
def case() -> Case:
    return Case()


def test_a_link_that_breaks_ends_the_rank_once_and_the_others_learn_why(case, capfd, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    case.watch.broke(case.links[1])
    case.watch.broke(case.links[0])
    assert case.ended == [1]
    case.watch.stop(1, "ended by an error")  # what another rank says of this one
    assert case.ended == [1]
    assert capfd.readouterr().err == "\n[rl] rank 1 stops: rank 2 on b is gone (connection broke)\n"
    reason = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert reason == "rank 1 stops: rank 2 on b is gone (connection broke)", "torchrun's summary says it"
    stopped = [x for x in case.links[0].sent if isinstance(x, Stopped)]
    assert [(x.rank, x.why, x.node) for x in stopped] == [(2, "connection broke", "b 2")]


def test_silence_ends_the_rank_and_signs_of_life_do_not(case, capfd) -> None:
    case.pass_time(40, *case.links)
    assert case.ended == [] and 15 <= len(case.links[0].sent) <= 20
    assert all(isinstance(x, Ping) for x in case.links[0].sent)
    case.pass_time(7, case.links[0])
    assert case.ended == []
    case.pass_time(2, case.links[0])
    assert case.ended == [1] and "rank 2 on b is gone (silent for 8 s)" in capfd.readouterr().err


def test_who_left_is_not_missed_and_a_rank_that_stood_still_blames_nobody(case) -> None:
    case.watch.remove(case.links[1])
    case.watch.broke(case.links[1])
    case.pass_time(20, case.links[0])
    case.now += 100  # this process was stopped
    case.watch.tick()
    assert case.ended == []
    case.pass_time(9)
    assert case.ended == [1]


def test_a_rank_that_is_expected_and_does_not_come_ends_the_others(case, capfd) -> None:
    case.watch.expect([5, 6])
    case.watch.add(Link(5, "c 3"))
    case.now += 100  # this process was stopped
    case.watch.tick()
    case.pass_time(7, *case.links)
    assert case.ended == []
    case.watch.remove(next(link for link in case.watch._links if link.rank == 5))
    case.pass_time(2, *case.links)
    assert case.ended == [1]
    assert "rank 1 stops: rank 6 is gone (it should generate, but did not connect within 8 s" in capfd.readouterr().err


@pytest.mark.parametrize(
    "how", ["is killed", "ends by an error", "is interrupted", "ends", "the job ends", "the job stops"]
)
def test_a_generator_of_the_launcher_and_the_job_end_together(members, monkeypatch, tmp_path, capfd, how: str) -> None:
    """Though it is outside of the dock, and the job is one rank."""
    of_job, of_generator, servers = [], [], []
    monkeypatch.setattr(guest_dock, "DockServer", lambda *given: servers.append(DockServer(*given)) or servers[-1])
    (member,) = members([], [], [machine()], heartbeat=5.0, end=of_job.append)
    member.watch.expect([1])
    address = JobService(member.dock()).invite(tmp_path / "secret")
    raised = {"ends by an error": ValueError, "is interrupted": KeyboardInterrupt}.get(how)
    with contextlib.suppress(ValueError, KeyboardInterrupt):
        with guest_dock.linked(address, member.me.secret, 1, 5.0, of_generator.append):
            if how == "is killed":
                next(iter(servers[0]._streams)).socket.shutdown(socket.SHUT_RDWR)
            elif how.startswith("the job"):
                member._close(Bye() if how == "the job ends" else Stopped(0, "ended by an error", machine()))
            time.sleep(0.3)
            if raised:
                raise raised
    end = time.monotonic() + (5 if how in ("is killed", "ends by an error", "the job stops") else 0.5)
    while not (of_job or of_generator) and time.monotonic() < end:
        time.sleep(0.01)
    said, host = capfd.readouterr().err, socket.gethostname()
    if how in ("is killed", "ends by an error"):
        why = "connection broke" if how == "is killed" else how.replace("ends", "ended")
        assert of_job == [1] and f"[rl] rank 0 stops: rank 1 on {host} is gone ({why})\n" in said
    elif how == "the job stops":
        assert of_generator == [1] and f"[rl] rank 1 stops: rank 0 on {host} is gone (ended by an error)\n" in said
    else:
        assert (of_job, of_generator, said) == ([], [], "")


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ([["left", "10.0.0.1"], ["right", "fe80::1%eth0"]], None),
        ([["only", ""], ["only", "::1"]], None),
        ([["left", "127.0.0.1"], ["right", "10.0.0.2"]], r"left \(rank 0\) is 127\.0\.0\.1,"),
        ([["left", "10.0.0.1"], ["right", ""]], r"right \(rank 1\) is unknown,"),
    ],
)
def test_machines_that_cannot_reach_each_other_are_refused(places, named: str | None) -> None:
    if named is None:
        return machines.check_addresses(places)
    with pytest.raises(ValueError, match=named):
        machines.check_addresses(places)
    return None


def test_who_leaves_sends_its_notes_first_and_then_says_so() -> None:
    mine, theirs = socket.socketpair()
    link, reader, got = watch.Link(mine, 1, "b 2"), Stream(theirs), []
    for rank in range(3):
        link.note(Stopped(rank, "x" * (1 << 20)))  # more than the socket takes at once

    def read() -> None:
        while not got or not isinstance(got[-1], Bye):
            got.append(reader.receive()[0])

    reading = thread(read)
    link.leave(Bye())
    reading.join(10)
    assert [getattr(message, "rank", None) for message in got] == [0, 1, 2, None]
