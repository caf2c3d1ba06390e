"""GRPO end to end: layouts, agreement of engine and trainer, resume, crashes, several agents."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mindspeed_rl_plugin.monitor.monitor import TAG

AGREEMENT = 2e-5  # nats, fp32: log-probs of the engine against the trainer's


def check_agreement(result) -> None:
    """Engine and trainer agree after every number of updates that was run."""
    worst = [line["logp_diff/max"] for line in result.metrics]
    assert len(worst) >= 4 and max(worst) < AGREEMENT, worst
    # Weights that never move, and log-probs that are all zero, would agree too.
    assert all(line["groups/informative"] > 0 and line["grad_norm"] > 1e-3 for line in result.metrics)
    assert all(0.1 < line["entropy"] < 10 for line in result.metrics)


def check_first_update(line: dict) -> None:
    """The first update of a rollout starts from the policy that it is compared with."""
    assert line["ratio/mean"] == 1.0 and line["ratio/max"] == 1.0
    assert line["clip_fraction"] == 0.0
    assert line["kl/old"] == 0.0


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("--rl-generate-tp", "1"), id="DP2-to-TP1", marks=pytest.mark.slow),
        pytest.param(("--tensor-model-parallel-size", "2", "--rl-generate-tp", "2"), id="TP2-to-TP2"),
        pytest.param(
            ("--pipeline-model-parallel-size", "2", "--rl-generate-tp", "1"),
            id="PP2-to-TP1",  # the ordinary tier has it in test_dock_loop.py
            marks=pytest.mark.slow,
        ),
        pytest.param(("--rl-generate-tp", "2"), id="DP2-to-TP2", marks=pytest.mark.slow),
        pytest.param(
            ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--rl-generate-tp", "1"),
            id="TP2SP-to-TP1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_engine_and_trainer_agree_after_0_to_3_updates(job, layout):
    result = job("--train-iters", "4", "--rl-verify-weights", *layout).run()
    check_agreement(result)
    for line in result.metrics:
        check_first_update(line)
    assert result.metrics[0]["kl/ref"] < 1e-8
    assert result.metrics[-1]["kl/ref"] > 1e-8, "the reference must stay where RL began"
    assert [line["version"] for line in result.metrics] == [0, 1, 2, 3]
    assert len({line["weights/digest"] for line in result.metrics}) == 4, "every update changes the weights"
    for line in result.metrics:
        assert line["reshard/bytes_sent"] == line["reshard/bytes_received"]
        assert line["reshard/bytes_copied"] + line["reshard/bytes_received"] > 0
    assert "[rl] training starts from random weights" in result.log


CP2 = ("--context-parallel-size", "2")
STAND_IN = Path(__file__).parents[1] / "update" / "ranks"


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--rl-max-tokens-per-microbatch", "48", "--rl-algorithm", "gspo")], ids=len)
def test_context_parallel_ranks_read_the_same_rows_and_agree_with_the_engine(job, more):
    script = Path(__file__).with_name("gathered_script.py")
    common = ("--train-iters", "4", "--rl-verify-weights", *more)
    result = job(*common, *CP2, script=script, path=(STAND_IN,)).run()
    check_agreement(result)
    for line in result.metrics:
        check_first_update(line)
    alone = job(*common, ranks=1, name="alone").run().metrics
    for name in ("loss", "grad_norm", "entropy", "trained/tokens", "reward/mean"):
        assert result.metrics[0][name] == pytest.approx(alone[0][name], rel=1e-4, abs=1e-7), name


def test_rollout_serves_several_steps_and_passes(job):
    more = ("--train-iters", "4", "--rl-rollout-prompts", "8", "--rl-ppo-epochs", "2", "--micro-batch-size", "4")
    result = job(*more, "--lr", "3e-3").run()
    first, second, third, fourth = result.metrics
    check_first_update(first)
    # Later steps of the same rollout train on a policy that has moved.
    assert "reward/mean" in first and "reward/mean" not in second
    assert third["ratio/max"] > 1.0 and third["kl/old"] > 0.0
    assert {"tokens_per_second"} <= fourth.keys() and "tokens_per_second" not in third


def test_resume_equals_the_uninterrupted_run(job):
    """Also in the middle of a rollout, with the reference loaded from the recorded checkpoint."""
    pretrained = job("--train-iters", "1", "--save-interval", "1", name="pretrained").run()
    load = ("--load", str(pretrained.run_dir.parent), "--rl-kl-loss-coef", "0.05", "--lr", "3e-3")
    common = (*load, "--train-iters", "4", "--rl-rollout-prompts", "8", "--save-interval", "3")
    whole = job(*common, name="whole").dumping()
    expected = whole.run()
    cut = job(*common, "--exit-interval", "3", "--no-load-optim", name="cut").dumping()
    cut.run()
    cut.extra = (*cut.extra[: cut.extra.index("--exit-interval")], "--no-load-optim", *cut.extra[-2:])
    actual = cut.run()
    assert "training starts from the weights of" in expected.log
    assert "training resumes from" in actual.log and "reference weights loaded from" in actual.log
    same = ("loss", "kl/ref", "ratio/max", "grad_norm", "entropy")
    assert [[line[k] for k in same] for line in actual.metrics] == [
        [line[k] for k in same] for line in expected.metrics
    ]
    names = [f"rollout-{epoch:06d}.parquet" for epoch in range(2)]
    for name in names:
        one, two = (pq.read_table(j.save / "dump" / name) for j in (whole, cut))
        assert one.equals(two), name


STAGES = ("prompts", "reshard", "generate", "reward", "swap_back", "logp_old", "logp_ref", "advantage")


@pytest.mark.parametrize("after", [s if s == "reshard" else pytest.param(s, marks=pytest.mark.slow) for s in STAGES])
def test_killed_rank_ends_the_job_and_restart_continues(job, after):
    """Kill -9 as soon as a stage has ended, so in the middle of the next one, the update included; old log-probs by
    default, which needs no pass for them where a rollout makes one step."""
    asked = ("--rl-old-logprobs", "pass" if after == "logp_old" else "auto")
    crashed = job("--train-iters", "6", "--save-interval", "2", "--rl-rollout-prompts", "4", *asked)
    crashed.start()
    events = crashed.run_dir / "events-rank1.jsonl"
    deadline = time.monotonic() + 200
    wanted = f'"iteration": 3, "stage": "{after}"'
    while not (events.exists() and wanted in events.read_text()):
        assert time.monotonic() < deadline and crashed.processes[0].poll() is None, "iteration 3 was not reached"
        time.sleep(0.02)
    os.kill(crashed.rank_pid(1), signal.SIGKILL)
    result = crashed.wait(60)
    assert result.code != 0 and "Signal 9 (SIGKILL)" in result.log
    again = crashed.run()
    assert "training resumes from" in again.log
    assert [line["iteration"] for line in again.metrics] == [1, 2, 3, 4, 5, 6]
    passes = ["seconds/logp_old" in line for line in again.metrics]
    assert passes == [after == "logp_old"] * 6 and {line["ratio/max"] for line in again.metrics} == {1.0}


# Runs pretrain_gpt.py; the first time, a rank kills itself where `patch` calls `die`.
KILLED = """
import os, runpy, signal

