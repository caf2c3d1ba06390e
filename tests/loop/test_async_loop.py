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
from last_parts import LAST_PART, check_log_probs, dumped

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


@pytest.mark.parametrize("k", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_the_strict_order_is_a_lagged_synchronous_run_bit_by_bit(job, monkeypatch, k: int) -> None:
    """Six rollouts; at k = 0 the oracle is the synchronous schedule as it is."""
    monkeypatch.setenv("LAG", str(k))
    common = ("--train-iters", "12", *SIZES)
    order = (*STRICT, "--rl-max-staleness", str(k))
    strict = job(*common, *ASYNC, *order, ranks=2, name="async").run()
    oracle = job(*common, ranks=1, name="sync", **({"script": LAGGED} if k else {})).run()
    assert numbers(strict) == numbers(oracle)
    assert len({line["reward/mean"] for line in strict.metrics[::2]}) > 1, "rewards that never change show nothing"
    firsts = strict.metrics[::2]
    assert [line["version"] for line in firsts] == [2 * max(0, e - k) for e in range(6)]
    assert [line["lag/max"] for line in firsts] == [min(e, k) for e in range(6)]


@pytest.mark.slow
def test_two_strict_engines_are_two_synchronous_ones_bit_by_bit(job, monkeypatch) -> None:
    """Each samples its part of a rollout, whichever is the faster one."""
    monkeypatch.setenv("LAG", "1")
    common = ("--train-iters", "8", *SIZES)
    order = ("--rl-schedule", "async", "--rl-generators", "2", *STRICT, "--rl-max-staleness", "1")
    strict = job(*common, *order, ranks=4, name="async").run()
    oracle = job(*common, ranks=2, name="sync", script=LAGGED).run()
    assert numbers(strict) == numbers(oracle)
    assert len({line["reward/mean"] for line in strict.metrics[::2]}) > 1, "rewards that never change show nothing"


LAYOUTS = {
    "TP2-to-TP2": ("--tensor-model-parallel-size", "2", "--rl-generate-tp", "2", "--rl-generators", "2"),
    "PP2-to-two-engines": ("--pipeline-model-parallel-size", "2", "--rl-generators", "2"),
    "DP2-to-TP1": ("--rl-generators", "1"),
    "EP2-to-TP2EP2": (
        *("--expert-model-parallel-size", "2", "--rl-generate-tp", "2", "--rl-generate-ep", "2"),
        *("--rl-generators", "2"),
    ),
    "EP2-to-two-that-share-experts": (
        *("--expert-model-parallel-size", "2", "--rl-generate-ep", "2", "--rl-generators", "2"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_of_other_sizes_agree_with_the_trainers(job, nothing_left, moe_model, layout: str) -> None:
    """Without lag each log-prob of the engine is the trainer's; weights are compared by digests."""
    flags = ("--train-iters", "4", *ASYNC, "--rl-max-staleness", "0", "--rl-verify-weights", *LAYOUTS[layout])
    of_experts = {"model": moe_model} if "EP2" in layout else {}
    result = job(*flags, ranks=2 + int(flags[-1]), **of_experts).run()
    result.check_log_probs(4)
    assert all(line["grad_norm"] > 1e-3 for line in result.metrics)
    nothing_left()


@pytest.mark.slow
def test_an_evaluation_has_one_version(job, arithmetic, nothing_left) -> None:
    """Accuracies are those of a synchronous run: greedy answers of the same weights."""
    data = ("--rl-eval-data", str(arithmetic / "heldout.jsonl"), "--rl-eval-every", "2", "--rl-eval-pass-k", "2")
    common = ("--train-iters", "4", "--rl-correction", "truncate", *data)
    apart = job(*common, *ASYNC, *STRICT, "--rl-max-staleness", "0", name="async").run()
    alone = job(*common, ranks=1, name="sync").run()
    names = ("iteration", "eval/accuracy", "eval/reward_mean", "eval/response_length", "eval/pass@1")
    assert [[e[n] for n in names] for e in apart.evaluations] == [[e[n] for n in names] for e in alone.evaluations]
    assert [e["iteration"] for e in apart.evaluations] == [0, 2, 4]
    nothing_left()


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
    names = ["prompt", "answer", "epoch", "group"]
    tables = [pq.read_table(f, columns=names) for f in (job.save / "dump").glob("*.parquet")]
    rows = {row for table in tables for row in zip(*(c.to_pylist() for c in table.columns), strict=True)}
    found = [(e, g) for prompt, answer, e, g in rows if {"prompt": prompt, "answer": answer} in offered]
    assert len(found) == len(offered), found
    return sorted(found)


@pytest.mark.parametrize(
    "moment",
    [
        "in mid-decode",
        *(
            pytest.param(moment, marks=pytest.mark.slow)
            for moment in (
                "in mid-pull",
                "between lease and submit",
                "between put and commit",
                "with new weights half written",
            )
        ),
    ],
)
def test_a_joined_engine_that_is_killed_costs_the_job_nothing(job, joined, nothing_left, moment: str) -> None:
    """Each admitted row is trained once, whoever sampled it, and so is each prompt that a program has offered."""
    running = job("--train-iters", "6", *ASYNC, "--rl-generators", "0", ranks=1).dumping().start()
    with Client(*running.invitation()) as source:
        with pytest.raises(ValueError, match="row 0 has 99 tokens, --rl-max-prompt-length is 16"):
            source.offer([{"prompt": "1" * 99, "answer": ""}])
        offered = [{"prompt": f"{n}*2=", "answer": str(2 * n)} for n in range(6)]
        assert source.offer(offered) == [-1, -2, -3, -4, -5, -6]
    engines = joined(running)
    dying = engines.join(moment)
    assert dying.wait(120) == -signal.SIGKILL, engines.said()[-3000:]
    healthy = engines.join()
    result = running.wait(120)
    assert result.code == 0, result.log[-4000:] + engines.said()[-3000:]
    assert healthy.wait(20) == 0 and "the job has ended" in engines.said()
    assert running.trained() == [(e, g, m) for e in range(6) for g in range(4) for m in range(4)]
    of_offers = places(running, offered)
    first, second = min(of_offers)[0], max(of_offers)[0]
    assert [epoch for epoch, _ in of_offers] == [first] * 4 + [second] * 2 and second == first + 1, "before the data's"
    assert not (running.run_dir / "secret").exists()
    nothing_left()


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
    assert running.trained() == [(e, g, m) for e in range(30) for g in range(4) for m in range(4)]
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
            first = raylets()
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
            for dies in raylets() - first if lost == "node" else engines(address):
                if lost != "one rank of two" or dies.environ().get("RANK") == "1":
                    dies.kill()
            running.until(lambda times=count: watched.read_text().count(ended) == times)
    result, said = running.wait(400), watched.read_text()
    assert (result.code == 0) == (many == 1) and "started again in 1 s" in said, result.log[-4000:] + said[-4000:]
    if many == 1:
        assert running.trained() == [(e, g, m) for e in range(12) for g in range(4) for m in range(4)]
    else:
        assert "given up after 5 times in a row" in said and "Ray runs no engines any more" in result.log
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
    assert "none was for 70 s (--rl-wait-timeout); engines at work: 0" in result.log, result.log[-4000:]
    assert "no place on Ray yet for engine 0: " in (running.run_dir / "engines-on-ray.log").read_text()
    nothing_left()


def raylets() -> set[psutil.Process]:
    return {process for process in psutil.process_iter(["name"]) if process.info["name"] == "raylet"}


def engines(address: str) -> set[psutil.Process]:
    """Of one rank, that joined the job at an address."""
    alive = psutil.process_iter(["cmdline"])
    return {p for p in alive if "generate" in (p.info["cmdline"] or ()) and address in p.info["cmdline"]}


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks_and_the_engines_that_joined(job, joined, nothing_left) -> None:
    """As a shell sends it: to the launcher and all its ranks."""
    running = job("--train-iters", "1000", *ASYNC, cold=True).dumping().start()
    engines = joined(running)
    guest = engines.join()
    running.until(running.rollouts)
    os.killpg(running.processes[0].pid, signal.SIGINT)
    assert "[rl] interrupted in iteration" in running.wait(60).log
    code = guest.wait(60)
    assert code == 0 and "the job has ended" in engines.said(), (code, engines.said()[-3000:])
    assert not (running.run_dir / "secret").exists()
    nothing_left()


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_job_whose_trainer_or_generator_dies_ends(job, joined, nothing_left, rank: int) -> None:
    """Ranks of one launcher fall together; an engine that had joined them ends by itself."""
    running = job("--train-iters", "1000", *ASYNC, ranks=2).dumping().start()
    guest = joined(running).join()
    running.until(running.rollouts)
    running.until("generator rank 1")  # killed while vLLM starts, it leaves a directory
    os.kill(running.rank_pid(rank), signal.SIGKILL)
    assert running.wait(60).code != 0
    assert guest.wait(60) == 1
    assert rank or (running.run_dir / "secret").exists(), "it had no time to remove it"
    nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("engines", [1, 2])
def test_a_strict_run_that_is_resumed_is_the_whole_one_bit_by_bit(job, engines: int) -> None:
    """Three rollouts and three: what was sampled ahead when it stopped is in the checkpoint."""
    common = ("--train-iters", "12", "--save-interval", "6", *SIZES, *ASYNC, *STRICT, "--rl-max-staleness", "1")
    common += ("--rl-generators", str(engines))
    whole = job(*common, name="whole", ranks=2 * engines).run()
    cut = job(*common, name="cut", ranks=2 * engines)
    assert [line["iteration"] for line in cut.stop_at(6).metrics] == [*range(1, 7)]
    rest = cut.run()
    assert [line["iteration"] for line in rest.metrics] == [*range(1, 13)]
    assert numbers(rest) == numbers(whole)


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
    assert last.trained() == [(e, g, m) for e in range(6) for g in range(8) for m in range(4)]
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
    assert last.trained() == [(e, g, m) for e in range(5) for g in range(8) for m in range(4)]
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
    assert last.trained() == [(e, g, m) for e in range(3) for g in range(12) for m in range(4)]


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
    assert last.trained() == [(e, g, m) for e in range(6) for g in range(8) for m in range(4)]
    nothing_left()


def test_a_signal_saves_a_checkpoint_and_ends_all_ranks(job, nothing_left) -> None:
    """torchrun passes SIGTERM to the generators too, whose rows the checkpoint may wait for. Before it a program reads
    what the job does, which is all that a strict order lets it do."""
    running = job("--train-iters", "1000", *ASYNC, *STRICT, "--exit-signal-handler").dumping().start()
    running.until(running.rollouts)
    told = r"\[rl\] programs may observe: address (\S+), secret file (\S+)\n"
    with Client(*re.search(told, running.log_file(0).read_text()).groups()) as program:
        assert program.newest() >= 0 and program.metrics(deadline=60)
        with pytest.raises(ValueError, match="--rl-async-order strict"):
            program.take(1, deadline=0)
    os.kill(running.processes[0].pid, signal.SIGTERM)
    result = running.wait(60)
    assert result.code == 1 and "got signal: 15" in result.log, "what torchrun makes of it, whatever the ranks do"
    assert " stops: " not in result.log, result.log[-3000:]
    state, dock = read_state(str(running.save), read_tracker(str(running.save)))
    epochs = {epoch["number"]: epoch for epoch in dock["epochs"]}
    graded = [epochs[number]["status"]["reward"].tolist() for number, _ in state["loop"]["queue"]]
    assert graded == [[DONE] * 16] * 2, "two rollouts are admitted ahead"
    nothing_left()


def check_longest_first(rows: list[dict], staleness: int) -> None:
    """All rollouts have the same prompts; those go first whose responses were long in the rollout that was the last one
    trained when this one was admitted."""
    lengths: dict[tuple[int, str], list[int]] = {}
    for row in rows:
        lengths.setdefault((row["epoch"], row["prompt"]), []).append(row["response_length"])
    mean = {key: sum(of) / len(of) for key, of in lengths.items()}
    for epoch in range(staleness + 1, rows[-1]["epoch"] + 1):
        before = [mean[epoch - staleness - 1, prompt] for e, prompt in mean if e == epoch]
        assert before == sorted(before, reverse=True) and before[0] > before[-1] + 4, (epoch, before)


@pytest.mark.parametrize(
    "inflight", ["keep", *(pytest.param(i, marks=pytest.mark.slow) for i in ("recompute", "drain"))]
)
def test_new_weights_come_while_responses_are_in_the_making(job, joined, tmp_path, inflight: str) -> None:
    """Where responses go on under newer weights, some have several segments. What a run tells of itself."""
    flags = ("--rl-generators", "0", "--rl-inflight", inflight, "--rl-max-staleness", "2")
    prompts = [{"prompt": f"{number}*2=", "answer": ""} for number in (7, 77, 777, 77777)]  # of 4, 5, 6 and 8 tokens
    (tmp_path / "four.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    flags += (*LAST_PART, "--rl-prompt-data", f"{tmp_path}/four.jsonl")
    running = (
        job("--train-iters", "8", "--rl-max-response-length", "16", "--rl-max-running", "7", *ASYNC, *flags, ranks=1)
        .dumping()
        .start()
    )
    engine = joined(running).join("never, but slow")
    result = running.wait(120)
    assert result.code == 0 and engine.wait(20) == 0, result.log[-3000:]
    segments = [line["segments/mean"] for line in result.metrics]
    assert len(segments) == 8 and (max(segments) > 1) == (inflight != "drain"), segments
    rows = dumped(running)
    check_log_probs(rows, inflight)
    check_longest_first(rows, staleness=2)
    assert max(line["lag/max"] for line in result.metrics) >= 1
    # What the report shows of it.
    apart = read_apart(running.run_dir)
    assert {e["process"] for e in apart if e["stage"].startswith("version ")} == {"weights"}
    assert {"generate", "pull", "pause"} <= {e["stage"] for e in apart}
    begin, end = result.metrics[0]["time"] - 60, result.metrics[-1]["time"] + 60
    assert all(begin < e["start"] <= e["end"] < end for e in apart)
    for name in ("trainers_starved", "engines_back_pressure", "engines_version"):
        assert all(0 <= line.get(f"idle/{name}", 0) <= 1 for line in result.metrics[1:]), name
    assert [line["engines"] for line in result.metrics] == [1.0] * 8
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
