"""Generators apart from the trainers: real torchrun, real Megatron, real vLLM."""

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from last_parts import LAST_PART, check_log_probs

from mindspeed_rl_plugin.checkpoints.checkpoint_files import read_state, read_tracker
from mindspeed_rl_plugin.client import Client
from mindspeed_rl_plugin.dock.places import DONE
from mindspeed_rl_plugin.monitor.run_files import read_apart

LAGGED, SLOW = (Path(__file__).with_name(f"{name}.py") for name in ("lagged_script", "slow_grader"))
HOLDER = Path(__file__).parents[1] / "ray_holder.py"
ASYNC = ("--rl-schedule", "async", "--rl-generators", "1", "--rl-correction", "truncate")
STRICT = ("--rl-async-order", "strict")
# Two optimizer steps of a rollout, so that publications are fewer than iterations.
SIZES = ("--rl-rollout-prompts", "8", "--rl-correction", "truncate")
COMPARED = ("reward/mean", "loss", "grad_norm", "entropy", "kl/ref", "rollout/kl", "response/length_mean", "version")


def numbers(result) -> list[list[float]]:
    return [[line.get(name) for name in COMPARED] for line in result.metrics]


def test_the_strict_order_is_a_lagged_synchronous_run_bit_by_bit_also_over_a_signal(
    job, nothing_left, monkeypatch
) -> None:
    """Six rollouts. torchrun passes SIGTERM to the generators too, whose rows the checkpoint waits for; the next start
    goes on from it. A program reads what the job does, which is all that a strict order lets it do."""
    monkeypatch.setenv("LAG", "2")
    common = ("--train-iters", "12", *SIZES)
    running = job(*common, *ASYNC, *STRICT, "--rl-max-staleness", "2", "--exit-signal-handler").dumping().start()
    former = running.invitation()
    running.until(running.rollouts)
    os.kill(running.processes[0].pid, signal.SIGTERM)
    stopped = running.wait(60)
    assert stopped.code == 1 and "got signal: 15" in stopped.log, "what torchrun makes of it, whatever the ranks do"
    assert " stops: " not in stopped.log, stopped.log[-3000:]
    state, dock = read_state(str(running.save), read_tracker(str(running.save)))
    epochs = {epoch["number"]: epoch for epoch in dock["epochs"]}
    graded = [epochs[number]["status"]["reward"].tolist() for number, _ in state["loop"]["queue"]]
    assert len(graded) >= 2 and all(status == [DONE] * 32 for status in graded), "what is admitted ahead"
    nothing_left()
    running.start()
    running.until(lambda: running.invitation() != former)
    with Client(*running.invitation()) as program:
        assert program.newest(deadline=60) >= 0 and program.metrics(deadline=60)
        with pytest.raises(ValueError, match="--rl-async-order strict"):
            program.take(1, deadline=0)
    strict = running.wait(120)
    assert strict.code == 0 and "training resumes from" in strict.log, strict.log[-3000:]
    oracle = job(*common, ranks=1, name="oracle", script=LAGGED).run()
    assert numbers(strict) == numbers(oracle)
    assert len({line["reward/mean"] for line in strict.metrics[::2]}) > 1, "rewards that never change show nothing"
    firsts = strict.metrics[::2]
    assert [line["version"] for line in firsts] == [2 * max(0, e - 2) for e in range(6)]
    assert [line["lag/max"] for line in firsts] == [min(e, 2) for e in range(6)]


@pytest.mark.slow
def test_training_and_checkpoints_do_not_wait_for_an_evaluation(job, tmp_path) -> None:
    """A run that ends before an evaluation is over begins it anew after a resume."""
    (tmp_path / "late.jsonl").write_text('{"prompt": "1+1=", "answer": "late"}\n' * 4)
    late = ("--rl-eval-data", f"{tmp_path}/late.jsonl", "--rl-eval-every", "4", "--rl-reward-workers", "6")
    late += ("--rl-reward-timeout", "60")
    flags = ("--train-iters", "8", "--save-interval", "4", *ASYNC, *late, "--rl-reward", f"{SLOW}:grade")
    running = job(*flags, ranks=2)
    first = running.stop_at(4)
    (evaluation,) = first.evaluations
    assert evaluation["iteration"] == 0, "that of iteration 4 was not over"
    assert evaluation["time"] > first.metrics[0]["time"], "training went on meanwhile"
    state, dock = read_state(str(running.save), 4)
    assert state["loop"]["admission"]["overdue"] and all(epoch["number"] >= 0 for epoch in dock["epochs"])
    assert [e["iteration"] for e in running.run().evaluations] == [0, 4, 8]


