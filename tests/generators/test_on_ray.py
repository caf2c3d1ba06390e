"""Engines that Ray places: what is asked of it, how they are watched, and a real local cluster."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_rl_plugin.config.schedule_flags import Generators
from mindspeed_rl_plugin.generators.external_engines import check_ray
from mindspeed_rl_plugin.generators.join import LEFT
from mindspeed_rl_plugin.generators.on_ray import GOOD_SECONDS, MAX_FAILURES, SAY_SECONDS, command, keep_all
from mindspeed_rl_plugin.service.invitation import SECRET_BYTES, write_secret


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0", (0, 0, 1, "")),
        ("12", (12, 0, 1, "")),
        ("ray:2", (0, 2, 1, "")),
        ("ray:3,tp=4", (0, 3, 4, "")),
        ("ray:1,tp=2,device=npu", (0, 1, 2, "npu")),
    ],
)
def test_who_generates(text, wanted):
    value = Generators.parse(text)
    assert (value.ranks, value.engines, value.tp, value.device) == wanted


@pytest.mark.parametrize("text", ["-1", "1.5", "many", "ray", "ray:0", "ray:2,tp=0", "ray:2,device=tpu", "ray:2, tp=2"])
def test_what_is_neither_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        Generators.parse(text)


def test_an_engine_of_several_ranks_has_a_launcher():
    alone = ["-m", "mindspeed_rl_plugin", "generate", "--join", "a:1", "--secret-file", "f"]
    assert command(1, "a:1", "f")[1:] == alone
    assert command(2, "a:1", "f")[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


class Virtual(asyncio.SelectorEventLoop):
    """A loop whose time goes on where nothing else does."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready:
            self.now = self._scheduled[0].when()
        super()._run_once()


class Cluster:
    """Tasks of one engine that end as they are told, by a virtual clock. ends: (seconds, status) of each, once it has a
    place; waits: seconds until it has one; words: its last."""

    def __init__(self, *ends: tuple[float, int], waits: float = 0.0, words: str = "killed") -> None:
        self.ends, self.waits, self.words = iter(ends), waits, words
        self.begun: list[float] = []
        self.said: list[str] = []

    def start(self) -> float:
        self.begun.append(asyncio.get_running_loop().time())
        return self.begun[-1]

    def placed(self, task: float) -> bool:
        return asyncio.get_running_loop().time() >= task + self.waits

    async def result(self, task: float) -> tuple[int, str]:
        seconds, status = next(self.ends)
        await asyncio.sleep(seconds)
        words, self.words = self.words, "killed"
        return status, words

    def free(self) -> str:
        return f"asked at {asyncio.get_running_loop().time():g}"

    def kept(self) -> bool:
        with asyncio.Runner(loop_factory=Virtual) as runner:
            return runner.run(keep_all(self, 1, self.said.append)) == 0


def test_one_that_ends_is_started_again_until_the_job_ends():
    cluster = Cluster((3, 1), (2, -9), (5, 0))
    assert cluster.kept() and cluster.begun == [0, 3 + 1, 4 + 2 + 2]
    assert cluster.said[1] == "engine 0 on Ray ended with -9: killed; started again in 2 s"
    left = Cluster((3, 0), (5, 0), words=LEFT)  # on a signal
    assert left.kept() and len(left.begun) == 2


def test_one_that_goes_on_failing_is_given_up_and_good_hours_count():
    assert not Cluster(*[(1, 1)] * MAX_FAILURES).kept()
    worked = Cluster(*[(1, 1)] * (MAX_FAILURES - 1), *[(GOOD_SECONDS + 5, 1)] * 3, (1, 0))
    assert worked.kept() and len(worked.begun) == MAX_FAILURES + 3


def test_one_that_waits_for_a_place_is_named_each_minute_and_what_it_needs():
    cluster = Cluster((50, 0), waits=3 * SAY_SECONDS - 10)
    assert cluster.kept()
    assert cluster.said == [f"no place on Ray yet for engine 0: asked at {SAY_SECONDS * n:g}" for n in (1, 2)]


def test_waiting_for_a_place_is_no_work():
    """One that waits for longer than good work takes, and fails at once when it has its place."""
    assert not Cluster(*[(2, 1)] * MAX_FAILURES, waits=GOOD_SECONDS + 5).kept()


def test_one_that_is_given_up_ends_all(monkeypatch):
    async def one(cluster, number: int, say, waiting) -> bool:
        await asyncio.sleep(0 if number else 1000)

    monkeypatch.setattr("mindspeed_rl_plugin.generators.on_ray.keep", one)
    assert asyncio.run(keep_all(None, 3, print)) == 1


HOLDER = Path(__file__).parents[1] / "ray_holder.py"
IMPATIENT = """
import sys
from mindspeed_rl_plugin.generators import on_ray

on_ray.SAY_SECONDS = 2.0
sys.exit(on_ray.main(sys.argv[1:]))
"""


def said_by(process: subprocess.Popen) -> str:
    return next(line.strip() for line in process.stdout if line.startswith("[rl]"))


@pytest.mark.slow
def test_engines_wait_for_devices_that_another_job_uses(ray_cluster, monkeypatch, tmp_path):
    """And run when it has ended; here there is no job that they could join. More than there is are refused."""
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster)
    assert not [*check_ray(Generators.parse("ray:2,device=cpu"), 120)]
    (problem,) = check_ray(Generators.parse("ray:2,tp=2,device=cpu"), 120)
    assert "needs 2 times 2 CPU of one node each; the nodes of this cluster have 2, enough for 1" in problem
    write_secret(tmp_path / "secret", bytes(SECRET_BYTES))
    wanted = ["--engines", "2", "--device", "cpu", "--join", "127.0.0.1:1", "--secret-file", tmp_path / "secret"]
    python = functools.partial(subprocess.Popen, stdout=subprocess.PIPE, text=True)
    with contextlib.ExitStack() as ends:
        holder = python([sys.executable, HOLDER, ray_cluster])
        ends.callback(holder.kill)
        assert said_by(holder) == "[rl] held"
        engines = python([sys.executable, "-c", IMPATIENT, *wanted])
        ends.callback(engines.terminate)
        waits = "each needs 1 CPU of one node, and 0 of the cluster's 2 are free;"
        assert said_by(engines).startswith(f"[rl] no place on Ray yet for engine 0, 1: {waits}")
        holder.kill()
        while (line := said_by(engines)).startswith("[rl] no place"):
            pass
        assert "on Ray ended with 1: [rl] generate: no job answers at 127.0.0.1:1" in line
        engines.terminate()
        engines.wait(60)


def test_a_cluster_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    (problem,) = check_ray(Generators.parse("ray:1,device=cpu"), 120)
    assert "no Ray cluster answers at 127.0.0.1:1" in problem


def test_without_ray_the_line_that_installs_it_is_said(monkeypatch):
    monkeypatch.setattr("mindspeed_rl_plugin.generators.external_engines.find_spec", lambda name: None)
    assert [*check_ray(Generators.parse("ray:1"), 1)] == [
        "--rl-generators ray:1 needs Ray: pip install ray, in the version of the cluster"
    ]
