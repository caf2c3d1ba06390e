"""The passes of one optimizer step over rows that begin alike: as trees, and as rows that share nothing.

    python benchmarks/shared_prompts.py --json OUT.json [--cases 8/512/64 ...] [--rounds 2] [--repeats 4]

Cases are rows/prompt/response, in tokens: groups of GRPO; episodes, whose rows also share first turns; a preference
pair. Arms:
  rows        one padded micro-batch
  one-by-one  a micro-batch for each row (for each pair)
  packed      --rl-pack-sequences, one micro-batch
  tree        --rl-share-prompts, one micro-batch
  trl         GRPOTrainer or DPOTrainer with a model of the same sizes, one padded micro-batch

A step is the log-prob pass and the update: forward, backward, Megatron's clipping and Adam. Arms of this project take
turns in one process, which checks that their log-probs agree; TRL's has its own, in turn with it. fp32, one thread.
Figures are medians; `X/tree` rows are the ratio of medians. Peak memory, beyond what the process had before its first
step, is of a process of its own for each arm. The prediction counts floating point operations, see
training/shared_rows.py. Targets: of the best arm of this project that shares nothing, over tree, in processor seconds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "training")]

import end_to_end  # noqa: E402
import shared_rows  # noqa: E402

APART = ("rows", "one-by-one", "packed")
OURS = (*APART, "tree")
ARMS = (*OURS, "trl")
PASSES = ("step", "logp", "update")
OF_PREDICTED, LEAST = 0.85, 0.97  # the least share of the predicted ratio, and the least ratio
UNITS = {"peak_bytes": "B", "predicted": "ratio"}


def in_process(python: str, script: str, *given: str) -> Any:
    """What a script of training/ printed as its last line. Exits where it fails."""
    command = [python, str(HERE / "training" / script), *given]
    environment = {**end_to_end.environment(), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment)
    if done.returncode:
        sys.exit(f"{script} {' '.join(given)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def of_arms(case: str, arms: Sequence[str], repeats: int) -> dict[str, list[dict[str, float]]]:
    """Metrics of each repeat of some arms."""
    ours, result = [arm for arm in arms if arm != "trl"], {}
    if ours:
        result = in_process(sys.executable, "one_step.py", case, ",".join(ours), str(repeats))
    if "trl" in arms:
        result["trl"] = in_process(str(end_to_end.interpreter()), "trl_update.py", case, str(repeats))
    return result


def run(cases: Sequence[str], arms: Sequence[str], rounds: int, repeats: int) -> Iterator[list[dict[str, Any]]]:
    """Rows of the result after each case."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        seen: dict[tuple[str, str], list[float]] = {}
        for _ in range(rounds):
            for arm, turns in of_arms(case, arms, repeats).items():
                for name in turns[0]:
                    seen.setdefault((arm, name), []).extend(turn[name] for turn in turns)
        for arm in arms:
            seen[arm, "peak_bytes"] = [of_arms(case, [arm], 1)[arm][0]["peak_bytes"]]
        for (arm, metric), values in seen.items():
            row = {"arm": arm, "case": case, "metric": metric, "unit": UNITS.get(metric, "s")}
            rows.append({**row, "value": statistics.median(values), "range": [min(values), max(values)]})
        rows += compared(case, {key: statistics.median(values) for key, values in seen.items()})
        print(table(rows, case), flush=True)
        yield rows


def compared(case: str, value: dict[tuple[str, str], float]) -> list[dict[str, Any]]:
    """Ratios of each arm to tree, and the targets."""
    own, rows = shared_rows.CASES[case], []
    predicted = shared_rows.predicted(own.rows(), own.prompt)
    rows.append({"arm": "tree", "case": case, "metric": "predicted", "unit": "ratio", "value": predicted})
    arms = [arm for arm in ARMS if arm != "tree" and (arm, "peak_bytes") in value]
    for metric in (*(f"{name}{clock}" for name in PASSES for clock in ("_cpu_seconds", "_seconds")), "peak_bytes"):
        for arm in arms if ("tree", metric) in value else []:
            ratio = value[arm, metric] / value["tree", metric]
            rows.append({"arm": f"{arm}/tree", "case": case, "metric": metric, "unit": "ratio", "value": ratio})
    apart = [row for row in rows if row["arm"].removesuffix("/tree") in APART and row["metric"].endswith("cpu_seconds")]
    least = max(OF_PREDICTED * predicted, LEAST)
    for name in PASSES:
        best = min((row for row in apart if row["metric"].startswith(name)), key=lambda row: row["value"], default=None)
        if best:
            rows.append({**best, "target": f">= {least:.2f}", "reached": best["value"] >= least})
    return rows


def table(rows: Sequence[dict[str, Any]], case: str) -> str:
    """Markdown, a line an arm, and a line a target."""
    rows = [row for row in rows if row["case"] == case]
    value = {(row["arm"], row["metric"]): row["value"] for row in rows if "target" not in row}
    metrics = [f"{name}{clock}" for name in PASSES for clock in ("_cpu_seconds", "_seconds")]
    lines = [f"| {case} | {' | '.join(metrics)} | peak MiB |", f"|---|{'---|' * len(metrics)}---|"]
    for arm in (arm for arm in ARMS if (arm, "peak_bytes") in value):
        cells = [f"{value[arm, metric]:.3f}" for metric in metrics]
        lines.append(f"| {arm} | {' | '.join(cells)} | {value[arm, 'peak_bytes'] / 2**20:.0f} |")
    for row in (row for row in rows if "target" in row):
        result = "reached" if row["reached"] else "NOT reached"
        asked = f"predicted {value['tree', 'predicted']:.2f}, asked {row['target']}"
        lines.append(f"{row['metric']}: {row['arm']} {row['value']:.2f}, {asked}: {result}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file for the rows {arm, case, metric, value, unit}")
    parser.add_argument("--cases", nargs="+", default=list(shared_rows.CASES), choices=list(shared_rows.CASES))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--rounds", type=int, default=2, help="processes of each case, default %(default)s")
    parser.add_argument("--repeats", type=int, default=4, help="steps of each arm in a process, default %(default)s")
    args = parser.parse_args()
    before = os.getloadavg()[0]
    for rows in run(args.cases, args.arms, args.rounds, args.repeats):
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    load = f"load {before:.1f} before and {os.getloadavg()[0]:.1f} after"
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    print(f"{now}, {os.cpu_count()} cores, {load}, medians of {args.rounds} x {args.repeats} steps")


if __name__ == "__main__":
    main()
