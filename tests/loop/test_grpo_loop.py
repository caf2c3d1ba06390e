"""GRPO end to end: layouts, agreement of engine and trainer, resume, crashes, several agents."""

from __future__ import annotations

import os
import signal
import time

import pyarrow.parquet as pq
import pytest

AGREEMENT = 2e-5  # nats, fp32: log-probs of the engine against the trainer's


def check_agreement(result) -> None:
    """Engine and trainer agree after every number of updates that was run."""
    worst = [line["logp_diff/max"] for line in result.metrics]
    assert len(worst) >= 4 and max(worst) < AGREEMENT, worst
    # Weights that never move, and log-probs that are all zero, would agree too.
    assert all(line["groups/mixed"] > 0 and line["grad_norm"] > 1e-3 for line in result.metrics)
    assert all(0.1 < line["entropy"] < 10 for line in result.metrics)


def check_first_update(line: dict) -> None:
    """The first update of a rollout starts from the policy that it is compared with."""
    assert line["ratio/mean"] == 1.0 and line["ratio/max"] == 1.0
    assert line["clip_fraction"] == 0.0
    assert line["kl/old"] == 0.0


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("--rl-generate-tp", "1"), id="DP2-to-TP1"),
        pytest.param(("--tensor-model-parallel-size", "2", "--rl-generate-tp", "2"), id="TP2-to-TP2"),
        pytest.param(("--pipeline-model-parallel-size", "2", "--rl-generate-tp", "1"), id="PP2-to-TP1"),
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
    assert "[rl] training starts from random weights" in result.log


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
    """Kill -9 as soon as a stage has ended, so in the middle of the next one, the update included."""
    crashed = job("--train-iters", "6", "--save-interval", "2", "--rl-rollout-prompts", "4")
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


def test_two_agents_train_as_one(job):
    """--nnodes 2 on one machine: RANK and LOCAL_RANK differ."""
    common = ("--train-iters", "2", "--lr", "3e-3")
    one = job(*common, name="one").run()
    two = job(*common, name="two", ranks=1, agents=2).run()
    same = ("loss", "reward/mean", "entropy", "grad_norm", "kl/ref")
    assert [[line[k] for k in same] for line in one.metrics] == [[line[k] for k in same] for line in two.metrics]


def test_evaluation_runs_before_every_n_and_after(job, arithmetic):
    more = ("--train-iters", "3", "--rl-eval-data", str(arithmetic / "heldout.jsonl"), "--rl-eval-every", "2")
    result = job(*more, "--rl-eval-pass-k", "4").run()
    assert [line["iteration"] for line in result.evaluations] == [0, 2, 3]
    for line in result.evaluations:
        assert 0.0 <= line["eval/accuracy"] <= 1.0 and line["eval/pass@1"] <= line["eval/pass@4"] <= 1.0


def test_failing_grader_stops_the_job_with_its_prompt(job, tmp_path):
    grader = tmp_path / "grader.py"
    grader.write_text("def grade(prompt, response, answer):\n    raise RuntimeError('no such unit')\n")
    broken = job("--train-iters", "2", "--rl-reward", f"{grader}:grade")
    broken.start()
    result = broken.wait(120)
    assert result.code != 0 and "no such unit" in result.log


def test_dropped_groups_train_nowhere_and_are_counted(job, tmp_path):
    """A grader that fails for some prompts: their groups leave the loss, the rest is trained on."""
    grader = tmp_path / "grader.py"
    grader.write_text(
        "def grade(prompt, response, answer):\n"
        "    assert int(prompt.split('*')[0]) % 2, 'an even number'\n"
        "    return sum(map(ord, response)) % 5 / 4\n"
    )
    more = ("--train-iters", "2", "--rl-rollout-prompts", "8", "--rl-reward", f"{grader}:grade")
    result = job(*more, "--rl-reward-on-error", "drop").run()
    first, second = result.metrics
    assert 0 < first["groups/dropped"] < 1 and first["reward/errors"] == 32 * first["groups/dropped"]
    assert first["trained/sequences"] + second["trained/sequences"] == 32 * (1 - first["groups/dropped"])
    assert first["reward/mean"] > 0.2, "failed grades must not count as zero"


def test_resume_may_leave_the_reference_behind(job):
    """What the error about a lost reference recommends: --rl-kl-loss-coef 0, in the middle of a rollout too."""
    first = job("--train-iters", "2", "--rl-rollout-prompts", "8", "--save-interval", "1", "--exit-interval", "1")
    first.run()
    first.extra = (*first.extra[:-2], "--rl-kl-loss-coef", "0")
    again = first.run()
    assert [line["iteration"] for line in again.metrics] == [1, 2]
    assert "kl/ref" in again.metrics[0] and "reference weights loaded" not in again.log
