"""All data of the report, as one dict for JSON: curves, headline, remarks, stages, samples."""

from __future__ import annotations

import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.monitor.names import meaning
from mindspeed_rl_plugin.monitor.run_files import (
    HELD_OUT_FILE,
    event_files,
    read_apart,
    read_events,
    read_jsonl,
    read_metrics,
    read_run,
)
from mindspeed_rl_plugin.monitor.run_summary import column, is_training, summarize
from mindspeed_rl_plugin.status.status_file import STATUS_FOLDER
from mindspeed_rl_plugin.status.story import STORY_FILE
from mindspeed_rl_plugin.tools.report.report_samples import find_dumps, sample_data
from mindspeed_rl_plugin.tools.report.report_stages import apart_data, stage_data, timeline_data

JsonObject = dict[str, Any]


def collect(
    run_dir: str | os.PathLike[str], *, dump_dir: str | os.PathLike[str] | None = None, samples: int = 1000
) -> dict[str, Any]:
    """Read a run directory. Raises ValueError if it has no metrics."""
    rows = read_metrics(run_dir)
    if not rows:
        raise ValueError(f"metrics.jsonl in {run_dir} is empty: the run has not finished an iteration yet")
    run, summary = read_run(run_dir), summarize(run_dir)
    events = read_events(run_dir)
    stages = stage_data(events)
    timeline = timeline_data(events, stages["names"])
    dumps, places = find_dumps(run_dir, run, dump_dir)
    return {
        "title": run.get("name") or _name(Path(run_dir).resolve()),
        "place": os.fspath(run_dir),
        "run": run,
        "made": time.time(),
        "tiles": headline(rows, run, summary),
        "verdict": verdict(rows, run, summary),
        "settings": settings(run),
        "held_out": held_out(Path(run_dir) / HELD_OUT_FILE),
        "remarks": [*remarks(rows, run, sorted(event_files(run_dir))), *story_remarks(Path(run_dir))],
        "metrics": metric_series(rows),
        "stages": stages,
        "timeline": timeline | apart_data(read_apart(run_dir), timeline["origin"]),
        "samples": sample_data(dumps, limit=samples) | {"places": list(map(os.fspath, places))},
    }


def story_remarks(run_dir: Path) -> list[str]:
    """Where each process was when a wait reached its deadline; empty if none did."""
    path = run_dir / STATUS_FOLDER / STORY_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [f"a wait reached its deadline: {line}" if n == 0 else line.strip() for n, line in enumerate(lines)]


def metric_series(rows: list[JsonObject]) -> dict[str, Any]:
    """All iterations; for each numeric metric {"x": iterations that have it, "y": values, None if not finite}, and
    [unit, meaning]. A curve has a gap at None, but not at an iteration without a value, since some metrics are measured
    once per rollout."""
    names = dict.fromkeys(k for r in rows for k in r if k not in ("iteration", "time"))
    numbers = [n for n in names if all(isinstance(r.get(n), (int, float, type(None))) for r in rows)]

    def curve(name: str) -> dict[str, list]:
        points = [(r["iteration"], r[name]) for r in rows if name in r]
        return {"x": [i for i, _ in points], "y": [None if v is None else float(f"{v:.7g}") for _, v in points]}

    return {
        "iterations": [r["iteration"] for r in rows],
        "series": {n: curve(n) for n in numbers},
        "meaning": {n: list(meaning(n)) for n in numbers},
    }


