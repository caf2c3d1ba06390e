"""A job on two machines trains as on one, and ends on the one when the other is gone."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import golden  # noqa: E402
from two_machines import start, two_machines, why_not  # noqa: E402

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no second machine: {why_not()}")

# A pipeline stage on each: rows of the one are trained on the other, and each engine lacks the other's layers.
LAYOUT = ("--pipeline-model-parallel-size", "2", "--rl-generate-tp", "1", "--rl-verify-weights")
ITERATIONS = 2
HEARTBEAT = 30  # seconds, the shortest, with the jobs' --rl-wait-timeout 120
ENDING = 30  # seconds that ranks and agents take to end after that, on a busy machine


@pytest.fixture
def machines():
    with two_machines() as both:
        yield both


def numbers(job) -> dict:
    """Compared values of the first iterations."""
    return {k: v for k, v in golden.read(job.run_dir / "metrics.jsonl").items() if k[1] <= ITERATIONS}


def running(job, machines, tmp_path, *more: str):
    """A job on both machines that has trained the first iterations and goes on."""
    both = job("--train-iters", "1000", *LAYOUT, *more, ranks=1, agents=2, name="both", cold=True)
    start(both, machines, tmp_path / "t")
    metrics, deadline = both.run_dir / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text().count("\n") >= ITERATIONS):
        alive = all(p.poll() is None for p in both.processes)
        assert alive and time.monotonic() < deadline, [both.log_file(i).read_text()[-3000:] for i in range(2)]
        time.sleep(0.1)
    return both


def check_stops(both, agent: int, reason: str, seconds: float) -> None:
    """The agent of a machine ends with an error within this time, and the line of its rank names the other and why."""
    assert both.processes[agent].wait(seconds) > 0, "it ends by itself"
    log = both.log_file(agent).read_text()
    said = re.findall(r"^\[rl\] (rank \d stops: rank \d on \S+ is gone .*)$", log, re.M)
    other = f"rank {1 - agent} on machine-{'ba'[agent]}"
    assert said == [f"rank {agent} stops: {other} is gone ({reason})"], log[-6000:]


def test_it_trains_as_on_one_machine_until_the_cable_is_cut(job, machines, tmp_path):
    """Nothing tells the ends that the cable is cut: no connection breaks, the other is silent."""
    one = job("--train-iters", str(ITERATIONS), *LAYOUT, name="one")
    one.run()
    both = running(job, machines, tmp_path)
    machines[1].cut()
    begin = time.monotonic()
    assert numbers(both) == numbers(one) and len(numbers(one)) > 50
    lines = [json.loads(line) for line in (both.run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines[:ITERATIONS]:
        assert line["dock/bytes_remote"] > 0 and line["reshard/bytes_sent"] > 0, "rows and weights cross"
    for agent in range(2):
        check_stops(both, agent, f"silent for {HEARTBEAT} s", HEARTBEAT + ENDING - (time.monotonic() - begin))


@pytest.mark.slow
def test_a_machine_that_is_killed_is_named_by_the_other(job, machines, tmp_path):
    both = running(job, machines, tmp_path)
    machines[1].kill()
    check_stops(both, 0, "connection broke", ENDING)
    assert both.processes[1].wait(ENDING) == -signal.SIGKILL
    assert "stops:" not in both.log_file(1).read_text(), "it had no time to say anything"