# Every other group gets nothing, so that it teaches nothing.
OWN = """
from tensordict import TensorDict

class Halved:
    reads, writes = ("reward",), ("reward",)

    def compute(self, rows):
        return TensorDict({"reward": rows["reward"] * (rows["ids"][:, :2].sum(1) % 2)}, batch_size=rows.batch_size)
"""


def places(job, offered: list[dict[str, str]]) -> list[tuple[int, int]]:
    """Epoch and group that each offered prompt became, which is one."""
    mine = [row for row in job.dumped() if {"prompt": row["prompt"], "answer": row["answer"]} in offered]
    found = sorted({(row["epoch"], row["group"]) for row in mine})
    assert len(found) == len(offered) and len(mine) == 4 * len(offered), found
    return found


@pytest.mark.parametrize(
    ("moment", "inflight"),
    [
        ("in mid-decode", "keep"),
        pytest.param("in mid-pull", "recompute", marks=pytest.mark.slow),
        pytest.param("between lease and submit", "drain", marks=pytest.mark.slow),
        pytest.param("between put and commit", "keep", marks=pytest.mark.slow),
        pytest.param("with new weights half written", "keep", marks=pytest.mark.slow),
    ],
)
def test_engines_join_one_is_killed_and_new_weights_come_while_responses_are_in_the_making(
    job, joined, nothing_left, tmp_path, moment: str, inflight: str
) -> None:
    """Each admitted row is trained once, whoever sampled it, and so is each prompt that a program has offered. Where
    responses go on under newer weights, some have several segments. What a run tells of itself."""
    prompts = [{"prompt": f"{number}*2=", "answer": ""} for number in (7, 77, 777, 77777)]  # of 4, 5, 6 and 8 tokens
    (tmp_path / "four.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    flags = ("--rl-inflight", inflight, "--rl-max-staleness", "2", "--rl-max-response-length", "16")
    flags += ("--rl-max-running", "7", "--rl-prompt-data", f"{tmp_path}/four.jsonl", *LAST_PART)
    running = job("--train-iters", "10", *ASYNC, "--rl-generators", "0", *flags, ranks=1).dumping().start()
    with Client(*running.invitation()) as source:
        with pytest.raises(ValueError, match="row 0 has 99 tokens, --rl-max-prompt-length is 16"):
            source.offer([{"prompt": "1" * 99, "answer": ""}])
        offered = [{"prompt": f"{n}*3=", "answer": str(3 * n)} for n in range(6)]
        assert source.offer(offered) == [-1, -2, -3, -4, -5, -6]
    engines = joined(running)
    assert engines.join(moment).wait(120) == -signal.SIGKILL, engines.said()[-3000:]
    healthy = engines.join("never, but slow")
    result = running.wait(120)
    assert result.code == 0, result.log[-4000:] + engines.said()[-3000:]
    assert healthy.wait(20) == 0 and "the job has ended" in engines.said()
    running.check_trained(40)
    of_offers = places(running, offered)
    first, second = min(of_offers)[0], max(of_offers)[0]
    assert [epoch for epoch, _ in of_offers] == [first] * 4 + [second] * 2 and second == first + 1, "before the data's"
    assert not (running.run_dir / "secret").exists()
    nothing_left()
    segments = [line["segments/mean"] for line in result.metrics]
    assert len(segments) == 10 and (max(segments) > 1) == (inflight != "drain"), segments
    rows = running.dumped()
    check_log_probs(rows, inflight)
    check_longest_first([row for row in rows if row["answer"] == ""], staleness=2)
    assert max(line["lag/max"] for line in result.metrics) >= 1
    check_report(running.run_dir, result)


def check_longest_first(rows: list[dict], staleness: int) -> None:
    """Those prompts go first whose responses were long in the rollout that was the last one trained when this one was
    admitted."""
    lengths: dict[tuple[int, str], list[int]] = {}
    for row in rows:
        lengths.setdefault((row["epoch"], row["prompt"]), []).append(row["response_length"])
    mean = {key: sum(of) / len(of) for key, of in lengths.items()}
    far_apart = 0
    for epoch in range(staleness + 1, rows[-1]["epoch"] + 1):
        known = [(epoch - staleness - 1, prompt) for e, prompt in mean if e == epoch]
        before = [mean[key] for key in known if key in mean]
        assert before == sorted(before, reverse=True), (epoch, before)
        far_apart += len(before) > 1 and before[0] > before[-1] + 3
    assert far_apart, "lengths that are alike show nothing"


def check_report(run_dir: Path, result) -> None:
    """What the report shows of a job with one slow engine."""
    apart = read_apart(run_dir)
    assert {e["process"] for e in apart if e["stage"].startswith("version ")} == {"weights"}
    assert {"generate", "pull", "pause"} <= {e["stage"] for e in apart}
    begin, end = result.metrics[0]["time"] - 60, result.metrics[-1]["time"] + 60
    assert all(begin < e["start"] <= e["end"] < end for e in apart)
    for name in ("trainers_starved", "engines_back_pressure", "engines_version"):
        assert all(0 <= line.get(f"idle/{name}", 0) <= 1 for line in result.metrics[1:]), name
    assert [line["engines"] for line in result.metrics] == [1.0] * len(result.metrics)
    assert max(line["idle/trainers_starved"] for line in result.metrics) > 0.3, "the engine is slow"
    share = r"\d+%"
    idle = rf"idle train {share} back-pressure {share} version {share}"
    shown = r"\| lag [\d.]+/[\d.]+ seg [\d.]+ sampled len [\d.]+ \| %s \| pull [\d.]+s pause [\d.]+s \|"
    assert re.search(shown % idle, result.log)
    with_engine = [line for line in result.metrics if "weights/bytes_pulled" in line]
    assert len(with_engine) >= 4
    for line in with_engine:
        assert 0 < line["weights/pull_seconds"] < 20 and 0 < line["weights/pause_seconds"] < 20
    # One trainer and one engine: what is published is pulled, all of it and no more. A line may hold the pulls of two
    # publications and one pause.
    pulled = statistics.median_low(line["weights/bytes_pulled"] for line in with_engine)
    assert {line["weights/bytes_published"] for line in result.metrics} == {pulled} and pulled > 1e5
    assert all(0 < line["seconds/publish"] < 20 for line in result.metrics[:-1]), "the last weights are for nobody"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_leaves_and_another_one_comes(job, joined, nothing_left, ranks: int) -> None:
    """SIGTERM: its rows go back, and it ends with 0. Of two ranks torchrun gets it, passes it on, and ends with 1."""
    running = job("--train-iters", "30", *ASYNC, "--rl-generators", "0", ranks=1).dumping().start()
    engines = joined(running)
    warm, engines.python = engines.python, sys.executable if ranks > 1 else engines.python  # torchrun gets the signal
    first = engines.join(ranks=ranks)
    engines.python = warm
    running.until(running.rollouts)
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == ranks - 1 and engines.said().count("has left the job") == 1, engines.said()[-3000:]
    assert re.search(r"\[rl\] joined the job at \S+ \(run \S+\); its newest weights are version 0", engines.said())
    running.until("engines at work: 0: the job waits for one to join")
    assert engines.join().wait(120) == 0
    result = running.wait(30)
    assert result.code == 0 and re.search(
        r"this job has no engine yet, and waits for one to join: \S+ -m mindspeed", result.log
    )
    assert result.log.count("[rl] engine joined: joined engine, process ") == 2
    running.check_trained(120)
    nothing_left()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", ["engine", "one rank of two", "engine, five times", "node", "job"])
def test_ray_starts_an_engine_again_that_is_lost(job, ray_cluster, nothing_left, monkeypatch, lost) -> None:
    """The engine dies, or one rank of it; five times, which ends the job; or a second node with it, the only one with a
    free CPU until who holds the first one ends; or the launcher of the job."""
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster)
    wanted = f"ray:1,{'tp=2,' if lost == 'one rank of two' else ''}device=cpu"
    many = 5 if lost == "engine, five times" else 1
    with contextlib.ExitStack() as ends:
        if lost == "node":
            holder = subprocess.Popen([sys.executable, HOLDER, ray_cluster], stdout=subprocess.PIPE, text=True)
            ends.callback(holder.kill)
            assert any(line == "[rl] held\n" for line in holder.stdout)
            first = raylets(ray_cluster)
            node = ["start", "--address", ray_cluster, "--node-ip-address", "127.0.0.1", "--num-cpus", "1"]
            node += ["--object-store-memory", "100000000"]
            subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *node], check=True, timeout=300)
        running = job("--train-iters", "12", *ASYNC, "--rl-generators", wanted, ranks=1).dumping().start()
        running.until(running.rollouts)
        address, watched = running.invitation()[0], running.run_dir / "engines-on-ray.log"
        if lost == "job":  # then its engines end, too
            running.processes[0].kill()
            psutil.wait_procs(engines(address), timeout=60)
            assert not engines(address)
            return
        ended = f"engine 0 on Ray ended with {dict(node=-1).get(lost, 1 if 'rank' in lost else -9)}"
        for count in range(1, many + 1):
            running.until(lambda: lost == "node" or engines(address))
            for dies in raylets(ray_cluster) - first if lost == "node" else engines(address):
                if lost != "one rank of two" or dies.environ().get("RANK") == "1":
                    dies.kill()
            running.until(lambda times=count: watched.read_text().count(ended) == times)
    result, said = running.wait(400), watched.read_text()
    assert (result.code == 0) == (many == 1) and "started again in 1 s" in said, result.log[-4000:] + said[-4000:]
    if many == 1:
        running.check_trained(48)
    else:
        assert "not started again after 5 failures in a row" in said and "Ray runs no engines any more" in result.log
    psutil.wait_procs(engines(address), timeout=60)
    assert not engines(address)
    if lost != "node":  # one that is killed leaves what it shared
        nothing_left()