def headline(rows: list[JsonObject], run: JsonObject, summary: JsonObject) -> list[dict[str, str]]:
    """The tiles at the top: label, value, note."""
    tiles = []

    def tile(label: str, value: str, note: str) -> None:
        tiles.append({"label": label, "value": value, "note": note})

    before, after = summary["accuracy_before"], summary["accuracy_after"]
    if after is not None:
        tile("Held-out accuracy", f"{before:.1%} → {after:.1%}", "greedy, first and last evaluation")
    elif before is not None:
        tile("Held-out accuracy", f"{before:.1%}", "greedy, one evaluation so far")
    if summary["reward_before"] is not None:
        held_out = (summary[f"reward_{when}"] for when in ("before", "after"))
        tile("Held-out reward", " → ".join(f"{r:.3f}" for r in held_out if r is not None), "mean of each evaluation")
    rewards = column(rows, "reward/mean")
    if len(rewards) == 1:
        tile("Reward", f"{rewards[0]:.3f}", "mean of the one rollout so far")
    elif rewards:
        edge = max(1, len(rewards) // 10)
        first, last = statistics.fmean(rewards[:edge]), statistics.fmean(rewards[-edge:])
        note = f"mean of the first and last {edge} rollouts" if edge > 1 else "first and last rollout"
        tile("Reward", f"{first:.3f} → {last:.3f}", note)
    planned = run.get("total_iterations")
    tile("Iterations", f"{summary['iterations']}", f"of {planned} planned" if planned else "trained")
    if summary["seconds"] is not None:
        each = statistics.median(column(rows, "seconds/iteration"))
        tile("Time", duration(summary["seconds"]), f"median iteration {duration(each)}")
    if summary["tokens_per_second"] is not None:
        tile("Throughput", f"{summary['tokens_per_second']:,.0f}", "tokens per second and device, median")
    if summary["logprob_diff_max"] is not None:
        tile("Engine vs trainer", f"{summary['logprob_diff_max']:.2g}", "largest log-prob difference, nats")
    return tiles


# Metric, side, limit, and the remark if the mean over the last tenth of the run is above (1) or below (-1) the limit.
_LIMITS = (
    ("response/truncated", 1, 0.1, "{:.0%} of the latest responses are cut at the length limit (more than 10%)."),
    ("groups/informative", -1, 0.1, "Only {:.0%} of the latest groups have rewards that differ (under 10%)."),
    ("logp_diff/mean", 1, 0.05, "Engine and trainer differ by {:.2g} nats per token on average (more than 0.05)."),
    (
        "idle/trainers_starved",
        1,
        0.3,
        "Trainers waited for responses in {:.0%} of the latest time (more than 30%): give more ranks to generation.",
    ),
    (
        "idle/engines_back_pressure",
        1,
        0.3,
        "Back-pressure: async engines had no prompt in {:.0%} of the latest time (more than "
        "30%): give more ranks to training, or a larger --rl-max-staleness.",
    ),
    ("clip_fraction", 1, 0.3, "{:.0%} of the latest tokens are clipped (more than 30%): updates are large."),
)


def remarks(rows: list[JsonObject], run: JsonObject, ranks: list[int]) -> list[str]:
    """Sentences on what is unusual in the run, with the threshold if there is one."""
    late = rows[-max(1, len(rows) // 10) :]
    watched = ("entropy", *(name for name, *_ in _LIMITS))
    recent = {name: statistics.fmean(values) for name in watched if (values := column(late, name))}
    out = []
    for name, side, limit, text in _LIMITS:
        if name in recent and side * recent[name] > side * limit:
            out.append(text.format(recent[name]))
    entropy = column(rows, "entropy")
    if "entropy" in recent and entropy[0] > 0 and recent["entropy"] < 0.1 * entropy[0]:
        out.append(f"Entropy fell from {entropy[0]:.2g} to {recent['entropy']:.2g} nats, to less than a tenth.")
    if errors := sum(column(rows, "reward/errors")):
        out.append(f"Graders failed on {errors:.0f} samples in this run.")
    broken = [r["iteration"] for r in rows if any(r.get(k, 0) is None for k in ("loss", "grad_norm", "reward/mean"))]
    if broken:
        where = f"in {len(broken)} iterations, first in iteration {broken[0]}"
        out.append(f"Loss, gradient norm or reward is not finite {where}.")
    world = run.get("world_size")
    if world and ranks and len(ranks) < world:
        out.append(f"Stage events of only {len(ranks)} of {world} ranks are here; copy files from the other machines.")
    if not any(is_training(k) for r in rows for k in r):
        out.append("No training iteration has finished yet.")
    return out


def verdict(rows: list[JsonObject], run: JsonObject, summary: JsonObject) -> str:
    """One sentence: whether the run has learned. Compares the first and the last held-out accuracy, else mean rewards
    of the first and the last quarter of the rollouts. A difference counts if it exceeds two standard errors."""
    before, after, count = summary["accuracy_before"], summary["accuracy_after"], run.get("held_out")
    if after is not None and count:
        change, what = after - before, f"accuracy on {count} held-out prompts"
        error = math.sqrt((before * (1 - before) + after * (1 - after)) / count)
        more = "more held-out prompts or iterations would show smaller changes"
    else:
        rewards = column(rows, "reward/mean")
        quarter = len(rewards) // 4
        if quarter < 2:
            return "Too short to judge: fewer than two evaluations, and fewer than 8 rollouts."
        first, last = rewards[:quarter], rewards[-quarter:]
        change, what = statistics.fmean(last) - statistics.fmean(first), f"mean reward of {quarter} rollouts"
        error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / quarter)
        more = "with --rl-eval-data, accuracies on held-out prompts are compared"
    size = f"by {abs(change):.3g}, two standard errors are {2 * error:.2g}"
    if abs(change) <= 2 * error:
        return f"No clear change: {what} changed {size}; {more}."
    return f"{'Learned' if change > 0 else 'Became worse'}: {what} {'rose' if change > 0 else 'fell'} {size}."


def settings(run: JsonObject) -> list[tuple[str, dict[str, str]]]:
    """Settings of the run: heading, and name -> value."""
    groups = {"RL flags": "flags", "Megatron's arguments": "arguments", "Versions": "versions"}
    shown = {heading: run.get(key) or {} for heading, key in groups.items()}
    named = ("algorithm", "parts", "start", "reference", "device", "memory", "first_prompt")
    facts = {name: run[name] for name in named if run.get(name)}
    return [
        (heading, {name: " ".join(map(str, v)) if isinstance(v, list) else str(v) for name, v in group.items()})
        for heading, group in {"Run": facts, **shown}.items()
        if group
    ]


def held_out(path: Path) -> JsonObject:
    """The first and the last evaluation: iterations, and for each prompt that is in both evaluations [prompt, answer,
    [[response, reward] per evaluation]]."""
    lines = read_jsonl(path) if path.is_file() else []
    evaluations = {e["iteration"]: {row[0]: row[1:] for row in e["rows"]} for e in lines}
    ends = list(dict.fromkeys((min(evaluations), max(evaluations)))) if evaluations else []
    both = [n for n in (evaluations[ends[0]] if ends else ()) if n in evaluations[ends[-1]]]

    def row(n: int) -> list[Any]:
        of = [evaluations[i][n] for i in ends]
        return [of[0][0], of[0][2], [[response, reward] for _, response, _, reward in of]]

    return {"iterations": ends, "rows": [row(n) for n in both]}


def duration(seconds: float) -> str:
    """850 ms, 12.3 s, 4 min 05 s, 2 h 07 min."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _name(run_dir: Path) -> str:
    """The directory's name; for the default SAVE/rl also the name of SAVE."""
    return f"{run_dir.parent.name}/rl" if run_dir.name == "rl" else run_dir.name
