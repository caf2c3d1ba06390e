"""How a job ends that one rank fails or somebody kills: soon, with the message of the error, with nothing left behind.

That nothing is left of a job that ends well is asserted in test_agreement.py.
"""

import json
import re
import signal
import time
from pathlib import Path

import pytest

DEADLINE = 60.0  # seconds from the error on one rank to the end of the job
PRETRAIN = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"

# Fails for one prompt, so on the one rank that grades its responses.
GRADER = """
import time

def grade(prompt, response, answer):
    if prompt == {prompt!r}:
        open({mark!r}, "w").close()
        raise RuntimeError("no such unit")
    return sum(map(ord, response)) % 5 / 4
"""

# Runs pretrain_gpt.py; in iteration 2, the named step fails on rank 1.
FAILING = """
import os, runpy
import torch
from megatron.core.models.gpt import GPTModel
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine

version = -1

def failing(owner, name, step):
    original = getattr(owner, name)

    def method(self, *args, **named):
        global version
        if name == "update_weights":
            version = args[0]
        elif os.environ["RANK"] == "1" and version == 1 and step() == {step!r}:
            open({mark!r}, "w").close()
            raise RuntimeError("disk of rank 1 is full")
        return original(self, *args, **named)

    setattr(owner, name, method)

failing(VllmEngine, "update_weights", lambda: None)
failing(VllmEngine, "submit", lambda: "generate")
failing(GPTModel, "forward", lambda: "update" if torch.is_grad_enabled() else "log-probs")
runpy.run_path({script!r}, run_name="__main__")
"""

# Engines that share experts: rank 1 has responses of one token and then steps along, rank 0 long ones in slow steps.
EXPERTS = ("--expert-model-parallel-size", "2", "--rl-generate-ep", "2", "--rl-schedule", "streamed")
UNEQUAL = """
import dataclasses, os, runpy, time
from mindspeed_rl_plugin.engine.expert_group import ExpertGroup
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine

rank = int(os.environ["RANK"])
any_works, keep_step, submit = ExpertGroup.any_works, VllmEngine.keep_step, VllmEngine.submit

def limited(request):
    sampling = dataclasses.replace(request.sampling, max_tokens=1 if rank else 8, ignore_eos=True)
    return dataclasses.replace(request, sampling=sampling)

def slow(group, works):
    time.sleep(0 if rank else 0.1)
    return any_works(group, works)

def finished(engine):
    open({mark!r} + str(rank), "w").close()
    keep_step(engine)

ExpertGroup.any_works, VllmEngine.keep_step = slow, finished
VllmEngine.submit = lambda engine, requests: submit(engine, [limited(request) for request in requests])
runpy.run_path({script!r}, run_name="__main__")
"""
FAILS_THEN = """
import os

def grade(response):
    if os.environ["RANK"] == "1" and os.path.exists({mark!r} + "1"):
        open({mark!r}, "w").close()
        raise RuntimeError("no such unit")
    return sum(map(ord, response)) % 5 / 4
"""


def log_of_the_end(job, mark: Path) -> str:
    """Of a job that has to end with an error, and soon after the mark was made."""
    log = job.fail().log
    took = time.time() - mark.stat().st_mtime
    assert took < DEADLINE, f"{took:.0f} s"
    return log


@pytest.mark.parametrize(
    "schedule", ["sync", *(pytest.param(s, marks=pytest.mark.slow) for s in ("streamed", "streamed, experts shared"))]
)
def test_a_failing_grader_ends_the_job(job, nothing_left, arithmetic, dense_model, moe_model, tmp_path, schedule):
    """It fails on one rank: the other, which waits for it, is ended by torchrun."""
    second = (arithmetic / "prompts.jsonl").read_text().splitlines()[1]  # the first row is tried at the start
    prompt = json.loads(second)["prompt"]
    grader, mark = tmp_path / "grader.py", tmp_path / "failed"
    grader.write_text(GRADER.format(prompt=prompt, mark=str(mark)))
    shared = "experts" in schedule
    layout = EXPERTS if shared else ("--rl-generate-tp", "2", "--rl-schedule", schedule)
    whole = ("--rl-rollout-prompts", "64", "--rl-samples-per-prompt", "2", "--rl-wait-timeout", "600")  # all prompts
    model = moe_model if shared else dense_model
    failing = job("--train-iters", "8", "--rl-reward", f"{grader}:grade", *whole, *layout, model=model)
    log = log_of_the_end(failing, mark)
    assert "reward 'grade' raised RuntimeError: no such unit" in log
    assert set(re.findall(r"on rollout 0, prompt \d+, response \d+: prompt '([^']*)', response '", log)) == {prompt}
    assert len(set(re.findall(r"\[rank(\d)\].*no such unit", log))) == 1, "torch names the rank in its traceback"
    nothing_left()


@pytest.mark.slow
def test_a_rank_that_steps_along_sees_a_failure_at_the_end_of_the_others(job, nothing_left, moe_model, tmp_path):
    script, grader, mark = tmp_path / "unequal.py", tmp_path / "grader.py", tmp_path / "mark"
    script.write_text(UNEQUAL.format(mark=str(mark), script=str(PRETRAIN)))
    grader.write_text(FAILS_THEN.format(mark=str(mark)))
    flags = ("--train-iters", "8", "--rl-reward", f"{grader}:grade", "--rl-wait-timeout", "600", *EXPERTS)
    log = log_of_the_end(job(*flags, model=moe_model, script=script, cold=True), mark)
    said = r"^\[rl\] rank 1 stops: .*reward 'grade' raised RuntimeError: no such unit"
    assert re.search(said, log, re.M), log[-3000:]
    finished = Path(f"{mark}0").stat().st_mtime
    assert Path(f"{mark}1").stat().st_mtime < mark.stat().st_mtime < finished, "it failed while rank 0 generated"
    nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("step", ["generate", "log-probs", "update"])