@pytest.mark.slow
def test_a_job_whose_engine_gets_no_place_on_ray_ends(job, ray_cluster, nothing_left, monkeypatch) -> None:
    """Another program holds all CPUs, which is no fault at the start."""
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster)
    with subprocess.Popen([sys.executable, HOLDER, ray_cluster], stdout=subprocess.PIPE, text=True) as holder:
        assert any(line == "[rl] held\n" for line in holder.stdout)
        waiting = ("--rl-generators", "ray:1,device=cpu", "--rl-wait-timeout", "70")
        running = job("--train-iters", "12", *ASYNC, *waiting, ranks=1)
        result = running.fail(200)
        holder.kill()
    assert "none was graded for 70 s (--rl-wait-timeout); engines at work: 0" in result.log, result.log[-4000:]
    assert "no place on Ray yet for engine 0: " in (running.run_dir / "engines-on-ray.log").read_text()
    nothing_left()


def raylets(cluster: str) -> set[psutil.Process]:
    """Of the cluster at an address, whose port they name: others on this machine have theirs."""
    gcs = re.compile(rf"--gcs-address=\S+:{cluster.rpartition(':')[2]}")
    alive = psutil.process_iter(["name", "cmdline"])
    return {p for p in alive if p.info["name"] == "raylet" and any(map(gcs.fullmatch, p.info["cmdline"] or ()))}


