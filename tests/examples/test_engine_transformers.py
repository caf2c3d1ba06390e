"""The quickstart's claim, with responses that `transformers` generates: `examples/engine_transformers.py`."""

import os
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import imported

ROOT = Path(__file__).parents[2]
learning = imported(ROOT / "examples" / "learning.py")
ALONE = ("--rl-schedule", "async", "--rl-generators", "0", "--rl-correction", "truncate")


def quickstart_args(base: Path, out: Path) -> list[str]:
    """`RL_ARGS` of the quickstart, seed 0."""
    text = re.search(r"\nRL_ARGS=\((.*?)\n\)", (ROOT / "examples" / "quickstart.sh").read_text(), re.DOTALL)[1]
    named = {"$run/pretrained": base / "pretrained", "$DATA": base / "data", "$run": out, "$((1 + seed))": 1}
    for name, value in named.items():
        text = text.replace(name, str(value))
    return shlex.split(text)


def test_an_engine_is_at_most_150_lines() -> None:
    assert len((ROOT / "examples" / "engine_transformers.py").read_text().splitlines()) <= 150


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_transformers_in_the_place_of_vllm_trains_the_quickstarts_model_to_its_claim(tmp_path) -> None:
    base, out = learning.pretrained(tmp_path / "learning", 0), tmp_path / "run"
    log, flags = out / "tune.log", [*quickstart_args(base, out), *ALONE]
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(learning.launch, log, base / "data", out / "tuned", flags)
        found = None
        while found is None and not job.done():
            time.sleep(0.5)
            found = re.search(r"generate (--join \S+ --secret-file \S+)", log.read_text() if log.exists() else "")
        if found is not None:
            env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
            command = [sys.executable, str(ROOT / "examples" / "engine_transformers.py"), *found[1].split()]
            engine = subprocess.run(command, env=env, timeout=900, capture_output=True, text=True)
        job.result()  # raises with the end of its log
    assert engine.returncode == 0 and "the job has ended" in engine.stdout, engine.stderr[-3000:]
    summarize = [sys.executable, str(ROOT / "examples" / "summarize.py"), str(out / "tuned" / "rl")]
    claim = ["--before-at-most", "0.60", "--after-at-least", "0.80", "--difference-at-most", "2e-4"]
    done = subprocess.run([*summarize, "--out", str(out / "summary.json"), *claim], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
