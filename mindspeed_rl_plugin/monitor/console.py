"""The plugin's console lines: one per iteration, one per evaluation, and the progress bar."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm

from mindspeed_rl_plugin.monitor.names import Metric

# Stage -> its short name on the console; files have the full names.
SHORT_STAGES = {
    "prompts": "data",
    "reshard": "resh",
    "generate": "gen",
    "reward": "rew",
    "swap_back": "swap",
    "logp_old": "lp",
    "logp_ref": "ref",
    "values": "val",
    "advantage": "adv",
    "update": "upd",
    "evaluate": "eval",
}
SHOWN_SECONDS = 0.05
# Printed once, before the first line.
LINE_LEGEND = (
    "[rl] differ: share of groups whose rewards differ; ent: entropy; Δlogp: |engine - trainer| log-prob, mean/max; "
    "seconds: resh: weights to the engine, lp: old log-probs (docs/metrics.md)"
)
_ASCII = str.maketrans({"±": "+-", "Δ": "d"})
# Parts of the line of an iteration: formats of metrics, or of what `_derived` makes of them.
_LINE_PARTS = (
    (("reward {:6.3f}", "reward/mean"), ("±{:5.3f}", "reward/std")),
    (("solved {:4.2f}", "groups/solved"), ("differ {:4.2f}", "groups/informative")),
    (("sampled {}", "sampled"),),
    (("len {:6.1f}", "response/length_mean"), ("trunc {:4.2f}", "response/truncated")),
    (("loss {:.4f}", "pair loss"), ("margin {:6.3f}", "dpo/margin"), ("right {:4.2f}", "dpo/accuracy")),
    (("kl {:>7}", "kl"), ("ratio {:5.3f}", "ratio/mean"), ("clip {:4.2f}", "clip_fraction")),
    (("ent {:5.3f}", "entropy"),),
    (("critic {}", "critic"), ("explains {:4.2f}", "critic/explained_variance"), ("{}", "alone")),
    (("Δlogp {}", "logp_diff"), ("mismatch {}", "mismatch")),
    (("lag {}", "lag"), ("seg {:4.2f}", "segments/mean"), ("sampled len {:.1f}", "engines/length_mean")),
    (
        ("idle train {:.0%}", "idle/trainers_starved"),
        ("back-pressure {:.0%}", "idle/engines_back_pressure"),
        ("version {:.0%}", "idle/engines_version"),
    ),
    (("pull {:.2f}s", "weights/pull_seconds"), ("pause {:.2f}s", "weights/pause_seconds")),
    (("{:6,.0f} tok/s", "tokens_per_second"),),
    (("{}", "stages"),),
    (("grader errors {:.0f}", "errors"), ("dropped {:.1%} of the responses", "dropped")),
)


def iteration_line(iteration: int, metrics: Mapping[str, Metric], total: int | None = None) -> str:
    """The line of one iteration; parts without metrics are left out, NaN is shown as nan. Stages under 0.05 s are only
    in the files."""
    values = {**metrics, **_derived(metrics)}
    parts = [" ".join(form.format(values[name]) for form, name in part if name in values) for part in _LINE_PARTS]
    return " | ".join(filter(None, [_counter(iteration, total), *parts]))


def _derived(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    out: dict[str, Metric] = {"stages": _stage_seconds(metrics)}
    if "sampling/groups_drawn" in metrics:
        out["sampled"] = _sampled(metrics)
    if "dpo/margin" in metrics and "loss" in metrics:
        out["pair loss"] = metrics["loss"]
    if (kl := metrics.get("kl/ref", metrics.get("kl/old"))) is not None:
        out["kl"] = short_float(kl)
    if "critic/loss" in metrics:
        out["critic"] = short_float(metrics["critic/loss"])
        out |= {} if "loss" in metrics else {"alone": "alone"}  # the critic warms up; the policy is not trained
    if "logp_diff/max" in metrics:
        mean = metrics.get("logp_diff/mean", math.nan)
        out["logp_diff"] = f"{short_float(mean)}/{short_float(metrics['logp_diff/max'])}"
    if "lag/mean" in metrics:
        out["lag"] = f"{metrics['lag/mean']:.2f}/{metrics['lag/token_mean']:.2f}"
        # The mismatch is left out in runs without lag: there Δlogp is over all tokens.
        out |= {"mismatch": short_float(metrics["rollout/kl"])} if "rollout/kl" in metrics else {}
    named = {"errors": "reward/errors", "dropped": "groups/dropped"}
    return out | {name: metrics[metric] for name, metric in named.items() if metrics.get(metric)}


def eval_line(iteration: int, metrics: Mapping[str, float], total: int | None = None) -> str:
    """The line of one evaluation: every metric, named without `eval/`."""
    parts = [f"{name.removeprefix('eval/')} {_plain(value)}" for name, value in metrics.items()]
    return " | ".join([_counter(iteration, total) + " eval", *parts])


def short_float(value: float) -> str:
    """Two significant digits, as 3e-6, 1.2e-4 or 0.25; 0 is 0."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-3 <= abs(value) < 100:
        return f"{value:.2g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def write_line(line: str, stream: TextIO) -> None:
    """Print and flush; characters that the stream's encoding lacks are replaced by ASCII."""
    try:
        line.encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        line = line.translate(_ASCII).encode("ascii", "replace").decode()
    stream.write(line + "\n")
    stream.flush()


class ProgressBar(tqdm):
    """Progress of a long stage on a terminal, on stderr; does nothing if `shown` is false. A context manager;
    `update(n)` adds n responses or pairs."""

    def __init__(self, total: int, what: str, *, shown: bool) -> None:
        super().__init__(total=total, desc=what, unit=" responses", leave=False, dynamic_ncols=True, disable=not shown)


def _counter(iteration: int, total: int | None) -> str:
    return f"rl {iteration}" if not total else f"rl {iteration:>{len(str(total))}}/{total}"


def _sampled(metrics: Mapping[str, Metric]) -> str:
    """`48 for 16`: 48 groups were sampled by dynamic sampling, 16 groups are trained."""
    sampled, share = metrics["sampling/groups_drawn"], metrics.get("sampling/informative", 0.0)
    resumed, deferred, filled = (metrics.get(f"sampling/{name}", 0) for name in ("brought", "carried", "filled"))
    return f"{sampled:.0f} for {sampled * share + resumed - deferred + filled:.0f}"


def _plain(value: float) -> str:
    return f"{value}" if isinstance(value, int) else f"{value:.4g}"


def _stage_seconds(metrics: Mapping[str, Metric]) -> str:
    """`gen 2.1s rew 0.1s ...`, in the order in which stages first ran; stages with the same short name are added."""
    seconds: dict[str, float] = {}
    for name, value in metrics.items():
        group, _, stage = name.partition("/")
        if group == "seconds" and stage != "iteration":
            short = SHORT_STAGES.get(stage, stage)
            seconds[short] = seconds.get(short, 0.0) + value
    return " ".join(f"{name} {value:.1f}s" for name, value in seconds.items() if value >= SHOWN_SECONDS)
