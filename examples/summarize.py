"""Write summary.json of a run, print it, and check the accuracy that the quickstart claims.

    python examples/summarize.py runs/quickstart/tuned/rl --out runs/quickstart/summary.json

Exits 1 when a bound is given and not met.
"""

import argparse
import json
import sys
from pathlib import Path

from mindspeed_rl_plugin.monitor.summary import summarize


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", type=Path, help="directory with metrics.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--seconds", type=float, help="wall time of the whole job, pretraining included")
    parser.add_argument("--before-at-most", type=float, help="bound of the held-out accuracy before RL")
    parser.add_argument("--after-at-least", type=float, help="bound of the held-out accuracy after RL")
    args = parser.parse_args()
    summary = summarize(args.run_dir)
    summary["seconds_rl"] = summary["seconds"]
    if args.seconds is not None:
        summary["seconds"] = args.seconds
    args.out.write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    failed = []
    if args.before_at_most is not None and not before <= args.before_at_most:
        failed.append(f"accuracy before RL is {before:.3f}, expected at most {args.before_at_most}")
    if args.after_at_least is not None and not after >= args.after_at_least:
        failed.append(f"accuracy after RL is {after:.3f}, expected at least {args.after_at_least}")
    for line in failed:
        print(f"summarize: {line}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
