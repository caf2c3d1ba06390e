"""Runs that stop and go on: by a kill, in the middle of a rollout, inside a checkpoint or an evaluation.

One DAPO job is read by most tests: two optimizer steps per pass, two passes per rollout, groups deferred from the
first rollout to the second, evaluation, and a reference that was loaded. Another is the same, killed and restarted.
"""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mindspeed_rl_plugin.monitor.monitor import METRIC_PREFIX

# Even numbers earn the same whatever the response, so about half of all groups carry no signal.
GRADER = """
def grade(prompt, response, answer):
    return sum(map(ord, response)) % 5 / 4 if int(prompt.split('*')[0]) % 2 else 1.0
"""
FAILING = """
def grade(prompt, response, answer):
    with open({calls!r}, 'a') as file:
        file.write('.')
        file.flush()
        assert file.tell() > 34, "tried by each of two ranks, then all of the first rollout"
    assert int(prompt.split('*')[0]) % 2, 'an even number'
    return sum(map(ord, response)) % 5 / 4
"""
ROLLOUT = 8  # prompts of four responses; a step takes 16 responses
SAME = ("loss", "kl/ref", "ratio/max", "grad_norm", "entropy", "trained/tokens")


def dapo(folder: Path, *more: str) -> tuple[str, ...]:
    grader = folder / "grader.py"
    grader.write_text(GRADER)
    sizes = ("--rl-rollout-prompts", str(ROLLOUT), "--rl-overlong-buffer", "4", "--micro-batch-size", "4")
    return ("--rl-algorithm", "dapo", "--rl-reward", f"{grader}:grade", "--lr", "3e-3", *sizes, *more)


@pytest.fixture(scope="module")
def pretrained(shared_job, tmp_path_factory):
    """A GRPO job whose grader fails for even numbers, and for all of the first rollout, and its result."""
    folder = tmp_path_factory.mktemp("failing")
    (folder / "grader.py").write_text(FAILING.format(calls=str(folder / "calls")))
    graded = ("--rl-reward", f"{folder / 'grader.py'}:grade", "--rl-reward-on-error", "drop")
    made = shared_job("--train-iters", "2", "--rl-rollout-prompts", str(ROLLOUT), *graded, name="pretrained")
    return made, made.run()


@pytest.fixture(scope="module")
def options(pretrained, arithmetic, tmp_path_factory) -> tuple[str, ...]:
    """Flags of the shared jobs: eight iterations, two rollouts."""
    steps = ("--train-iters", "8", "--rl-ppo-epochs", "2", "--save-interval", "3", "--rl-old-logprobs", "auto")
    reference = ("--load", str(pretrained[0].save), "--rl-kl-loss-coef", "0.05")
    held_out = ("--rl-eval-data", str(arithmetic / "heldout.jsonl"), "--rl-eval-every", "2", "--rl-eval-pass-k", "4")
    return dapo(tmp_path_factory.mktemp("dapo"), *steps, *reference, *held_out)


@pytest.fixture(scope="module")
def whole(shared_job, options, tmp_path_factory):
    """The job, finished without a stop, and its result."""
    board = ("--tensorboard-dir", str(tmp_path_factory.mktemp("board")))
    made = shared_job(*options, *board, name="whole").dumping()
    return made, made.run()


def check_rollouts(run, result, epochs: int) -> list[dict]:
    """From metrics and dumps: groups without signal are trained nowhere, the others exactly once; none is lost."""
    rollouts = [line for line in result.metrics if "sampling/rounds" in line]
    resumed, trained = 0.0, []
    for line in rollouts:
        signal = round(line["sampling/informative"] * line["sampling/groups_drawn"])
        assert line["sampling/groups_drawn"] == ROLLOUT * line["sampling/rounds"]
        assert line["sampling/brought"] == resumed and line["sampling/filled"] == line["groups/dropped"] == 0.0
        assert resumed + signal == ROLLOUT + line["sampling/carried"]
        assert line["groups/informative"] == 1.0 > line["sampling/informative"] > 0.0
        resumed = line["sampling/carried"]
    dumps = sorted((run.save / "dump").glob("*.parquet"))
    assert len(dumps) == len(rollouts) == epochs
    for path in dumps:
        rows = pq.read_table(path).to_pylist()
        assert len(rows) == 4 * ROLLOUT and all(int(row["prompt"].split("*")[0]) % 2 for row in rows)
        assert {row["iteration"] - 1 for row in rows} == {int(path.stem.removeprefix("rollout-"))}
        trained += sorted({(row["epoch"], row["group"]) for row in rows})
    assert len(set(trained)) == len(trained) and trained == sorted(trained), "each group once, oldest first"
    return rollouts


