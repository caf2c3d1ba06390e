"""What fails beside the ranks of an asynchronous job, and engines on other machines."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from two_machines import start, two_machines, why_not

ASYNC = ("--rl-schedule", "async", "--rl-generators", "1", "--rl-correction", "truncate")
# Fails as the test asks for, once.
FAILING = """
import os, signal, time

def grade(response):
    for how in ("raises", "is killed", "hangs"):
        try:
            os.unlink(f"{__file__}.{how}")
        except FileNotFoundError:
            continue
        if how == "raises":
            raise KeyError("lost")
        os.kill(os.getpid(), signal.SIGKILL) if how == "is killed" else time.sleep(1000)
    return sum(map(ord, response)) % 5 / 4
"""
FAILURES = {"raises": "KeyError: 'lost'", "is killed": "died of signal 9", "hangs": "ran longer than 2 s"}


def failing(job, folder: Path, *flags: str):
    """A job with a grader of its own that is busy: a rollout is trained. And what lets a call of it fail."""
    (folder / "grader.py").write_text(FAILING)
    grader = ("--rl-reward", f"{folder}/grader.py:grade", "--rl-reward-timeout", "2")
    running = job(*flags, *ASYNC, *grader).dumping().start()
    running.until(running.rollouts)
    return running, lambda how: (folder / f"grader.py.{how}").touch()


@pytest.mark.slow
@pytest.mark.parametrize("how", FAILURES)
def test_a_grader_that_fails_ends_the_job(job, nothing_left, tmp_path, how: str) -> None:
    running, let_fail = failing(job, tmp_path, "--train-iters", "1000")
    let_fail(how)
    result = running.wait(60)
    assert result.code != 0 and FAILURES[how] in result.log, result.log[-3000:]
    nothing_left()


@pytest.mark.slow
def test_a_job_goes_on_with_graders_that_are_killed_and_hang(job, nothing_left, tmp_path) -> None:
    """With zero for their responses."""
    running, let_fail = failing(job, tmp_path, "--train-iters", "20", "--rl-reward-on-error", "zero")
    for how in ("is killed", "hangs"):
        let_fail(how)
        while (tmp_path / f"grader.py.{how}").exists():
            time.sleep(0.05)
    result = running.wait(120)
    assert result.code == 0 and FAILURES["is killed"] in result.log, result.log[-3000:]
    assert sum(line["reward/errors"] for line in result.metrics) == 2
    assert max(line["seconds/generate"] for line in result.metrics) > 1.5, "training waited for the one that hung"
    running.check_trained(80)
    nothing_left()


@pytest.mark.slow
def test_the_rows_of_an_engine_that_hangs_go_to_another(job, joined, nothing_left) -> None:
    """The whole process, and the first of its machine, which reads weights for the other; its connections stay. When it
    wakes up, what it still does harms nobody."""
    flags = ("--rl-generators", "0", "--rl-wait-timeout", "40")
    running = job("--train-iters", "10000", *ASYNC, *flags, ranks=1).dumping().start()
    engines = joined(running)
    engines.join()
    running.until(running.rollouts)
    first = int(re.search(r"engine joined: joined engine, process (\d+)", running.log_file(0).read_text())[1])
    engines.join()
    running.until("engines at work: 2")
    os.kill(first, signal.SIGSTOP)
    running.until("no report for 20 s (half of --rl-wait-timeout) from joined engine, process ")
    running.until(lambda: "another process reads them now" in engines.said())
    os.kill(first, signal.SIGCONT)
    running.more(20)
    assert all(engine.poll() is None for engine in engines.engines), engines.said()[-3000:]
    running.end(1)
    assert all(engine.wait(60) == 1 for engine in engines.engines), "they lost the job"
    nothing_left()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_of_two_ranks_of_which_one_stands_still_ends(job, joined, nothing_left, rank: int) -> None:
    """And its rows go to another one. The first decides, and the other waits for it; or it waits for the other."""
    flags = ("--rl-generators", "0", "--rl-wait-timeout", "120")
    running = job("--train-iters", "10000", *ASYNC, *flags, ranks=1).dumping().start()
    engines = joined(running)
    engines.python = sys.executable  # not warm: torchrun's children are the ranks
    of_two = engines.join(ranks=2)
    running.until(running.rollouts)
    engines.join()
    running.until("engines at work: 2")
    (still,) = (p for p in psutil.Process(of_two.pid).children() if p.environ().get("RANK") == str(rank))
    still.suspend()
    running.until("no report for 60 s (half of --rl-wait-timeout) from joined engine, process ")
    running.more(20)
    assert of_two.wait(300) == 1, "torchrun ends the rank that stands still when the other has waited long enough"
    running.end(1)
    assert engines.engines[1].wait(60) == 1, "it lost the job"
    nothing_left()


@pytest.mark.slow
def test_generators_may_be_the_second_agent_of_the_launcher(job, nothing_left) -> None:
    """Two agents of one rank each, as on two machines of one device."""
    running = job("--train-iters", "4", *ASYNC, "--rl-max-staleness", "0", ranks=1, agents=2).dumping()
    result = running.run()
    result.check_log_probs(4)
    running.check_trained(16)
    trainers = "[rl] trainers: rank 0 (WORLD_SIZE 1: 2 less --rl-generators 1; machines 1, ranks a machine 1)"
    assert f"{trainers}; generators: rank 1 (engines 1, ranks an engine 1)" in result.log
    nothing_left()


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=f"no second machine: {why_not()}")
def test_an_engine_joins_over_the_network(job, joined, tmp_path) -> None:
    """From another machine, which shares no memory with the job: rows and weights cross."""
    with two_machines() as machines:
        flags = ("--rl-generators", "0", "--rl-max-staleness", "0", "--rl-verify-weights")
        running = job("--train-iters", "4", *ASYNC, *flags, ranks=1, cold=True).dumping()
        start(running, machines[:1], tmp_path / "t")
        assert re.fullmatch(rf"{machines[0].address}:\d+", running.invitation()[0])
        engine = joined(running).join(on=machines[1])
        result = running.wait(240)
        assert result.code == 0 and engine.wait(30) == 0, result.log[-3000:] + joined(running).said()
    running.check_trained(16)
    result.check_log_probs(4)
    pulled = [line["weights/bytes_pulled"] for line in result.metrics if "weights/bytes_pulled" in line]
    assert pulled and all(line["weights/bytes_published"] in pulled for line in result.metrics)


OBSERVER = """
import sys
from mindspeed_rl_plugin.client import Client
with Client(*sys.argv[1:]) as job:
    while True:
        job.read(job.finished("generate"), ["tokens"])
        print(len(job.metrics(deadline=0.1)), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(why_not() is not None, reason=f"no second machine: {why_not()}")
@pytest.mark.parametrize("lost", ["on another machine", "on the trainers' machine"])
def test_programs_that_are_cut_off_or_stand_still_cost_the_job_the_time_of_their_rows(
    job, joined, tmp_path, lost: str
) -> None:
    """No connection breaks: an engine on another machine, which is cut off, or one on the trainers', which reads their
    memory and is stopped; and an observer, the whole process."""
    with two_machines() as machines:
        running = job("--train-iters", "10000", *ASYNC, "--rl-generators", "0", ranks=1, cold=True).dumping()
        start(running, machines[:1], tmp_path / "t")
        observe = machines[0].command([sys.executable, "-c", OBSERVER, *running.invitation()])
        observer = subprocess.Popen(observe, stdout=subprocess.PIPE)
        engines = joined(running)
        for machine in machines[::-1]:
            engines.join("never, but slow", on=machine)  # so that it holds rows at any moment
            running.until(running.rollouts)
        running.until("engines at work: 2")
        assert observer.stdout.readline()
        observer.send_signal(signal.SIGSTOP)
        machines[1].cut() if lost == "on another machine" else engines.engines[1].send_signal(signal.SIGSTOP)
        running.until("no report for 60 s (half of --rl-wait-timeout) from joined engine, process ", 100)
        running.end(20)
