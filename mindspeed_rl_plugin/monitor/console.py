"""Console lines of our own: one for an iteration, one for an evaluation, and the progress bar."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm

from mindspeed_rl_plugin.monitor.names import Metric

# Stage names are spelled out in the files and short on the console.
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
LEGEND = (
    "[rl] differ: share of groups whose rewards differ; ent: entropy; Δlogp: |engine - trainer| log-prob, mean/max; "
    "seconds: resh: weights to the engine, lp: old log-probs (docs/metrics.md)"
)
_ASCII = str.maketrans({"±": "+-", "Δ": "d"})


def iteration_line(iteration: int, metrics: Mapping[str, Metric], total: int | None = None) -> str:
    """The line of one iteration; a metric that is absent leaves its part out, NaN is shown as nan.

    Stages under 0.05 s are left out, they are in the files.
    """
    get = metrics.get
    parts = [_counter(iteration, total)]
    parts.append(_join(_put("reward {:6.3f}", get("reward/mean")), _put("±{:5.3f}", get("reward/std"))))
    parts.append(_join(_put("solved {:4.2f}", get("groups/solved")), _put("differ {:4.2f}", get("groups/informative"))))
    parts.append(_sampled(metrics))
    parts.append(
        _join(_put("len {:6.1f}", get("response/length_mean")), _put("trunc {:4.2f}", get("response/truncated")))
    )
    if "dpo/margin" in metrics:
        parts.append(
            _join(
                _put("loss {:.4f}", get("loss")),
                _put("margin {:6.3f}", get("dpo/margin")),
                _put("right {:4.2f}", get("dpo/accuracy")),
            )
        )
    kl = get("kl/ref", get("kl/old"))
    parts.append(
        _join(
            "" if kl is None else f"kl {short_float(kl):>7}",
            _put("ratio {:5.3f}", get("ratio/mean")),
            _put("clip {:4.2f}", get("clip_fraction")),
        )
    )
    parts.append(_put("ent {:5.3f}", get("entropy")))
    if "critic/loss" in metrics:
        alone = "" if "loss" in metrics else "alone"  # it warms up, the policy is not trained
        value = f"critic {short_float(metrics['critic/loss'])}"
        parts.append(_join(value, _put("explains {:4.2f}", get("critic/explained_variance")), alone))
    if "logp_diff/max" in metrics:
        parts.append(f"Δlogp {short_float(get('logp_diff/mean', math.nan))}/{short_float(metrics['logp_diff/max'])}")
    parts.append(_put("{:6,.0f} tok/s", get("tokens_per_second")))
    parts.append(_stage_seconds(metrics))
    if get("reward/errors"):
        parts.append(f"grader errors {metrics['reward/errors']:.0f}")
    return " | ".join(p for p in parts if p)


def eval_line(iteration: int, metrics: Mapping[str, float], total: int | None = None) -> str:
    """The line of one evaluation: every metric, `eval/` left out of the names."""
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
    """Print and flush; signs that the stream's encoding lacks get an ASCII stand-in instead of an error."""
    try:
        line.encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        line = line.translate(_ASCII).encode("ascii", "replace").decode()
    stream.write(line + "\n")
    stream.flush()


class ProgressBar(tqdm):
    """Progress of a long stage on a terminal, on stderr; does nothing where `shown` is false.

    Use as a context manager; `update(n)` adds n, `set(n)` says how many there are by now.
    """

    def __init__(self, total: int, what: str, *, unit: str = "responses", shown: bool) -> None:
        super().__init__(total=total, desc=what, unit=f" {unit}", leave=False, dynamic_ncols=True, disable=not shown)

    def set(self, n: int) -> None:
        """Say that n are done."""
        self.update(n - self.n)


def _counter(iteration: int, total: int | None) -> str:
    return f"rl {iteration}" if not total else f"rl {iteration:>{len(str(total))}}/{total}"


def _sampled(metrics: Mapping[str, Metric]) -> str:
    """`sampled 48 for 16`: groups that dynamic sampling took, and those that are trained; "" without it."""
    if "sampling/groups_drawn" not in metrics:
        return ""
    sampled, share = metrics["sampling/groups_drawn"], metrics.get("sampling/informative", 0.0)
    resumed, deferred, filled = (metrics.get(f"sampling/{name}", 0) for name in ("brought", "carried", "filled"))
    return f"sampled {sampled:.0f} for {sampled * share + resumed - deferred + filled:.0f}"


def _join(*parts: str) -> str:
    return " ".join(p for p in parts if p)


def _put(form: str, value: float | None) -> str:
    return "" if value is None else form.format(value)


def _plain(value: float) -> str:
    return f"{value}" if isinstance(value, int) else f"{value:.4g}"


def _stage_seconds(metrics: Mapping[str, Metric]) -> str:
    """`gen 2.1s rew 0.1s ...`, in the order in which the stages first ran; stages of one short name are added."""
    seconds: dict[str, float] = {}
    for name, value in metrics.items():
        group, _, stage = name.partition("/")
        if group == "seconds" and stage != "iteration":
            short = SHORT_STAGES.get(stage, stage)
            seconds[short] = seconds.get(short, 0.0) + value
    return " ".join(f"{name} {value:.1f}s" for name, value in seconds.items() if value >= SHOWN_SECONDS)
