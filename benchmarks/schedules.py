"""The schedules of this project beside each other and TRL: seconds of a GRPO iteration, with quick and slow rewards.

    python benchmarks/schedules.py --json OUT.json [--cases slow-32] [--arms sync,streamed] [--repeats 5]

Jobs are those of end_to_end.py: two processes with one thread each, imposed lengths. The arms of a case take turns, so
that a load beside them hits all; ratios are those of medians of one run. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import end_to_end  # noqa: E402
from end_to_end import workload  # noqa: E402

# Arm -> flags of its schedule; the first one is what the others are compared with. TRL has none.
APART = "--rl-schedule async --rl-generators 1 --rl-correction truncate"  # one process trains, one generates
CARRY = "--rl-schedule streamed --rl-carry-unfinished --rl-oversample 1.5 --rl-correction truncate"  # partial rollout
ARMS = {
    "sync": (),
    "streamed": ("--rl-schedule", "streamed"),
    "carry": tuple(CARRY.split()),
    "async": tuple(APART.split()),
    "drain": (*APART.split(), "--rl-inflight", "drain"),
    "one-step-off": (*APART.split(), "--rl-async-order", "strict"),
    "discard-stale": (*APART.split(), "--rl-inflight", "recompute", "--discard-stale"),
    "trl": (),
}
SLOW = """
import time, zlib
import workload

def grade(response):
    time.sleep({least} + {more} * (zlib.crc32(response.encode()) % 1000) / 1000)
    return workload.reward(response)
"""


@dataclass(frozen=True)
class Case:
    """lengths: case of end_to_end.py; sleep: seconds that a reward takes, least and most; workers: grader processes."""

    lengths: str
    sleep: tuple[float, float] | None = None
    workers: int = 2


CASES = {
    "short": Case("short"),
    "long-tailed": Case("long-tailed"),
    "slow-32": Case("long-tailed", (0.2, 2.0), 32),
    "slow-4": Case("long-tailed", (0.2, 2.0), 4),
}
# (case, arm) -> least ratio of the first arm's iteration to its own
TARGETS = {("slow-32", "streamed"): 1.05, ("slow-4", "streamed"): 1.05}
TARGETS |= {(case, "streamed"): 0.95 for case in ("short", "long-tailed")}
TARGETS |= {("slow-32", "async"): 1.4, ("long-tailed", "async"): 1.08}
METRICS = ("iteration", "generate", "reward", "logp_old", "update")  # seconds
# Shares of time, of arms with an engine apart, by cause.
IDLE = ("idle/trainers_starved", "idle/engines_back_pressure", "idle/engines_version")


def run(arms: Sequence[str], cases: Sequence[str], iterations: int, repeats: int) -> Iterator[list[dict[str, Any]]]:
    """Rows of the result after each job: of every arm, case and metric the median, least and most over the repeats."""
    seen: dict[tuple[str, str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="schedules-") as directory:
        for name in cases:
            write(Path(directory) / name, CASES[name])
        for repeat, name in itertools.product(range(repeats), cases):
            turn = repeat % len(arms)
            for arm in (*arms[turn:], *arms[:turn]):
                case, begin = CASES[name], time.monotonic()
                what = workload.CASES[case.lengths], Path(directory) / name, iterations
                if arm == "trl":
                    measured = end_to_end.run_trl(*what, graders=case.workers // end_to_end.RANKS)
                else:
                    trainers = end_to_end.RANKS - ("--rl-generators" in ARMS[arm])
                    flags = (*ARMS[arm], "--rl-reward-workers", str(case.workers // trainers))
                    measured = end_to_end.run_ours(*what, *flags, even=arm != "carry")
                kept = dict.fromkeys(METRICS, 0.0) | {m: measured[m] for m in (*METRICS, *IDLE) if m in measured}
                shown = {metric: round(value, 2) for metric, value in kept.items()}
                took = f"{time.monotonic() - begin:.0f} s"
                print(f"{repeat + 1}/{repeats} {name} {arm} {took} {shown}", file=sys.stderr, flush=True)
                for metric, value in kept.items():
                    seen.setdefault((arm, name, metric), []).append(value)
                yield [
                    {"arm": a, "case": c, "metric": m, "value": statistics.median(v), "range": [min(v), max(v)]}
                    for (a, c, m), v in seen.items()
                ]


def write(folder: Path, case: Case) -> None:
    """What the jobs of a case read."""
    workload.write(folder, workload.CASES[case.lengths])
    if case.sleep is not None:
        least, most = case.sleep
        (folder / "grader.py").write_text(SLOW.format(least=least, more=most - least))


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How much faster than the first arm each other one is in each case, and whether that is what was asked."""
    value = {(r["arm"], r["case"]): r["value"] for r in rows if r["metric"] == "iteration"}
    first = next(iter(ARMS))
    result = []
    for arm, case in value:
        if arm != first and (first, case) in value:
            ratio, asked = value[first, case] / value[arm, case], TARGETS.get((case, arm))
            row = {"arm": f"{arm}/{first}", "case": case, "metric": "speed", "value": ratio}
            result.append(row if asked is None else {**row, "target": asked, "reached": ratio >= asked})
    return result


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The medians as a Markdown table, seconds, shares of idle time where an engine is apart, and the range of the
    iteration."""
    value = {(r["case"], r["arm"], r["metric"]): r for r in rows}
    columns = (*METRICS, *IDLE)
    lines = [f"| case | arm | {' | '.join(columns)} | least to most |", f"|---|---|{'---|' * len(columns)}---|"]
    for case, arm in dict.fromkeys((r["case"], r["arm"]) for r in rows):
        measured = [value.get((case, arm, metric)) for metric in columns]
        cells = " | ".join("" if row is None else f"{row['value']:.2f}" for row in measured)
        least, most = value[case, arm, "iteration"]["range"]
        lines.append(f"| {case} | {arm} | {cells} | {least:.2f} to {most:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for the rows {arm, case, metric, value}")
    parser.add_argument("--arms", default=",".join(ARMS), help="which of %(default)s")
    parser.add_argument("--cases", default=",".join(CASES), help="which of %(default)s")
    parser.add_argument("--iterations", type=int, default=6, help="of each job, two not counted; default %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="jobs of each arm and case, default %(default)s")
    args = parser.parse_args()
    arms, cases = args.arms.split(","), args.cases.split(",")
    for given, known in ((arms, ARMS), (cases, CASES)):
        if unknown := set(given) - set(known):
            parser.error(f"{sorted(unknown)} unknown; known: {', '.join(known)}")
    before, rows = os.getloadavg()[0], []
    for rows in run(arms, cases, args.iterations, args.repeats):
        args.json.write_text(json.dumps(rows + ratios(rows), indent=1) + "\n")
    print(table(rows))
    for row in ratios(rows):
        asked = (
            f", asked {row['target']:g}: {'reached' if row['reached'] else 'NOT reached'}" if "target" in row else ""
        )
        print(f"{row['case']}: {row['arm']} {row['value']:.2f}x{asked}")
    print(f"load {before:.1f} before and {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
