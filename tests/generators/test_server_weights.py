"""Weights of a server: what its workers are asked, and in which order; a job whose server has gone."""

import queue
import sys
import time

import pytest
from commands import until

from mindspeed_rl_plugin.dock import Gone
from mindspeed_rl_plugin.generators import external_engines, server_engine
from mindspeed_rl_plugin.generators.external_engines import ExternalEngines
from mindspeed_rl_plugin.generators.server_engine import ServerWeights


class Fake:
    """A server of two workers, whose pulls take three looks. newest: of what took a version's place; unfit: whether the
    second worker cannot join."""

    url, deadline = "http://a:1", 0.4
    holder, stays, left, newest, unfit, silent = "", 0, 0, -1, False, False

    def __init__(self) -> None:
        self.lost: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.asked: list[object] = []

    def joined(self) -> ServerWeights:
        return ServerWeights(self, "h:1", b"\x01\x02", ["m", "m"], self.lost.put)

    def ask(self, path, body=None, seconds=None):
        self.limit = seconds
        self.asked.append((path, body) if body else path)

    def workers(self, name, seconds=None, *, client, **arguments):
        self.holder = self.holder or client
        if client != self.holder:
            raise ValueError("it serves another client")
        if name == "stay":
            if self.silent:
                raise TimeoutError("it did not answer")
            self.stays += 1
            return []
        self.asked.append((name, arguments))
        self.holder = "" if name == "leave" else self.holder
        if self.unfit:
            raise ValueError("its experts are not plain")
        self.left = 3 if name == "pull" else max(self.left - 1, 0)
        one = {"busy": self.left > 0, "newest": self.newest, "nbytes": 5, "version": 4, "digest": "d"}
        return [one, one | {"busy": False}]


@pytest.fixture
def weights(monkeypatch):
    monkeypatch.setattr(server_engine, "PULL_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(server_engine, "STAY_SECONDS", 0.01)
    yield (weights := Fake().joined())
    weights.close()


def test_all_workers_pull_before_the_server_stands_still(weights):
    pulled = weights.pull(4)
    assert (pulled.version, pulled.nbytes) == (4, 10)
    applied = weights.apply({})
    assert (applied.version, applied.digest) == (4, "d")
    asked = [one for one in weights.server.asked if one != ("pulled", {})]
    assert asked == [
        ("join", {"address": "h:1", "secret": "0102", "machines": ["m", "m"]}),
        ("pull", {"version": 4}),
        "/pause?mode=keep&clear_cache=false",
        ("apply", {}),
        ("/update_weight_version", {"new_version": "4"}),
    ]
    weights.close()
    assert weights.server.asked[-2:] == [("leave", {}), "/resume"], "it would stand still for the next job"


def test_where_one_worker_cannot_join_the_others_are_free_again():
    server = Fake()
    server.unfit = True
    with pytest.raises(ValueError, match="its experts are not plain"):
        server.joined()
    assert [name for name, _ in server.asked] == ["join", "leave"]
    server.unfit = False
    server.joined().close()


def test_a_version_that_is_gone_is_said(weights):
    weights.server.newest = 7
    with pytest.raises(Gone) as gone:
        weights.pull(4)
    assert gone.value.newest == 7


def test_the_server_hears_of_its_client_until_it_has_another_one(weights):
    until(lambda: weights.server.stays >= 3)
    weights.server.holder = "another"
    assert "serves another client" in str(weights.server.lost.get(timeout=10))
    with pytest.raises(ValueError, match="serves another client"):
        weights.pull(4)


def test_a_server_that_hangs_is_lost_in_half_of_the_deadline(weights, monkeypatch):
    """It may have responses in the making, whose rows nobody would get before all is over."""
    weights.server.silent = True
    assert "it did not answer" in str(weights.server.lost.get(timeout=10))
    assert time.monotonic() - weights._heard > weights.server.deadline / 2
    assert weights.server.lost.empty()
    monkeypatch.setattr(server_engine, "ASK_SECONDS", 0.1)
    weights.close()
    assert weights.server.limit == 0.01, "a silent one is left without a long wait"


# A process that brings a server to work, and fails the first times it is started.
FAILS = """
import sys, time
with open({mark!r}, "a+") as file:
    file.write("x")
    file.seek(0)
    tries = len(file.read())
if tries <= 3:
    print("[rl] generate: " + ("no server answers" if tries < 3 else "it serves another model"))
    sys.exit(1)
time.sleep(100)
"""


@pytest.mark.parametrize(("worked", "times"), [(60.0, 2), (0.0, 3)])
def test_a_server_that_fails_is_tried_again(tmp_path, monkeypatch, capsys, worked, times):
    """Each new reason is said once, an old one where it had worked since; an error of the job has the last one."""
    monkeypatch.setattr(external_engines, "AT_URL", (sys.executable, "-c", FAILS.format(mark=str(tmp_path / "tries"))))
    monkeypatch.setattr(external_engines, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(external_engines, "WORKED_SECONDS", worked)
    kept = ExternalEngines("h:1", tmp_path / "secret", lambda: None, None, ["http://a:1"], tmp_path)
    tries = tmp_path / "tries"
    until(lambda: kept.check() or (tries.exists() and len(tries.read_text()) == 4), 30)
    kept.check()
    assert kept._supervisors[0].process.poll() is None
    assert kept.text().startswith("; the server at http://a:1 generates no more (")
    assert kept.text().endswith("engine-at-url-0.log): [rl] generate: it serves another model")
    said = capsys.readouterr().out
    assert said.count("its rows are given out again, and it is tried again until it answers") == times, said
    kept.close()


def test_a_job_ends_where_ray_runs_no_engines_any_more(tmp_path, monkeypatch):
    words = "import sys; sys.exit('[rl] engine 0 given up')"
    monkeypatch.setattr(external_engines, "_ray", lambda wanted: [sys.executable, "-c", words])
    kept = ExternalEngines("h:1", tmp_path / "secret", lambda: None, object(), [], tmp_path)
    with pytest.raises(RuntimeError, match=r"Ray runs no engines any more .*engine 0 given up"):
        until(kept.check, 30)
    kept.close()
