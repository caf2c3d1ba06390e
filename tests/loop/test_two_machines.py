"""A job on two machines trains as on one, and ends on the one when the other is gone."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import golden
import pyarrow.parquet as pq
import pytest
from jobs import PP2
from planted_faults import FAULTS, results_of, start_doctor
from test_async_ends import FAILING, FAILURES
from two_machines import start, two_machines, why_not

from mindspeed_rl_plugin.tools.doctor.result import guilty

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no second machine: {why_not()}")

# A pipeline stage on each: rows of the one are trained on the other, and each engine lacks the other's layers.
LAYOUT = PP2
# The one trains, the other generates.
APART = ("--rl-schedule", "async", "--rl-generators", "1", "--rl-correction", "truncate")
SAVING = ("--save-interval", "1")
TALK, IMPOSED = (Path(__file__).with_name(name) for name in ("talk.py", "imposed_script.py"))
# Episodes, and evaluations beside the training.
TURNS = "--rl-max-response-length 12 --rl-max-turn-length 3 --rl-max-turns 2 --rl-max-observation-length 4"
TURNS += " --rl-environment-workers 1 --rl-reward environment --rl-eval-every 1 --rl-stop-token-ids"
EPISODES = ("--rl-environment", f"{TALK}:Talk", *TURNS.split(), *map(str, range(0, 97, 2)))
# Prompts that a rollout has begun and not trained are in each checkpoint.
CARRIED = "--rl-schedule streamed --rl-carry-unfinished --rl-correction truncate --rl-oversample 1.5"
CARRIED += " --rl-rollout-prompts 16 --rl-max-response-length 16 --rl-max-running 12"
PARTIAL = tuple(CARRIED.split())
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


def running(job, machines, tmp_path, *flags: str, again: str = "", iterations: int = 1000, ranks: int = 2, **named):
    """A job of so many ranks on these machines that has trained the first iterations and goes on."""
    agents = len(machines)
    flags = ("--train-iters", str(iterations), *flags)
    both = job(*flags, ranks=ranks // agents, agents=agents, name="both", cold=True, **named).dumping()
    start(both, machines, tmp_path / "t", again)
    metrics, deadline = both.run_dir / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text().count("\n") >= ITERATIONS):
        alive = all(p.poll() is None for p in both.processes)
        assert alive and time.monotonic() < deadline, [both.log_file(i).read_text()[-3000:] for i in range(agents)]
        time.sleep(0.1)
    return both


def check_stops(both, agent: int, reason: str, seconds: float) -> None:
    """The agent of a machine ends with an error within this time, and the line of its rank names the other and why."""
    assert both.processes[agent].wait(seconds) > 0, "it ends by itself"
    log = both.log_file(agent).read_text()
    said = re.findall(r"^\[rl\] (rank \d stops: rank \d on \S+ is gone .*)$", log, re.M)
    other = f"rank {1 - agent} on machine-{'ba'[agent]}"
    assert said == [f"rank {agent} stops: {other} is gone ({reason})"], log[-6000:]


def test_it_trains_as_on_one_machine_until_the_cable_is_cut(job, pp2, machines, tmp_path):
    """Nothing tells the ends that the cable is cut: no connection breaks, the other is silent."""
    both = running(job, machines, tmp_path, *LAYOUT)
    machines[1].cut()
    begin = time.monotonic()
    assert numbers(both) == numbers(pp2) and len(numbers(pp2)) > 50
    lines = [json.loads(line) for line in (both.run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines[:ITERATIONS]:
        assert line["dock/bytes_remote"] > 0 and line["reshard/bytes_sent"] > 0, "rows and weights cross"
    for agent in range(2):
        check_stops(both, agent, f"silent for {HEARTBEAT} s", HEARTBEAT + ENDING - (time.monotonic() - begin))


LOST = [(layout, who, how) for layout, who in ((LAYOUT, 1), (LAYOUT, 0), (APART, 1)) for how in ("machine", "torchrun")]
LOST += [(APART, who, how) for who in (0, 1) for how in ("SIGKILL", "SIGSTOP")] + [(APART, 1, "cut")]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "lost", "how"), LOST)
def test_who_is_lost_is_named_by_the_other(job, machines, tmp_path, layout, lost, how):
    """A whole machine; its agent alone, which tells its ranks nothing: they end by themselves; or the process of a
    rank, whose agent lives, and sees nothing of it. One that is stopped, or cut off, is silent."""
    both = running(job, machines, tmp_path, *layout)
    ways = {"machine": machines[lost].kill, "torchrun": both.processes[lost].kill, "cut": machines[lost].cut}
    ways[how]() if how in ways else os.kill(both.rank_pid(lost), getattr(signal, how))
    silent = how in ("SIGSTOP", "cut")
    reason = f"silent for {HEARTBEAT} s" if silent else "connection broke"
    for agent in (1 - lost, lost) if how == "cut" else (1 - lost,):
        check_stops(both, agent, reason, HEARTBEAT + ENDING if silent else ENDING)
    if how not in ("machine", "torchrun"):
        return
    assert both.processes[lost].wait(ENDING) == -signal.SIGKILL
    log, end = both.log_file(lost).read_text(), time.monotonic() + ENDING
    assert "stops:" not in log, "it had no time to say anything"
    assert (f"torchrun (process {both.processes[lost].pid}) is gone" in log) == (how == "torchrun")
    while machines[lost].processes():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [2, 3])
def test_a_stopped_rank(job, machines, tmp_path, stopped):
    """Of an engine of two. Two trainers on the one machine, the engine on the other: all other ranks name it. The name
    is short, as vLLM's sockets lie in the test's folder."""
    both = running(job, machines, tmp_path, *APART, "--rl-generators", "2", "--rl-generate-tp", "2", ranks=4)
    os.kill(both.rank_pid(stopped), signal.SIGSTOP)
    log = both.wait(HEARTBEAT + 2 * ENDING).log  # the second agent kills it after 30 s
    said = re.findall(r"^\[rl\] (rank \d stops: rank \d on \S+ is gone .*)$", log, re.M)
    gone = f"rank {stopped} on machine-b is gone (silent for {HEARTBEAT} s)"
    assert sorted(said) == [f"rank {rank} stops: {gone}" for rank in range(4) if rank != stopped], log[-6000:]


@pytest.mark.slow
def test_a_generator_that_dies_before_it_has_come_is_named(job, machines, tmp_path):
    """While the trainer builds its model, so before there is a connection that breaks."""
    both = job("--train-iters", "4", *APART, ranks=1, agents=2, cold=True)
    start(both, machines, tmp_path / "t")
    both.until("[rl] trainers: rank 0", 100)
    os.kill(both.rank_pid(1), signal.SIGKILL)
    assert both.processes[0].wait(100 + HEARTBEAT + ENDING) > 0
    said = f"[rl] rank 0 stops: rank 1 is gone (it should generate, but did not connect within {HEARTBEAT} s"
    assert said in both.log_file(0).read_text(), both.log_file(0).read_text()[-3000:]


RESTARTS = [(2, LAYOUT, 1), (2, LAYOUT, 0), (2, APART, 1), (2, APART, 0), (1, LAYOUT, 1), (1, APART, 1)]
RESTARTS = [(*case, again) for again in ("static", "c10d") for case in RESTARTS]
RESTARTS += [(2, (*APART, *EPISODES), 1, "static"), (2, PARTIAL, 1, "static")]
RESTARTS += [(2, APART, 0, "unshared")]


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("agents", "layout", "killed", "again"), RESTARTS)
def test_a_job_whose_ranks_the_launcher_starts_again_resumes_by_itself(
    job, machines, arithmetic, tmp_path, monkeypatch, agents, layout, killed, again
):
    """unshared: c10d, where the ranks have a store of their own and the agents another."""
    if again == "unshared":
        monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        again = "c10d"
    held_out = ("--rl-eval-data", str(arithmetic / "heldout.jsonl")) if "--rl-eval-every" in layout else ()
    named = {"script": IMPOSED} if layout == PARTIAL else {}  # else all responses end together
    both = running(job, machines[:agents], tmp_path, *layout, *held_out, *SAVING, again=again, iterations=8, **named)
    os.kill(both.rank_pid(killed), signal.SIGKILL)
    result = both.wait(300)
    assert result.code == 0, result.log[-6000:]
    trained = both.trained()
    assert len(trained) == len(set(trained)) == 8 * 16, "each once"
    assert (trained[-1] == (7, 3, 3)) == (layout != PARTIAL), "the first ones, or ahead by what is carried along"
    assert {line["iteration"] for line in result.evaluations} == ({*range(9)} if held_out else set())
    assert result.log.count("successfully saved checkpoint from iteration       8") >= 1
    assert "resum" in result.log, "from its checkpoint, and not from the start"
    if layout == PARTIAL:
        whole = job("--train-iters", "8", *layout, *SAVING, ranks=1, agents=2, name="whole", cold=True, **named)
        start(whole, machines, tmp_path / "t")
        assert result.numbers == whole.wait(300).numbers, "of the run that nobody stops, bit by bit"
        assert max(line.get("making/responses", 0) for line in result.metrics) > 0


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("killed", [1, 0])
@pytest.mark.parametrize("layout", [LAYOUT, APART])
@pytest.mark.parametrize("again", ["static", "c10d"])
def test_a_rank_that_is_killed_at_its_start_is_not_waited_for(job, machines, tmp_path, layout, again, killed):
    """While it imports Megatron, so that the other one waits for it in torch, by the store of this start."""
    both = job("--train-iters", "2", *layout, ranks=1, agents=2, cold=True).dumping()
    start(both, machines, tmp_path / "t", again)
    both.rank_pid(killed)
    time.sleep(6)
    os.kill(both.rank_pid(killed), signal.SIGKILL)
    result = both.wait(240)  # torch would wait for ten minutes
    assert result.code == 0, result.log[-6000:]
    both.check_trained(8)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("layout", "again"), [(LAYOUT, "static"), (APART, "static"), (LAYOUT, "c10d")])
def test_a_machine_that_is_gone_may_come_again(job, machines, tmp_path, layout, again):
    """Its agent too; the other one starts its ranks again, which wait for those of a new agent. Not with c10d: torch
    2.13 tells an agent that comes later no MASTER_ADDR."""
    both = running(job, machines, tmp_path, *layout, *SAVING, again=again, iterations=8)
    machines[1].kill()
    both.processes[1].wait(10)
    time.sleep(10)
    start(both, machines, tmp_path / "t", again, first=1)
    result = both.wait(300)
    assert (result.code == 0) == (again == "static"), result.log[-6000:]
    whole = [(e, g, m) for e in range(8) for g in range(4) for m in range(4)]
    assert (both.trained() == whole) == (again == "static")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_save_has_one_job_on_all_machines(job, machines, tmp_path):
    """Another machine's is refused while it beats, and taken over when it was silent for a minute."""
    waiting = ("--train-iters", "4", *APART, "--rl-generators", "0", "--rl-wait-timeout", "600")
    first, second = (job(*waiting, name="both", ranks=1, cold=True) for _ in range(2))
    second.log_file = lambda agent: second.save / "second.log"
    start(first, machines[:1], tmp_path / "t")
    first.invitation()
    start(second, machines[1:], tmp_path / "t")
    assert second.wait(200).code == 1 and first.processes[0].poll() is None
    assert re.search(r"belongs to a job, process \d+ on machine-a since .*, which runs", second.log_file(0).read_text())
    machines[0].kill()
    start(second, machines[1:], tmp_path / "t")
    second.until("is gone; this job takes it over", 200)
    second.invitation()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sync", "streamed"])
