"""From launch to the first iteration: the quickstart's job of a former commit beside this tree's, and where time goes.

    bash examples/quickstart.sh --smoke          # makes the model that both load
    python benchmarks/startup.py --json OUT.json [--commit 455e3d5] [--repeats 5]

Arms are interleaved; both run with this Python, from files that are in the page cache after one uncounted job each.
Seconds from the command to the line of iteration 1; processor seconds are of torchrun and two ranks up to the job's
end. Then one job of this tree under `-X importtime`: seconds of imports by package, per process. `misspelt`: seconds
and lines of the answer to a misspelt flag.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMOKE = ROOT / "runs" / "quickstart-smoke"
RL_ARGS = (
    "--load {smoke}/pretrained --rl-algorithm grpo --rl-prompt-data {smoke}/data/prompts.jsonl --rl-reward exact "
    "--rl-rollout-prompts 32 --rl-samples-per-prompt 16 --rl-max-prompt-length 16 --rl-max-response-length 8 "
    "--rl-kv-cache-gb 0.1 --global-batch-size 256 --micro-batch-size 32 --train-iters 1 --lr 1.5e-4 --min-lr 0 "
    "--lr-decay-style linear --lr-warmup-iters 0 --weight-decay 0 --log-interval 1 --seed 1"
)
FIRST = re.compile(r"iteration +1/")
IMPORT = re.compile(r"import time: +(\d+) \| +\d+ \| +(\w+)")
PACKAGES = 12  # of the profile


def run(tree: Path, folder: Path, *more: str, **env: str) -> tuple[float, float, list[str]]:
    """Seconds to the first iteration (to the end, where none comes), processor seconds, lines of the job's output."""
    torchrun = Path(sys.executable).with_name("torchrun")
    variables = dict(DATA=f"{SMOKE}/data", SAVE=str(folder / "save"), TORCHRUN=str(torchrun), PYTHONPATH=str(tree))
    variables |= dict(MASTER_PORT=str(20000 + os.getpid() % 9000), OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    command = ["bash", str(tree / "examples" / "launch.sh"), *RL_ARGS.format(smoke=SMOKE).split(), *more]
    subprocess.run(["rm", "-rf", variables["SAVE"]], check=True)
    before, began, first, lines = _processor(), time.monotonic(), None, []
    job = subprocess.Popen(
        command, env={**os.environ, **variables, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in job.stdout:
        lines.append(line)
        if first is None and FIRST.search(line):
            first = time.monotonic() - began
    job.wait()
    return first or time.monotonic() - began, _processor() - before, lines


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def profile(tree: Path, folder: Path) -> dict[str, float]:
    """Package -> seconds of its imports in one process of a job (torchrun and two ranks), most first."""
    seconds: collections.Counter[str] = collections.Counter()
    for line in run(tree, folder, PYTHONPROFILEIMPORTTIME="1")[2]:
        if found := IMPORT.search(line):
            seconds[found[2]] += int(found[1]) / 3e6
    return {"all": sum(seconds.values()), **dict(seconds.most_common(PACKAGES))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default="455e3d5", help="the former tree")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not (SMOKE / "pretrained").is_dir():
        sys.exit(f"{SMOKE} has no pretrained model: run examples/quickstart.sh --smoke")
    with tempfile.TemporaryDirectory() as name:
        folder, former = Path(name), Path(name) / "former"
        git = ["git", "-C", ROOT, "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", former, options.commit], check=True)
        try:
            # launch.sh runs in its own folder, so each tree's plugin is the one that is imported.
            arms = {options.commit: former, "this tree": ROOT}
            seconds: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
            for repeat in range(options.repeats + 1):
                for arm, tree in arms.items():
                    first, processor, lines = run(tree, folder)
                    if not any(FIRST.search(line) for line in lines):
                        sys.exit(f"{arm} came to no iteration:\n{''.join(lines[-30:])}")
                    if repeat:
                        seconds[arm].append((first, processor))
                        print(f"{arm}: {first:.1f} s to the first iteration, {processor:.1f} processor seconds")
            wrong = run(ROOT, folder, "--rl-rewrad", "exact")
            result = {
                "seconds": {arm: statistics.median(s for s, _ in taken) for arm, taken in seconds.items()},
                "processor": {arm: statistics.median(p for _, p in taken) for arm, taken in seconds.items()},
                "all": seconds,
                "misspelt": {"seconds": wrong[0], "lines": len(wrong[2])},
                "imports": profile(ROOT, folder),
            }
        finally:
            subprocess.run([*git, "remove", "--force", former], check=True)
    for what in ("seconds", "processor"):
        was, now = result[what].values()
        print(f"median {what}: {was:.1f} -> {now:.1f}, ratio {now / was:.2f}")
    print(f"misspelt flag: {wrong[0]:.1f} s, {len(wrong[2])} lines")
    print("imports, seconds a process: " + ", ".join(f"{k} {v:.2f}" for k, v in result["imports"].items()))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