def engines(address: str) -> set[psutil.Process]:
    """Of one rank, that joined the job at an address."""
    alive = psutil.process_iter(["cmdline"])
    return {p for p in alive if "generate" in (p.info["cmdline"] or ()) and address in p.info["cmdline"]}


@pytest.mark.slow
@pytest.mark.parametrize("who", ["trainer", "generator", "ctrl-c"])
def test_a_job_ends_with_its_ranks_and_the_engines_that_joined(job, joined, nothing_left, who: str) -> None:
    """A rank that is killed, or what a shell sends to the launcher and all its ranks."""
    running = job("--train-iters", "1000", *ASYNC, cold=who == "ctrl-c").dumping().start()
    engines = joined(running)
    guest = engines.join()
    running.until(running.rollouts)
    running.until("generator rank 1")  # killed while vLLM starts, it leaves a directory
    if who == "ctrl-c":
        os.killpg(running.processes[0].pid, signal.SIGINT)
        assert "[rl] interrupted in iteration" in running.wait(60).log
        assert guest.wait(60) == 0 and "the job has ended" in engines.said(), engines.said()[-3000:]
    else:
        os.kill(running.rank_pid(["trainer", "generator"].index(who)), signal.SIGKILL)
        assert running.wait(60).code != 0 and guest.wait(60) == 1
    if who != "generator":
        assert (running.run_dir / "secret").exists() == (who == "trainer"), "it had no time to remove it"
    nothing_left()


@pytest.mark.slow
def test_a_free_run_that_is_resumed_trains_each_row_once(job, arithmetic) -> None:
    """What was in the making is sampled anew; a checkpoint in the middle of a rollout too, and after the async part the
    synchronous schedule goes on."""
    data = ("--rl-eval-data", str(arithmetic / "heldout.jsonl"), "--rl-eval-every", "3")
    common = ("--save-interval", "3", *SIZES, *data)
    apart = (*ASYNC, "--rl-max-staleness", "2")
    first = job("--train-iters", "12", *common, *apart, "--exit-interval", "3", name="run").dumping().start()
    offered = [{"prompt": f"{n}*2=", "answer": str(2 * n)} for n in range(12)]
    with Client(*first.invitation()) as source:
        assert source.newest(deadline=120) == 0, "three rollouts are admitted; the next one is of offers"
        source.offer(offered)
    assert first.wait(120).code == 0
    state = torch.load(first.save / "iter_0000003" / "rl_state.pt", weights_only=True)["loop"]
    assert len(state["offers"]["waiting"]) == 4
    last = job("--train-iters", "12", *common, *apart, name="run").dumping()
    last.stop_at(6)
    result = last.run()
    assert [line["iteration"] for line in result.metrics] == [*range(1, 13)]
    last.check_trained(48, of_epoch=8)
    assert len(places(last, offered)) == 12, "those that waited when the first part ended, too"
    assert [e["iteration"] for e in result.evaluations] == [0, 4, 6, 10, 12]


