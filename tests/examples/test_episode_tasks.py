"""`examples/episodes/run.sh` as a user runs it, with little training; with all of it the script holds itself to its
claims."""

import json
import shutil
from pathlib import Path

import pytest
from commands import ended

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "runs" / "episodes"
SEED, ITERATIONS = "4711", "24"  # beyond the warm-up; folders of its own in runs/: no run of the user is replaced
TURNS = {"calculator": 1.0, "control": None, "guess": 1.5}  # least of an episode


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("task", TURNS)
def test_each_task_runs_through(request, task: str) -> None:
    folders = [RUNS / f"{name}-{end}" for name in TURNS for end in (ITERATIONS, f"seed{SEED}-tuned")]
    request.addfinalizer(lambda: [shutil.rmtree(folder, ignore_errors=True) for folder in folders])
    few = {"PRETRAIN_ITERS": ITERATIONS, "FLAGS": "--train-iters 1 --rl-samples-per-prompt 4 --global-batch-size 64"}
    ended("bash", ROOT / "examples" / "episodes" / "run.sh", task, SEED, more=few, timeout=800)
    run = RUNS / f"{task}-seed{SEED}-tuned"
    assert json.loads((run / "summary.json").read_text())["iterations"] == 1
    lines = [json.loads(line) for line in (run / "rl" / "metrics.jsonl").read_text().splitlines()]
    (trained,) = [line for line in lines if line["kind"] == "train"]
    assert trained.get("episode/turns_mean", 0.0) >= (TURNS[task] or 0.0) and trained["logp_diff/max"] < 2e-4
    assert ("episode/turns_mean" in trained) == (TURNS[task] is not None)