def numbers(lines: list[dict], names: tuple[str, ...]) -> list[list[float]]:
    return [[line[name] for name in names] for line in lines]


def check_the_same(resumed, result, whole) -> None:
    """A run that was stopped trained, evaluated and dumped what the uninterrupted run did."""
    assert "training resumes from" in result.log and "reference weights loaded from" in result.log
    assert numbers(result.metrics, SAME) == numbers(whole[1].metrics, SAME)
    held_out = ("iteration", "eval/accuracy", "eval/pass@4")
    assert numbers(result.evaluations, held_out) == numbers(whole[1].evaluations, held_out)
    for path in (whole[0].save / "dump").glob("*.parquet"):
        assert pq.read_table(path).equals(pq.read_table(resumed.save / "dump" / path.name)), path.name


def test_dropped_groups_train_nowhere_and_are_counted(pretrained):
    """Where graders fail, a group leaves the loss, the rest is trained on. Where they fail for all of a rollout, the
    next prompts are sampled instead: no optimizer step runs on nothing."""
    log, (first, second) = pretrained[1].log, pretrained[1].metrics
    assert 0 < first["groups/dropped"] < 1 and second.get("reward/errors") is None
    assert first["reward/errors"] == 32 + 32 * first["groups/dropped"], "those of the dropped rollout too"
    assert first["trained/sequences"] + second["trained/sequences"] == 32 * (1 - first["groups/dropped"])
    assert first["reward/mean"] > 0.2, "failed grades must not count as zero"
    assert log.count("rollout 0 is dropped: graders failed in 8 of 8 groups") == log.count("is dropped") == 1
    assert log.count("a grader failed, for the first time in this rollout: reward 'grade'") == 1


def test_surplus_groups_are_trained_in_the_next_rollout(whole):
    run, result = whole
    first, second = check_rollouts(run, result, epochs=2)
    assert first["sampling/rounds"] > 1, "one round cannot fill a rollout here"
    assert second["sampling/brought"] > 0, "choose other prompts: nothing was deferred"


def test_a_rollout_serves_several_steps_and_passes(whole):
    lines = whole[1].metrics
    assert [line["iteration"] for line in lines] == list(range(1, 9))
    for start in (0, 4):
        first, second, third, fourth = lines[start : start + 4]
        assert first["ratio/mean"] == first["ratio/max"] == 1.0 and first["clip_fraction"] == first["kl/old"] == 0.0
        # Later steps of the same rollout train on a policy that has moved.
        assert "reward/mean" in first and "reward/mean" not in second
        assert third["ratio/max"] > 1.0 and third["kl/old"] > 0.0
        assert "tokens_per_second" in fourth and "tokens_per_second" not in third
        assert "seconds/logp_old" in first, "later steps read what a pass of their own computed"
    assert "training starts from the weights of" in whole[1].log


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard would show of a folder: tag -> step -> value."""
    events = EventAccumulator(str(folder)).Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_evaluation_runs_before_every_n_and_after(whole):
    run, result = whole
    assert [line["iteration"] for line in result.evaluations] == [0, 2, 4, 6, 8]
    for line in result.evaluations:
        assert 0.0 <= line["eval/accuracy"] <= 1.0 and line["eval/pass@1"] <= line["eval/pass@4"] <= 1.0
    # The first comes with a rollout, the second wakes the engine for itself alone.
    first, _, third, *_ = result.metrics
    assert "seconds/reshard" in first and "seconds/evaluate" in first
    assert "seconds/reshard" not in third and "seconds/evaluate" in third
    assert "process on the host" in json.loads((result.run_dir / "run.json").read_text())["memory"]
    # TensorBoard has the same numbers: each metric at the iterations that measured it.
    board = scalars(Path(run.extra[run.extra.index("--tensorboard-dir") + 1]))
    for name in ("reward/mean", "loss", "grad_norm", "logp_diff/max", "seconds/generate"):
        want = {line["iteration"]: line[name] for line in result.metrics if name in line}
        assert want and board[METRIC_PREFIX + name] == pytest.approx(want), name
    want = {line["iteration"]: line["eval/accuracy"] for line in result.evaluations}
    assert board[METRIC_PREFIX + "eval/accuracy"] == pytest.approx(want)


def test_a_killed_rank_ends_the_job_and_a_restart_equals_the_uninterrupted_run(shared_job, options, whole):
    """Kill -9 in the second rollout's generation; the last checkpoint lies in the middle of the first rollout."""
    killed = shared_job(*options, name="killed").dumping()
    assert "Signal 9 (SIGKILL)" in killed.kill_after(5, "reshard").log
    killed.extra = (*killed.extra, "--no-load-optim")  # of a resume, the optimizer is always loaded
    result = killed.run()
    check_rollouts(killed, result, epochs=2)
    check_the_same(killed, result, whole)


