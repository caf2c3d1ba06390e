"""Write summary.json of a run, print it, and check what the quickstart claims.

    python examples/summarize.py runs/quickstart/tuned/rl --out runs/quickstart/summary.json

Exits 1 when a bound is given and not reached.
"""

import argparse
import json
import sys
from pathlib import Path

from mindspeed_rl_plugin.monitor.run_summary import summarize


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", type=Path, help="directory with metrics.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--seconds", type=float, help="wall time of the whole job, pretraining included")
    parser.add_argument("--before-at-most", type=float, help="bound of the held-out accuracy before RL")
    parser.add_argument("--after-at-least", type=float, help="bound of the held-out accuracy after RL")
    parser.add_argument("--after-at-most", type=float, help="the same, for a run that is not to learn")
    parser.add_argument("--difference-at-most", type=float, help="bound of engine and trainer log-probs' difference")
    args = parser.parse_args()
    summary = summarize(args.run_dir)
    summary["seconds_rl"] = summary["seconds"]
    if args.seconds is not None:
        summary["seconds"] = args.seconds
    args.out.write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))
    bounds = args.before_at_most, args.after_at_least, args.difference_at_most, args.after_at_most
    failed = broken_claims(summary, *bounds)
    for line in failed:
        print(f"summarize: {line}", file=sys.stderr)
    return bool(failed)


def broken_claims(
    summary: dict,
    before_at_most: float | None,
    after_at_least: float | None,
    difference_at_most: float | None = None,
    after_at_most: float | None = None,
) -> list[str]:
    """What a summary breaks: one sentence a bound; a bound of None asks nothing."""
    before, after, difference = (summary[k] for k in ("accuracy_before", "accuracy_after", "logprob_diff_max"))
    failed = []
    if before_at_most is not None and (before is None or before > before_at_most):
        failed.append(f"held-out accuracy before RL is {before}, the claim is at most {before_at_most}")
    if after_at_least is not None and (after is None or after < after_at_least):
        failed.append(f"held-out accuracy after RL is {after}, the claim is at least {after_at_least}")
    if after_at_most is not None and (after is None or after > after_at_most):
        failed.append(f"held-out accuracy after RL is {after}, the claim is at most {after_at_most}")
    if difference_at_most is not None and (difference is None or difference > difference_at_most):
        failed.append(f"engine and trainer log-probs differ by {difference} nats, the limit is {difference_at_most}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
