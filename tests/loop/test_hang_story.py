"""A job that hangs: its status files name the process that is late, and the job's own message at the deadline too."""

import os
import re
import signal
import time

import psutil
import pytest
from jobs import PP2, ROOT
from two_machines import start, two_machines, why_not

from mindspeed_rl_plugin.processes import began, state_of
from mindspeed_rl_plugin.status import status_file, story

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TOLD_SECONDS = 60
# Runs pretrain_gpt.py; rank 1 stops itself in a stage of iteration 2.
STOPS = """
import contextlib, os, runpy, signal, time
from mindspeed_rl_plugin.monitor.stage_clock import StageClock

stage = StageClock.stage

@contextlib.contextmanager
def stopping(clock, name):
    with stage(clock, name):
        if os.environ["RANK"] == "1" and (clock.iteration, name) == (2, {name!r}):
            time.sleep(3)  # its status is written every 2 s
            os.kill(os.getpid(), signal.SIGSTOP)
        yield

StageClock.stage = stopping
runpy.run_path({script!r}, run_name="__main__")
"""
SLOW = """
import time

def grade(response):
    time.sleep(0.05)
    return len(response) % 2

class Slow:
    def reset(self, prompt, seed):
        pass

    def step(self, text):
        time.sleep(0.05)
        return "go on", len(text) % 2, False
"""
ASYNC = ("--rl-schedule", "async", "--rl-generators", "0", "--rl-correction", "truncate")


def told(job, pattern: str) -> str:
    """The story, as soon as its first line matches."""
    end, text = time.monotonic() + TOLD_SECONDS, ""
    while not re.match(pattern, text):
        assert time.monotonic() < end, f"{pattern} is not in:\n{text}"
        time.sleep(0.5)
        text = story.tell(status_file.folder_of(str(job.save)))
    print(text)
    return text


def stopped_rank(job) -> int:
    """Process of rank 1, once it has stopped itself."""
    pid = job.rank_pid(1)
    job.until(lambda: state_of(pid, began(pid)) == "stopped")
    return pid


@pytest.mark.parametrize("stage", ["prompts", "generate", "reward", "logp_old", "advantage", "update"])
def test_a_rank_that_stands_still_is_named_with_its_stage(job, tmp_path, stage):
    script = tmp_path / "stops.py"
    script.write_text(STOPS.format(name=stage, script=str(ROOT / "examples" / "pretrain_gpt.py")))
    running = job(
        "--train-iters", "3", "--rl-generate-tp", "2", "--rl-wait-timeout", "600", script=script, cold=True
    ).start()
    pid = stopped_rank(running)
    text = told(running, rf"late first: rank 1 on \S+: stopped by a signal for \d+ s; its last status: (in )?{stage}\b")
    assert "  rank 0 (" in text
    os.kill(pid, signal.SIGCONT)
    assert running.wait(120).code == 0, "the story costs the job nothing"
    assert all(seen.ended == "in order" for seen in story.read(status_file.folder_of(str(running.save))))


def test_the_message_at_the_deadline_tells_it(job, tmp_path, nothing_left):
    script = tmp_path / "stops.py"
    script.write_text(STOPS.format(name="generate", script=str(ROOT / "examples" / "pretrain_gpt.py")))
    result = job("--train-iters", "3", script=script, cold=True).fail()
    said = "rank 0 stops: rank 1 on "
    assert said in result.log and "is gone (silent for 30 s)" in result.log, result.log[-3000:]
    assert re.search(r"^\[rl\] late first: rank 1 on \S+: stopped by a signal for \d+ s", result.log, re.M)


EPISODES = (
    "--rl-environment {file}:Slow --rl-reward environment --rl-environment-workers 1 --rl-environment-timeout 90 "
    "--rl-max-response-length 16 --rl-max-turn-length 4 --rl-max-turns 3"
)
GRADES = "--rl-reward {file}:grade --rl-reward-timeout 90"


@pytest.mark.parametrize(
    ("kind", "flags", "who"),
    [
        ("grader", GRADES, "a reward worker of grade"),
        ("environment", EPISODES, "an environment worker of .*:Slow"),
    ],
    ids=["grader", "environment"],
)
def test_a_users_code_that_stands_still(job, tmp_path, kind, flags, who):
    code = tmp_path / "slow.py"
    code.write_text(SLOW)
    running = job("--train-iters", "200", *flags.format(file=code).split(), cold=True).dumping().start()
    running.until(running.rollouts)
    children = psutil.Process(running.rank_pid(1)).children(recursive=True)
    processes = [p for p in children if f"{kind}_process:main" in " ".join(p.cmdline())]  # the last is a worker
    processes[-1].suspend()
    told(running, rf"late first: {who} \(process {processes[0].pid}\).*, 1 call for \d+ s, for which rank 1 waits")
    processes[-1].resume()
    running.end(1)


def test_an_engine_that_joined_and_stands_still(job, joined):
    running = job("--train-iters", "10000", *ASYNC, ranks=1).dumping().start()
    joined(running).join()
    running.until(running.rollouts)
    engine = int(re.search(r"engine joined: joined engine, process (\d+)", running.log_file(0).read_text())[1])
    os.kill(engine, signal.SIGSTOP)
    told(running, rf"late first: the engine joined engine, process {engine}.*, for which rank 0 waits")
    os.kill(engine, signal.SIGCONT)
    running.end(1)


@pytest.mark.skipif(why_not() is not None, reason=f"no second machine: {why_not()}")
def test_a_link_that_is_cut(job, tmp_path):
    """Both machines see SAVE; each waits for the other."""
    with two_machines() as machines:
        running = job(*PP2, "--train-iters", "1000", "--rl-wait-timeout", "600", ranks=1, agents=2, cold=True).dumping()
        start(running, machines, tmp_path / "t")
        running.until(running.rollouts)
        machines[1].cut()
        told(running, r"late first: the network between rank [01] on machine-[ab] and rank [01] on machine-[ab]")