@pytest.mark.parametrize("how", FAILURES)
def test_a_grader_that_fails_on_the_second_machine_ends_the_job(job, machines, tmp_path, how, schedule):
    """Each machine grades the rows that it trains; streamed, a thread does, beside generation."""
    (tmp_path / "grader.py").write_text(f"import socket\n__file__ += socket.gethostname()\n{FAILING}")
    grader = ("--rl-reward", f"{tmp_path}/grader.py:grade", "--rl-reward-timeout", "2")
    both = running(job, machines, tmp_path, *grader, "--rl-schedule", schedule)
    (tmp_path / f"grader.pymachine-b.{how}").touch()
    check_stops(both, 0, "ended by an error", ENDING)
    assert both.processes[1].wait(ENDING) > 0 and FAILURES[how] in both.log_file(1).read_text()


OFFERS = """
import sys
from mindspeed_rl_plugin.client import Client
with Client(*sys.argv[1:]) as job:
    assert job.offer([{"prompt": f"{n}*2=", "answer": str(2 * n)} for n in range(6)]) == [-1, -2, -3, -4, -5, -6]
"""


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_who_joined_ends_with_a_start_and_comes_again_to_the_next(job, machines, joined, tmp_path):
    """It has another address and secret; what programs have offered is in the checkpoint."""
    flags = ("--rl-schedule", "async", "--rl-generators", "0", "--rl-correction", "truncate", *SAVING)
    both = job("--train-iters", "8", *flags, ranks=1, agents=2, cold=True).dumping()
    start(both, machines, tmp_path / "t", "static")
    engines, given = joined(both), both.invitation()
    secret = Path(given[1]).read_text()
    subprocess.run(machines[1].command([sys.executable, "-c", OFFERS, *given]), check=True, timeout=60)
    engine = engines.join(on=machines[1])
    both.until("successfully saved checkpoint from iteration       1")
    os.kill(both.rank_pid(1), signal.SIGKILL)
    assert engine.wait(60) == 1, "it has lost the job"
    both.until(lambda: both.invitation() != given, 150)
    assert Path(given[1]).read_text() != secret and os.stat(given[1]).st_mode & 0o777 == 0o600
    assert engines.join(on=machines[1]).wait(200) == 0, engines.said()[-3000:]
    result = both.wait(60)
    assert result.code == 0 and not Path(given[1]).exists(), result.log[-6000:]
    both.check_trained(32)
    tables = [
        pq.read_table(f, columns=["prompt"])["prompt"].to_pylist() for f in (both.save / "dump").glob("*.parquet")
    ]
    assert all(sum(tables, []).count(f"{n}*2=") == 4 for n in range(6)), "each once, in four samples"


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("fault", ["healthy", "rope base in the engine's config"])
def test_doctor_compares_trainer_and_engine_over_both_machines(job, machines, tmp_path, fault):
    """The fault is that of the second engine; the layers of the first machine agree."""
    launch = job("--train-iters", "4", *LAYOUT, ranks=1, agents=2).command(0, 29400)
    (script := tmp_path / "launch.sh").write_text(shlex.join(launch))
    code = "" if fault == "healthy" else FAULTS["trainer"][fault][1]
    agents = start_doctor(machines, tmp_path, "--compare", str(script), code=code)
    codes, named = [agent.wait(400) for agent in agents], guilty(results_of(tmp_path / "doctor.html"))
    print((tmp_path / "log0").read_text())
    assert (codes, [r.check for r in named]) == (([1, 0], ["where they part"]) if code else ([0, 0], []))
    assert all("attention of layer 1: " in r.figure and " on rank 1, " in r.figure for r in named), named