def die():
    if not os.path.exists({mark!r}):
        open({mark!r}, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

{patch}
runpy.run_path({script!r}, run_name="__main__")
"""
# Rank 0 writes the model: the file of iteration 4 is torn. Rank 1 leaves the third evaluation, after iteration 4.
INSIDE = {
    "save": """
import torch
original = torch.save

def save(value, file, *args, **named):
    original(value, file, *args, **named)
    path = str(getattr(file, "name", file))
    if "iter_0000004" in path and path.endswith("model_optim_rng.pt"):
        os.truncate(path, os.path.getsize(path) // 2)
        die()

torch.save = save
""",
    "evaluate": """
from mindspeed_rl_plugin.stages import measure as reporting
original, calls = reporting.evaluate, []

def evaluate(*args, **named):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 3:
        die()
    return original(*args, **named)

reporting.evaluate = evaluate
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", INSIDE)
def test_killed_inside_a_checkpoint_or_an_evaluation_and_restarted(job, arithmetic, tmp_path, stage):
    script, mark = tmp_path / "killed.py", tmp_path / "mark"
    pretrain = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"
    script.write_text(KILLED.format(mark=str(mark), patch=INSIDE[stage], script=str(pretrain)))
    evaluated = ("--rl-eval-data", str(arithmetic / "heldout.jsonl"), "--rl-eval-every", "2")
    crashed = job("--train-iters", "6", "--save-interval", "2", *evaluated, script=script)
    crashed.start()
    result = crashed.wait(240)
    assert mark.exists() and result.code != 0 and "Signal 9 (SIGKILL)" in result.log
    tracker = crashed.save / "latest_checkpointed_iteration.txt"
    if stage == "save":
        assert (crashed.save / "iter_0000004").exists() and tracker.read_text().strip() == "2"
    again = crashed.run()
    assert "training resumes from" in again.log
    assert [line["iteration"] for line in again.metrics] == [1, 2, 3, 4, 5, 6]
    assert [line["iteration"] for line in again.evaluations] == [0, 2, 4, 6]


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard would show of a folder: tag -> step -> value."""
    events = EventAccumulator(str(folder)).Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


@pytest.mark.slow
def test_two_agents_train_as_one(job):
    """--nnodes 2 on one machine: RANK and LOCAL_RANK differ."""
    common = ("--train-iters", "2", "--lr", "3e-3")
    one = job(*common, name="one").run()
    two = job(*common, name="two", ranks=1, agents=2).run()
    same = ("loss", "reward/mean", "entropy", "grad_norm", "kl/ref")
    assert [[line[k] for k in same] for line in one.metrics] == [[line[k] for k in same] for line in two.metrics]


@pytest.mark.slow
def test_evaluation_runs_before_every_n_and_after(job, arithmetic, tmp_path):
    more = ("--train-iters", "3", "--rl-eval-data", str(arithmetic / "heldout.jsonl"), "--rl-eval-every", "2")
    more += ("--rl-eval-pass-k", "4", "--rl-rollout-prompts", "16", "--tensorboard-dir", str(tmp_path / "board"))
    result = job(*more).run()
    assert [line["iteration"] for line in result.evaluations] == [0, 2, 3]
    for line in result.evaluations:
        assert 0.0 <= line["eval/accuracy"] <= 1.0 and line["eval/pass@1"] <= line["eval/pass@4"] <= 1.0
    # The first comes with a rollout, the second wakes the engine for itself alone.
    assert "seconds/reshard" in result.metrics[0] and "seconds/evaluate" in result.metrics[0]
    assert "seconds/reshard" not in result.metrics[2] and "seconds/evaluate" in result.metrics[2]
    assert "process on the host" in json.loads((result.run_dir / "run.json").read_text())["memory"]
    # TensorBoard has the same numbers: each metric at the iterations that measured it.
    board = scalars(tmp_path / "board")
    for name in ("reward/mean", "loss", "grad_norm", "logp_diff/max", "seconds/generate"):
        want = {line["iteration"]: line[name] for line in result.metrics if name in line}
        assert want and board[TAG + name] == pytest.approx(want), name
    want = {line["iteration"]: line["eval/accuracy"] for line in result.evaluations}
    assert board[TAG + "eval/accuracy"] == pytest.approx(want)


def test_failing_grader_stops_the_job_with_its_prompt(job, arithmetic, tmp_path):
    grader = tmp_path / "grader.py"
    grader.write_text("def grade(prompt, response, answer):\n    raise RuntimeError('no such unit')\n")
    broken = job("--train-iters", "2", "--rl-reward", f"{grader}:grade")
    broken.start()
    result = broken.wait(120)
    assert result.code != 0 and "reward 'grade' raised RuntimeError: no such unit" in result.log
    prompts = {json.loads(line)["prompt"] for line in (arithmetic / "prompts.jsonl").read_text().splitlines()}
    said = re.findall(r"on sample \(0, \d+, \d+\), prompt '([^']*)', response '", result.log)
    assert said and set(said) <= prompts


def test_dropped_groups_train_nowhere_and_are_counted(job, tmp_path):
    """A grader that fails for some prompts: their groups leave the loss, the rest is trained on. Where it fails for
    all of them, the next prompts are drawn instead: no optimizer step runs on nothing."""
    grader, calls = tmp_path / "grader.py", tmp_path / "calls"
    grader.write_text(
        "def grade(prompt, response, answer):\n"
        f"    with open({str(calls)!r}, 'a') as file:\n"
        "        file.write('.')\n"
        "        file.flush()\n"
        "        assert file.tell() > 32, 'all of the first rollout'\n"
        "    assert int(prompt.split('*')[0]) % 2, 'an even number'\n"
        "    return sum(map(ord, response)) % 5 / 4\n"
    )
    calls.write_text("")
    more = ("--train-iters", "2", "--rl-rollout-prompts", "8", "--rl-reward", f"{grader}:grade")
    result = job(*more, "--rl-reward-on-error", "drop").run()
    first, second = result.metrics
    assert 0 < first["groups/dropped"] < 1 and second.get("reward/errors") is None
    assert first["reward/errors"] == 32 + 32 * first["groups/dropped"], "those of the dropped rollout too"
    assert first["trained/sequences"] + second["trained/sequences"] == 32 * (1 - first["groups/dropped"])
    assert first["reward/mean"] > 0.2, "failed grades must not count as zero"
    dropped = "rollout 0 is dropped: graders failed in 8 of 8 groups, so 2 optimizer steps of it would train on nothing"
    assert result.log.count("is dropped") == 1 and dropped in result.log
    assert result.log.count("a grader failed, for the first time in this rollout: reward 'grade'") == 1


@pytest.mark.slow
def test_resume_may_leave_the_reference_behind(job):
    """What the error about a lost reference recommends: --rl-kl-loss-coef 0, in the middle of a rollout too."""
    first = job("--train-iters", "2", "--rl-rollout-prompts", "8", "--save-interval", "1", "--exit-interval", "1")
    first.run()
    first.extra = (*first.extra[:-2], "--rl-kl-loss-coef", "0")
    again = first.run()
    assert [line["iteration"] for line in again.metrics] == [1, 2]
    assert "kl/ref" in again.metrics[0] and "reference weights loaded" not in again.log