def test_an_error_on_one_rank_ends_the_job_with_its_message(job, nothing_left, tmp_path, step):
    script, mark = tmp_path / "failing.py", tmp_path / "failed"
    failing = job("--train-iters", "3", "--rl-generate-tp", "2", "--rl-wait-timeout", "600", script=script, cold=True)
    script.write_text(FAILING.format(step=step, mark=str(mark), script=str(PRETRAIN)))
    log = log_of_the_end(failing, mark)
    assert "RuntimeError: disk of rank 1 is full" in log and "[rank1]" in log
    nothing_left()


@pytest.mark.slow
def test_one_save_has_one_job_and_torchrun_takes_its_ranks_along(job, nothing_left):
    """A second job is refused; killed, the first leaves a save that the same command takes over at once."""
    first, second = (job("--train-iters", "1000", "--save-interval", "1", cold=True) for _ in range(2))
    first.start()
    first.until("successfully saved checkpoint")
    second.start()
    refused = second.wait(240)
    assert refused.code == 1 and "belongs to a job, process" in refused.log, refused.log[-3000:]
    first.processes[0].kill()
    first.processes[0].wait()
    first.start()
    first.until("is gone; this job takes it over")
    first.until("training resumes from")
    first.processes[0].terminate()
    assert first.wait(60).code != 0
    nothing_left()


@pytest.mark.slow
def test_an_empty_tracker_is_written_anew_and_the_job_goes_on(job):
    run = job("--train-iters", "2")
    run.run()
    tracker = run.save / "latest_checkpointed_iteration.txt"
    tracker.write_text("")
    run.extra = ("--train-iters", "3")
    log = run.run().log
    assert "this run uses iteration 2, the newest" in log and "at iteration 2, opt" in log
    assert tracker.read_text() == "3"


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "how"), [(None, "SIGINT"), (1, "SIGKILL")])
def test_a_job_that_is_killed_while_threads_grade_leaves_nothing_behind(job, nothing_left, tmp_path, rank, how):
    grader = tmp_path / "grader.py"
    grader.write_text(
        "import time\ndef grade(response, answer):\n    return time.sleep(9 * (response != answer)) or 1.0"
    )
    flags = ("--rl-reward", f"{grader}:grade", "--rl-schedule", "streamed", "--rl-reward-workers", "2")
    killed = job("--train-iters", "3", *flags, cold=True)
    log = killed.kill_after(1, "generate", rank=rank, how=getattr(signal, how)).log
    assert rank or "[rl] interrupted in iteration 1" in log
    nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "how"), [(None, "SIGTERM"), (None, "SIGINT"), (0, "SIGKILL")])
def test_a_job_that_is_killed_leaves_nothing_behind(job, nothing_left, rank, how):
    """SIGTERM and SIGINT come to the launcher, which passes them on."""
    killed = job("--train-iters", "50", "--rl-generate-tp", "2", cold=True)
    log = killed.kill_after(2, "reshard", rank=rank, how=getattr(signal, how)).log
    if how == "SIGINT":
        assert log.count("[rl] interrupted in iteration 2") == 1 and "]: Traceback" not in log
    nothing_left()


# Runs pretrain_gpt.py until iteration 3, in which rank 1 writes a NaN into a weight after the update.
BROKEN = """
import os, runpy
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
forward, models, steps = GPTModel.forward, [], []
step = DistributedOptimizer.step_with_ready_grads

def remember(self, *args, **named):
    models[:] = [self]
    return forward(self, *args, **named)

def breaking(self):
    steps.append(step(self))
    if len(steps) == 3 and os.environ["RANK"] == "1":
        dict(models[0].named_parameters())["decoder.layers.1.mlp.linear_fc2.weight"].data[3, 4] = float("nan")
    return steps[-1]

GPTModel.forward, DistributedOptimizer.step_with_ready_grads = remember, breaking
runpy.run_path({script!r}, run_name="__main__")
"""
# Rollouts of two optimizer steps, of which the second is followed by a publication.
APART = ("--rl-schedule", "async", "--rl-generators", "1", "--rl-correction", "truncate", "--rl-rollout-prompts", "8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saves", "flags"),
    [("2", ()), ("3", ()), ("3", APART)],
    ids=["found by the reshard", "found by the checkpoint", "found by a checkpoint between two publications"],
)
def test_a_weight_that_is_no_number_ends_the_run_before_the_engine_and_before_a_checkpoint(job, tmp_path, saves, flags):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(script=str(PRETRAIN)))
    common = ("--train-iters", "6", "--save-interval", saves, "--tensor-model-parallel-size", "2", *flags)
    broken = job(*common, script=script, ranks=3 if flags else 2)
    result = broken.fail()
    when = "after 3 updates" if saves == "2" else "before a checkpoint"
    message = f"decoder.layers.1.mlp.linear_fc2.weight of trainer rank 1 holds NaN or infinity {when}"
    assert message in result.log and "model.layers.1.mlp.down_proj.weight [64, 128)" in result.log
    tracker = broken.save / "latest_checkpointed_iteration.txt"
    assert (tracker.read_text().strip() if tracker.exists() else None) == ("2" if saves == "2" else None)
    assert not (broken.save / "iter_0000004").exists()
    if saves == "2":
        broken.script = PRETRAIN
        again = broken.run()
        assert "training resumes from" in again.log
        assert [line["iteration"] for line in again.metrics] == [1, 2, 3, 4, 5, 6]
