"""Partial rollouts in whole jobs: real torchrun, real Megatron, real vLLM, lengths imposed so that some are long."""

import re
import signal
from pathlib import Path

import pytest

IMPOSED = Path(__file__).with_name("imposed_script.py")
# Rollouts of two optimizer steps; not all rows of an engine fit beside each other.
SIZES = ("--rl-rollout-prompts", "8", "--rl-max-response-length", "16", "--rl-max-running", "12")
STREAMED = (*SIZES, "--rl-schedule", "streamed")
CARRY = (*STREAMED, "--rl-carry-unfinished", "--rl-correction", "truncate", "--rl-oversample", "1.5")


@pytest.mark.slow
def test_what_is_unfinished_goes_on_and_a_resume_leaves_no_trace(job, nothing_left) -> None:
    """Two runs agree in all numbers, one of them resumed in the middle with responses in the making."""
    flags = ("--train-iters", "12", *CARRY, "--rl-verify-weights")
    whole = job(*flags, name="whole", script=IMPOSED).dumping()
    result = whole.run()
    firsts = result.metrics[::2]
    whole.check_trained(48, of_epoch=0)
    assert max(line["segments/mean"] for line in firsts) > 1, "no response has parts of two versions"
    assert max(line["lag/max"] for line in firsts) == 1
    assert max(line["lag/token_mean"] for line in firsts) > 0
    assert firsts[0]["making/responses"] > 0 and firsts[-1]["making/groups"] == 0
    assert max(line.get("logp_diff/max", 0.0) for line in firsts) < 2e-5

    cut = job(*flags, "--save-interval", "5", name="cut", script=IMPOSED).dumping()  # in the middle of a rollout
    cut.stop_at(5)
    refused = job("--train-iters", "12", *SIZES, name="cut", script=IMPOSED).fail(120)
    assert re.search(r"holds \d+ prompts that .* --rl-carry-unfinished was on, now off: resume with", refused.log)
    resumed = cut.run()
    assert "training resumes from" in resumed.log
    assert resumed.numbers == result.numbers
    assert cut.trained() == whole.trained()
    last = job("--train-iters", "14", *SIZES, name="cut", script=IMPOSED).run()
    assert len(last.metrics) == 14, "nothing is in the making at its end: it may be synchronous then"
    nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "how"), [(None, signal.SIGINT), (1, signal.SIGKILL)])
def test_a_job_that_is_killed_with_responses_in_the_making_goes_on(job, nothing_left, rank, how) -> None:
    """It ends within a minute and leaves nothing behind; the next start trains each row once."""
    run = job("--train-iters", "8", *CARRY, "--save-interval", "2", script=IMPOSED).dumping()
    log = run.kill_after(5, "generate", rank=rank, how=how).log
    assert rank or "[rl] interrupted in iteration 5" in log
    nothing_left()
    resumed = run.run()
    assert "training resumes from" in resumed.log
    assert [line["iteration"] for line in resumed.metrics] == list(range(1, 9))
    run.check_trained(32, of_epoch=0)
    nothing_left()


@pytest.mark.slow
def test_weights_that_do_not_change_agree_on_tokens_of_all_parts(job) -> None:
    """Importance weights of responses that went on are 1 where the weights are the same ones."""
    result = job("--train-iters", "8", *CARRY, "--lr", "0", script=IMPOSED).run()
    assert max(line["segments/mean"] for line in result.metrics[::2]) > 1
    for line in result.metrics:
        assert line["rollout/weight_max"] == pytest.approx(1, abs=1e-4) and abs(line["rollout/kl"]) < 1e-5


@pytest.mark.slow
def test_what_is_dropped_is_longer_than_what_is_trained(job, nothing_left) -> None:
    """Which a resume in the middle of a rollout does not change."""
    flags = ("--train-iters", "8", "--save-interval", "3", *STREAMED, "--rl-oversample-drop", "--rl-oversample", "1.5")
    run, cut = (job(*flags, name=name, script=IMPOSED).dumping() for name in ("whole", "cut"))
    result = run.run()
    rows = run.trained()
    assert len(set(rows)) == len(rows) == 4 * 8 * 4 and len({epoch for epoch, _, _ in rows}) > 4
    firsts = result.metrics[::2]
    assert all(line["dropped/responses"] == 16 and line["making/groups"] == 0 for line in firsts)
    assert all(line["dropped/length_mean"] > line["response/length_mean"] for line in firsts), firsts
    assert "lag/mean" not in firsts[0]
    cut.stop_at(3)
    assert cut.run().numbers == result.numbers and cut.trained() == rows
    nothing_left()


LAYOUTS = {
    "one engine of two ranks": ("--rl-generate-tp", "2"),
    "two engines that share experts": ("--expert-model-parallel-size", "2", "--rl-generate-ep", "2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dynamic_sampling_evaluation_and_engines_of_several_ranks(job, arithmetic, moe_model, dense_model, layout):
    data = ("--rl-eval-data", str(arithmetic / "heldout.jsonl"), "--rl-eval-every", "3")
    flags = ("--train-iters", "8", "--rl-algorithm", "dapo", *CARRY, *LAYOUTS[layout], *data, "--rl-max-staleness", "2")
    model = moe_model if "experts" in layout else dense_model
    run = job(*flags, script=IMPOSED, model=model).dumping()
    result = run.run()
    assert len(set(run.trained())) == len(run.trained()) == 4 * 8 * 4
    assert 1 <= max(line["lag/max"] for line in result.metrics[::2]) <= 2
    assert max(line["segments/mean"] for line in result.metrics[::2]) > 1
    assert [line["iteration"] for line in result.evaluations] == [0, 3, 6, 8]