@pytest.mark.slow
def test_an_exact_resume_samples_nothing_anew(job, arithmetic) -> None:
    """Rollouts that were admitted before the checkpoint keep the weights that sampled them then. The run ends in the
    middle of a rollout, and is evaluated there once."""
    data = ("--rl-eval-data", str(arithmetic / "heldout.jsonl"), "--rl-eval-every", "9")
    flags = ("--save-interval", "4", *SIZES, *ASYNC, "--rl-max-staleness", "2", "--rl-exact-resume", *data)
    last = job("--train-iters", "9", *flags, name="run").dumping()
    last.stop_at(4)
    result = last.run()
    assert [line["iteration"] for line in result.metrics] == [*range(1, 10)]
    last.check_trained(40, of_epoch=8)
    # Publication 2 of 4 steps was out at the checkpoint, so rollouts up to 4 were admitted, all that there are.
    files = (last.save / "dump").glob("*.parquet")
    assert max(v for f in files for v in pq.read_table(f, columns=["version"])["version"].to_pylist()) <= 4
    assert [e["iteration"] for e in result.evaluations] == [0, 9]


@pytest.mark.slow
def test_exact_resume_may_be_given_in_the_middle_of_a_rollout(job) -> None:
    """Engines have no weights until its three steps are done, so no checkpoint before that waits for what a slow engine
    left to sample."""
    slow = ("--rl-max-running", "1", "--rl-max-response-length", "16", "--rl-max-staleness", "2")
    flags = ("--train-iters", "9", "--save-interval", "1", "--rl-rollout-prompts", "12", *ASYNC, *slow)
    job(*flags, "--exit-interval", "1", name="run").dumping().run()
    last = job(*flags, "--rl-exact-resume", "--rl-wait-timeout", "30", name="run").dumping()
    assert [line["iteration"] for line in last.run().metrics] == [*range(1, 10)]
    last.check_trained(36, of_epoch=12)


@pytest.mark.slow
def test_dynamic_sampling_and_a_users_stage(job, tmp_path) -> None:
    """Dropped groups are replaced by new ones within the bound; a stage of the user's own comes after the grades."""
    own = tmp_path / "own.py"
    own.write_text(OWN)
    flags = ("--rl-algorithm", "dapo", "--rl-max-staleness", "1", "--rl-overlong-buffer", "0")
    flags += ("--rl-stage", f"{own}:Halved")
    result = job("--train-iters", "6", *SIZES, *ASYNC, *flags).dumping().run()
    lines = [line for line in result.metrics if "lag/max" in line]
    assert len(lines) == 3 and all(line["lag/max"] <= 1 for line in lines)
    assert sum(line["sampling/groups_drawn"] for line in lines) > 3 * 8, "none was replaced"
    assert all(line["groups/informative"] == 1.0 for line in lines)


@pytest.mark.slow
def test_what_is_ahead_holds_flags_until_the_run_is_over(job, nothing_left) -> None:
    """A run that was synchronous goes on apart. Half of that cannot become synchronous again; a whole one can."""
    common = ("--save-interval", "3", *SIZES)
    job("--train-iters", "12", *common, ranks=1, name="run").dumping().stop_at(2)
    first = job("--train-iters", "12", *common, *ASYNC, "--exit-interval", "6", name="run").dumping().run()
    assert [line["iteration"] for line in first.metrics] == [*range(1, 7)]
    result = job("--train-iters", "12", *common, ranks=1, name="run").fail(120)
    assert "prompts that were admitted ahead" in result.log
    assert "--rl-schedule was async, now sync" in result.log
    job("--train-iters", "10", *common, *ASYNC, name="run").dumping().run()  # as far as prompts were admitted
    last = job("--train-iters", "12", *common, ranks=1, name="run").dumping()
    assert [line["iteration"] for line in last.run().metrics] == [*range(1, 13)]
    last.check_trained(48, of_epoch=8)
    nothing_left()
