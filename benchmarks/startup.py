"""From launch to the first iteration: the quickstart's job of a former commit beside this tree's, and where time goes.

    bash examples/quickstart.sh --smoke          # makes the model that both load
    python benchmarks/startup.py --json OUT.json [--commit 455e3d5] [--repeats 5] [--answer]

Arms are interleaved; both run with this Python, from files that are in the page cache after one uncounted job each.
Seconds from the command to the line of iteration 1; processor seconds are of torchrun and two ranks up to the job's
end. Then one job of this tree under `-X importtime`: seconds of imports by package, per process. `answer`: seconds from
the command to the end of a job with a misspelt flag, and its lines; seconds to its first line, from the command and
from the start of rank 0's process, and that process's processor seconds by then. `--answer` measures these alone.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
PORT = 20000 + os.getpid() % 9000


def run(
    tree: Path, folder: Path, *more: str, look: Callable[[str], None] = lambda _: None, **env: str
) -> tuple[float, float, list[str]]:
    """Seconds to the first iteration (to the end, where none comes), processor seconds, lines of the job's output.
    look: sees each line at once."""
    torchrun = Path(sys.executable).with_name("torchrun")
    variables = dict(DATA=f"{SMOKE}/data", SAVE=str(folder / "save"), TORCHRUN=str(torchrun), PYTHONPATH=str(tree))
    variables |= dict(MASTER_PORT=str(PORT), OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    command = ["bash", str(tree / "examples" / "launch.sh"), *RL_ARGS.format(smoke=SMOKE).split(), *more]
    subprocess.run(["rm", "-rf", variables["SAVE"]], check=True)
    before, began, first, lines = _processor(), time.monotonic(), None, []
    job = subprocess.Popen(
        command, env={**os.environ, **variables, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in job.stdout:
        look(line)
        lines.append(line)
        if first is None and FIRST.search(line):
            first = time.monotonic() - began
    job.wait()
    return first or time.monotonic() - began, _processor() - before, lines


def answer(tree: Path, folder: Path) -> dict[str, float]:
    """Of a job with a misspelt flag, see above."""
    seen: dict[str, float] = {}
    began = time.clock_gettime(time.CLOCK_BOOTTIME)

    def look(line: str) -> None:
        if not seen and line.startswith("[rl]"):
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            start, processor = _first_rank()
            seen.update({"first line": now - began, "of the rank": now - start, "its processor": processor})

    seconds, _, lines = run(tree, folder, "--rl-rewrad", "exact", look=look)
    return {"seconds": seconds, "lines": len(lines), **seen}


def _first_rank() -> tuple[float, float]:
    """When the process of rank 0 began, by CLOCK_BOOTTIME, and its processor seconds."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # of another user, or ended
            if {b"RANK=0", b"MASTER_PORT=%d" % PORT} <= set((process / "environ").read_bytes().split(b"\0")):
                words = (process / "stat").read_text().rpartition(")")[2].split()
                start, user, system = (int(words[i]) / os.sysconf("SC_CLK_TCK") for i in (19, 11, 12))
                return start, user + system
    raise RuntimeError("rank 0 ended at its first line")


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


def compare(folder: Path, commit: str, repeats: int) -> dict[str, Any]:
    """Both trees to the first iteration, and the profile of this one."""
    git, former = ["git", "-C", ROOT, "worktree"], folder / "former"
    subprocess.run([*git, "add", "--quiet", "--detach", former, commit], check=True)
    try:
        # launch.sh runs in its own folder, so each tree's plugin is the one that is imported.
        arms = {commit: former, "this tree": ROOT}
        seconds: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
        for repeat in range(repeats + 1):
            for arm, tree in arms.items():
                first, processor, lines = run(tree, folder)
                if not any(FIRST.search(line) for line in lines):
                    sys.exit(f"{arm} came to no iteration:\n{''.join(lines[-30:])}")
                if repeat:
                    seconds[arm].append((first, processor))
                    print(f"{arm}: {first:.1f} s to the first iteration, {processor:.1f} processor seconds")
    finally:
        subprocess.run([*git, "remove", "--force", former], check=True)
    result = {
        "seconds": {arm: statistics.median(s for s, _ in taken) for arm, taken in seconds.items()},
        "processor": {arm: statistics.median(p for _, p in taken) for arm, taken in seconds.items()},
        "all": seconds,
        "imports": profile(ROOT, folder),
    }
    for what in ("seconds", "processor"):
        was, now = result[what].values()
        print(f"median {what}: {was:.1f} -> {now:.1f}, ratio {now / was:.2f}")
    print("imports, seconds a process: " + ", ".join(f"{k} {v:.2f}" for k, v in result["imports"].items()))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default="455e3d5", help="the former tree")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--answer", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not (SMOKE / ("data" if options.answer else "pretrained")).is_dir():
        sys.exit(f"{SMOKE} has no data and no pretrained model: run examples/quickstart.sh --smoke")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        answers = [answer(ROOT, folder) for _ in range(options.repeats + 1)][1:]
        result: dict[str, Any] = {"answer": {what: statistics.median(a[what] for a in answers) for what in answers[0]}}
        print("misspelt flag, medians:", ", ".join(f"{what} {value:.2f}" for what, value in result["answer"].items()))
        result["answers"] = answers
        if not options.answer:
            result |= compare(folder, options.commit, options.repeats)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