@pytest.mark.slow
def test_resume_at_the_end_of_a_rollout(shared_job, options, whole):
    """With deferred groups in the dock and nothing else."""
    cut = shared_job(*options, name="cut").dumping()
    cut.stop_at(4)
    check_the_same(cut, cut.run(), whole)


STAGES = ("prompts", "reshard", "generate", "reward", "swap_back", "logp_old", "logp_ref", "advantage")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_after_each_stage_and_restarted(job):
    """One job, killed in each of its starts, two iterations after the other; the kill is in the middle of the next
    stage, the update included."""
    crashed = job("--train-iters", "18", "--save-interval", "2", "--rl-rollout-prompts", "4")
    for i, stage in enumerate(STAGES):
        assert crashed.kill_after(2 * i + 3, stage).log.count("Signal 9 (SIGKILL)") > i
    again = crashed.run()
    assert again.log.count("training resumes from") >= len(STAGES)
    assert [line["iteration"] for line in again.metrics] == list(range(1, 19))
    assert {line["ratio/max"] for line in again.metrics} == {1.0}


# Runs pretrain_gpt.py; once, a rank kills itself where `patch` calls `die`.
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
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine
original = VllmEngine.submit

def submit(self, requests):
    evaluation = any(request.id.epoch < 0 for request in requests)
    if evaluation and os.environ["RANK"] == "1" and self.version == 4:
        die()
    return original(self, requests)

VllmEngine.submit = submit
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
    result = crashed.fail()
    assert mark.exists() and "Signal 9 (SIGKILL)" in result.log
    if stage == "save":
        assert (crashed.save / "iter_0000004").exists()
        assert (crashed.save / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    again = crashed.run()
    assert "training resumes from" in again.log
    assert [line["iteration"] for line in again.metrics] == [1, 2, 3, 4, 5, 6]
    assert [line["iteration"] for line in again.evaluations] == [0, 2, 4, 6]


@pytest.mark.slow
def test_resume_may_leave_the_reference_behind(job):
    """What the error about a lost reference recommends: --rl-kl-loss-coef 0, in the middle of a rollout too."""
    first = job("--train-iters", "2", "--rl-rollout-prompts", "8", "--save-interval", "1")
    first.stop_at(1)
    first.extra = (*first.extra, "--rl-kl-loss-coef", "0")
    again = first.run()
    assert [line["iteration"] for line in again.metrics] == [1, 2]
    assert "kl/ref" in again.metrics[0] and "reference weights loaded" not in again.log


@pytest.mark.slow
def test_after_the_last_round_groups_without_signal_fill_up_or_end_the_run(job, tmp_path):
    few = dapo(tmp_path, "--train-iters", "2", "--rl-dynamic-sampling-rounds", "1")
    (first, second) = job(*few, name="few").run().metrics
    assert first["sampling/filled"] == 8 * first["groups/dropped"] > 0
    kept = 32 * (1 - first["groups/dropped"])
    assert first["trained/sequences"] + second["trained/sequences"] == kept, "those that fill up count nowhere"
    (tmp_path / "same.py").write_text("def grade(prompt, response, answer):\n    return 1.0\n")
    result = job(*few, "--rl-reward", f"{tmp_path / 'same.py'}:grade", name="none").fail(120)
    assert "--rl-dynamic-sampling-rounds 1: rewards differ in 0 of the 8 groups" in result.log
