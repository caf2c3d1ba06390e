"""Summary of a run: the few numbers that show whether it worked."""

from __future__ import annotations

import os
import statistics
from typing import Any

from mindspeed_rl_plugin.monitor.run_files import read_events, read_metrics


def summarize(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """The numbers of a run by name, None if never measured. Raises ValueError if the directory has no metrics.

    accuracy_before, _after: greedy held-out accuracy in the first and the last of several evaluations; reward_before,
    _after: mean reward in them; iterations: number of the last trained one; tokens_per_second: median over rollouts,
    per device; logprob_diff_max: largest |engine - trainer| log-prob, nats; seconds: of iterations and evaluations.
    """
    rows = read_metrics(run_dir)
    accuracy, reward = column(rows, "eval/accuracy"), column(rows, "eval/reward_mean")
    speed = column(rows, "tokens_per_second")
    seconds = column(rows, "seconds/iteration")
    differences = column(rows, "logp_diff/max")
    evaluations = [e for e in read_events(run_dir) if e["rank"] == 0 and e["stage"] == "evaluate"]
    trained = [r["iteration"] for r in rows if any(is_training(k) for k in r)]
    return {
        "accuracy_before": accuracy[0] if accuracy else None,
        "accuracy_after": accuracy[-1] if len(accuracy) > 1 else None,
        "reward_before": reward[0] if reward else None,
        "reward_after": reward[-1] if len(reward) > 1 else None,
        "iterations": max(trained, default=0),
        "tokens_per_second": statistics.median(speed) if speed else None,
        "logprob_diff_max": max(differences, default=None),
        "seconds": sum(seconds) + sum(e["end"] - e["start"] for e in evaluations) if seconds else None,
    }


def column(rows: list[dict[str, Any]], name: str) -> list[float]:
    """The values of one metric in iteration order, without missing and non-finite ones."""
    return [r[name] for r in rows if r.get(name) is not None]


def is_training(name: str) -> bool:
    """Whether a field of a metrics row is a training metric: not of an evaluation, nor `iteration` or `time`."""
    return name not in ("iteration", "time") and not name.startswith("eval/")
