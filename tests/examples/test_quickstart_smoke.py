"""`examples/quickstart.sh --smoke` as a user runs it: pretraining, GRPO, evaluation, report and summary."""

import json
import shutil
from pathlib import Path

import pytest
from commands import ended

ROOT = Path(__file__).resolve().parents[2]
SEED = "4711"  # a folder of its own under runs/, so that no run of the user is replaced


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_smoke_version_runs_through(request):
    run = ROOT / "runs" / f"quickstart-smoke-seed{SEED}"
    request.addfinalizer(lambda: (shutil.rmtree(run, ignore_errors=True), Path(f"{run}.lock").unlink(missing_ok=True)))
    done = ended("bash", ROOT / "examples" / "quickstart.sh", "--smoke", "--seed", SEED, timeout=600)
    for step in ("== 1/4 data", "== 2/4 pretraining", "== 3/4 GRPO", "== 4/4 report"):
        assert step in done.stdout
    summary = json.loads((run / "summary.json").read_text())
    assert summary["iterations"] == 4
    for name in ("accuracy_before", "accuracy_after"):
        assert 0.0 <= summary[name] <= 1.0
    assert 0.0 < summary["logprob_diff_max"] <= 2e-4
    assert summary["tokens_per_second"] > 0
    assert 0 < summary["seconds_rl"] < summary["seconds"], "set-up left out"
    report = (run / "report.html").read_text()
    assert "RL report" in report and "reward/mean" in report
