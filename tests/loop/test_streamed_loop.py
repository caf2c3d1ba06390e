"""`--rl-schedule streamed` in whole jobs: bit for bit what `sync` trains, selects and evaluates."""

import signal
from pathlib import Path

import pytest

STAGE = Path(__file__).parents[2] / "examples" / "stages" / "short_first.py"
# Responses are graded in another order than they are sampled, and earn the same for even numbers.
GRADER = """
import asyncio, time
def grade(prompt, response):
    time.sleep(sum(map(ord, response)) % 7 / 20)
    return sum(map(ord, response)) % 5 / 4 if int(prompt.split('*')[0]) % 2 else 1.0
async def score(response):
    await asyncio.sleep(0.1)
    return len(response) % 3 / 2
def fails(response):
    return 1 / (sum(map(ord, response)) % 8)
async def longest(responses):
    await asyncio.sleep(0.1)
    return [float(len(r) == max(map(len, responses))) for r in responses]
"""
DAPO = ("--rl-algorithm", "dapo", "--rl-rollout-prompts", "8", "--rl-overlong-buffer", "4", "--lr", "3e-3")
EVALUATED = ("--rl-eval-every", "2", "--rl-eval-pass-k", "2")
TWO_RANKS = (*DAPO, "--rl-generate-tp", "2", "--rl-stage", f"{STAGE}:ShortFirst")
CASES = {  # graders, flags, and the schedule at the start and after the resume
    "groups are graded, one engine of two ranks, an own stage": (
        ("grade", "longest=0.5"),
        TWO_RANKS,
        ("streamed", "streamed"),
    ),
    "responses are graded, some of which fail, two engines, filtration": (
        ("grade", "score=0.5", "fails=0.1"),
        ("--rl-filtration", "best-random", "--rl-reward-on-error", "zero"),
        ("sync", "streamed"),
    ),
    "two engines that share experts": (
        ("grade",),
        ("--expert-model-parallel-size", "2", "--rl-generate-ep", "2"),
        ("streamed", "sync"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_all_numbers_are_those_of_sync(job, arithmetic, tmp_path, dense_model, moe_model, case: str) -> None:
    """Also after a resume, which the streamed run makes in the middle, and with `sync` before or after it."""
    (tmp_path / "grader.py").write_text(GRADER)
    graders, flags, (first, then) = CASES[case]
    graders = ("--rl-reward", *(f"{tmp_path}/grader.py:{grader}" for grader in graders))
    held_out = ("--rl-eval-data", str(arithmetic / "heldout.jsonl"), *EVALUATED)
    flags = (*graders, *flags, *held_out, "--rl-verify-weights", "--rl-reward-workers", "3")
    flags, model = ("--train-iters", "4", *flags), moe_model if "experts" in case else dense_model
    sync = job(*flags, name="sync", model=model).run()
    saved = (*flags, "--save-interval", "2", "--rl-schedule")
    job(*saved, first, name="streamed", model=model).stop_at(2)
    streamed = job(*saved, then, name="streamed", model=model).run()
    assert "training resumes from" in streamed.log
    assert len({line["weights/digest"] for line in sync.metrics if "weights/digest" in line}) > 1
    assert streamed.numbers == sync.numbers
    assert any(line.get("reward/errors") for line in streamed.metrics) == ("fail" in case)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "how"), [(None, "SIGINT"), (1, "SIGKILL")])
def test_a_job_that_is_killed_while_threads_grade_leaves_nothing_behind(job, nothing_left, tmp_path, rank, how) -> None:
    (tmp_path / "grader.py").write_text(
        "import time\ndef grade(response, answer):\n    time.sleep(0 if response == answer else 9)\n    return 1.0\n"
    )
    flags = ("--rl-reward", f"{tmp_path}/grader.py:grade", "--rl-schedule", "streamed", "--rl-reward-workers", "2")
    killed = job("--train-iters", "3", *flags, cold=True)
    log = killed.kill_after(1, "generate", rank=rank, how=getattr(signal, how)).log
    assert rank or "[rl] interrupted in iteration 1" in log
    nothing_left()
