"""`python -m mindspeed_rl_plugin algorithms`: the presets and their parts."""

from __future__ import annotations

import argparse
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mindspeed_rl_plugin.algorithms import (
    corrections,
    estimators,
    kl,
    losses,
    pair_losses,
    rewards,
    selection,
    value_loss,
)
from mindspeed_rl_plugin.algorithms.aggregate import AGGREGATIONS
from mindspeed_rl_plugin.algorithms.describe import coefficient, further_parts
from mindspeed_rl_plugin.algorithms.presets import ALGORITHMS, resolve
from mindspeed_rl_plugin.config import AlgorithmConfig

LEGEND = """\
[T], [P]: one number a trained token, a pair.
R: reward of a response. mean_g, std_g, N: over the N responses of its prompt.
rho_t: reward of token t, which is R at the last one, less the KL there.
V_t: the critic's value before token t. v, v_old: that value now, and in the rollout.
A: advantage. sg: without gradient.
r: exp(logp - logp_old), old being the policy that the update starts from.
low, high: the -/+ beside a loss, --rl-clip-low and --rl-clip-high.
c: --rl-dual-clip, of values --rl-value-clip.
x: logp_ref - logp, so k1 is logp - logp_ref. w: exp(logp_old - logp_rollout).
constant length: --rl-max-response-length.
h: logp - logp_ref of the chosen answer less that of the rejected one.
ls: --rl-dpo-label-smoothing."""

HEAD = ("preset", "advantage", "loss", "aggregation", "KL in loss", "KL in reward")
WIDTH = 100  # columns of a terminal


def main(argv: Sequence[str]) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_rl_plugin algorithms",
        description="Presets of --rl-algorithm, and the parts that they and the flags choose from.",
    )
    parser.parse_args(argv)
    print("--rl-algorithm NAME chooses a row; the flag of a part wins over it. KL: coefficient x estimator\n")
    head, *rows = _aligned([HEAD, *map(preset_row, ALGORITHMS)])
    print(head)
    for name, row in zip(ALGORITHMS, rows, strict=True):
        more = further_parts(resolve(AlgorithmConfig(algorithm=name)))
        print(row, *_wrapped("; ".join(more)), *_wrapped(ALGORITHMS[name].source), sep="\n")
    for title, functions, default in parts():
        print(f"\n{title}")
        names = _aligned([(name, default(name)) for name in functions])
        for name, function in zip(names, functions.values(), strict=True):
            what, source = described(function)
            print(f"  {name}", *_wrapped(what), *_wrapped(source), sep="\n")
    print(f"\nlegend\n{textwrap.indent(LEGEND, '  ')}")
    return 0


def preset_row(name: str) -> tuple[str, ...]:
    """The cells of one preset, as resolved without any other flag."""
    preset = resolve(AlgorithmConfig(algorithm=name))
    return (
        name,
        preset.advantage,
        f"{preset.loss} {_bounds(preset.loss)}".strip(),
        preset.aggregation,
        coefficient(preset.kl_loss_coef, preset.kl_estimator),
        coefficient(preset.kl_reward_coef, preset.kl_reward_estimator),
    )


def parts() -> Iterable[tuple[str, Mapping[str, Callable], Callable[[str], str]]]:
    """(title with its flag, name -> function, default settings of a name) of every kind of part."""
    nothing: Callable[[str], str] = lambda name: ""  # noqa: E731
    config = AlgorithmConfig()
    functions = {name: spec.function for name, spec in estimators.ADVANTAGES.items()}
    settings = {"group-norm": f"eps {config.advantage_eps:g}", "reinforce++": f"gamma {config.gamma:g}"}
    settings["gae"] = f"gamma {config.gamma:g}, lambda {config.gae_lambda:g}"
    yield "advantages, --rl-advantage", functions, lambda name: settings.get(name, "")
    yield "policy losses, --rl-loss", {name: spec.function for name, spec in losses.LOSSES.items()}, _bounds
    yield "aggregations, --rl-aggregation", AGGREGATIONS, nothing
    yield "KL to the reference, --rl-kl-estimator, --rl-kl-reward-estimator", kl.KL_ESTIMATORS, nothing
    known = {name: spec for name, spec in corrections.CORRECTIONS.items() if spec.function}
    yield (
        "off-policy corrections, --rl-correction, --rl-correction-level token or sequence",
        {name: spec.function for name, spec in known.items()},
        lambda name: f"low {known[name].low:g}, high {known[name].high:g}",
    )
    yield (
        "filtrations, --rl-filtration",
        selection.FILTRATIONS,
        lambda name: f"p {config.filtration_power:g}" * (name == "pow"),
    )
    beta = f"beta {config.dpo_beta:g}"
    yield "DPO losses, --rl-dpo-loss", pair_losses.PAIR_LOSSES, lambda name: beta
    others = {
        "overlong penalty": rewards.overlong_penalty,
        "dynamic sampling": selection.carries_signal,
        "value loss": value_loss.value_loss,
    }
    defaults = {"overlong penalty": f"f {config.overlong_penalty:g}", "value loss": f"c {config.value_clip:g}"}
    yield (
        "others, --rl-overlong-buffer, --rl-dynamic-sampling, --rl-value-clip",
        others,
        lambda name: defaults.get(name, ""),
    )


def described(function: Callable) -> tuple[str, str]:
    """What a part computes and its source, from its docstring."""
    first, *rest = inspect.getdoc(function).splitlines()
    text, _, source = " ".join([first, *rest]).partition("Source: ")
    return min(first, text, key=len).strip().rstrip("."), " ".join(source.split()).rstrip(".")


def _bounds(name: str) -> str:
    spec: Any = losses.LOSSES.get(name)
    if spec is None or spec.clip_low is None:
        gate = losses.Bounds()
        return f"tau {gate.tau_positive:g}/{gate.tau_negative:g}" if spec is not None and spec.gate else ""
    return f"-{spec.clip_low:g}/+{spec.clip_high:g}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _wrapped(text: str) -> list[str]:
    """Indented lines below the name that they explain."""
    return textwrap.wrap(text, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 6, break_on_hyphens=False)
