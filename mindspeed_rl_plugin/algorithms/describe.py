"""`python -m mindspeed_rl_plugin algorithms`: the presets and their parts, with defaults and sources."""

from __future__ import annotations

import argparse
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mindspeed_rl_plugin.algorithms import advantages, corrections, kl, losses, pairs, rewards, selection, values
from mindspeed_rl_plugin.algorithms.aggregate import AGGREGATIONS
from mindspeed_rl_plugin.algorithms.algorithm import Algorithm
from mindspeed_rl_plugin.algorithms.presets import ALGORITHMS, resolve
from mindspeed_rl_plugin.config import AlgorithmConfig

LEGEND = """\
[T], [P]: one number a trained token, a pair.
R: reward of a response. mean_g, std_g, N: over the N responses of its prompt.
rho_t: reward of token t, which is R at the last one, less the KL there. V_t: the critic's value before token t.
A: advantage. r: exp(logp - logp_old), old being the policy that the update starts from. sg: without gradient.
low, high: the -/+ beside a loss, --rl-clip-low and --rl-clip-high. c: --rl-dual-clip, of values --rl-value-clip.
x: logp_ref - logp, so k1 is logp - logp_ref. w: exp(logp_old - logp_rollout).
constant length: --rl-max-response-length. v, v_old: the critic's value now, and in the rollout.
h: logp - logp_ref of the chosen answer less that of the rejected one. ls: --rl-dpo-label-smoothing."""

HEAD = ("preset", "advantage", "loss", "aggregation", "KL in loss", "KL in reward", "more", "source")


def main(argv: Sequence[str]) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_rl_plugin algorithms",
        description="Presets of --rl-algorithm, and the parts that they and the flags choose from.",
    )
    parser.parse_args(argv)
    print("--rl-algorithm NAME chooses a row; the flag of a part wins over the row (KL as coefficient x estimator)\n")
    print("\n".join(_aligned([HEAD, *map(preset_row, ALGORITHMS)])))
    for title, functions, default in parts():
        print(f"\n{title}")
        rows = [(name, default(name), *described(function)) for name, function in functions.items()]
        print("\n".join("  " + line for line in _aligned(rows)))
    print(f"\nlegend\n{textwrap.indent(LEGEND, '  ')}")
    return 0


def preset_row(name: str) -> tuple[str, ...]:
    """The cells of one preset, as resolved without any other flag."""
    found = resolve(AlgorithmConfig(algorithm=name))
    return (
        name,
        found.advantage,
        f"{found.loss} {_bounds(found.loss)}".strip(),
        found.aggregation,
        _coefficient(found.kl_loss_coef, found.kl_estimator),
        _coefficient(found.kl_reward_coef, found.kl_reward_estimator),
        "; ".join(_more(found)) or "-",
        ALGORITHMS[name].source,
    )


def in_words(found: Algorithm) -> str:
    """A resolved algorithm in one line: what this run computes, flags and preset together."""
    spec = losses.LOSSES.get(found.loss)
    clipped = f" -{found.bounds.low:g}/+{found.bounds.high:g}" if spec is not None and spec.clip_low is not None else ""
    said = [f"advantage {found.advantage}", f"loss {found.loss}{clipped}", f"aggregation {found.aggregation}"]
    said += [f"KL in the loss {_coefficient(found.kl_loss_coef, found.kl_estimator)}"]
    said += [f"in the reward {_coefficient(found.kl_reward_coef, found.kl_reward_estimator)}"]
    if found.correction != "off":
        said.append(f"correction {found.correction} by {found.correction_level}")
    if found.entropy_coef:
        said.append(f"entropy {found.entropy_coef:g}")
    more = [*_more(found), *([f"{found.ppo_epochs} epochs"] if found.ppo_epochs > 1 else [])]
    return f"{found.name}: " + ", ".join(more if found.from_pairs else said + more)


def parts() -> Iterable[tuple[str, Mapping[str, Callable], Callable[[str], str]]]:
    """(title with its flag, name -> function, default settings of a name) of every kind of part."""
    nothing: Callable[[str], str] = lambda name: ""  # noqa: E731
    config = AlgorithmConfig()
    estimators = {name: spec.function for name, spec in advantages.ADVANTAGES.items()}
    settings = {"group-norm": f"eps {config.advantage_eps:g}", "reinforce++": f"gamma {config.gamma:g}"}
    settings["gae"] = f"gamma {config.gamma:g}, lambda {config.gae_lambda:g}"
    yield "advantages, --rl-advantage", estimators, lambda name: settings.get(name, "")
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
    yield "DPO losses, --rl-dpo-loss", pairs.PAIR_LOSSES, lambda name: beta
    others = {
        "overlong penalty": rewards.overlong_penalty,
        "dynamic sampling": selection.carries_signal,
        "value loss": values.value_loss,
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


def _more(found: Algorithm) -> Iterable[str]:
    if found.needs_critic:
        yield f"critic, value clip {found.value_clip:g}"
    if found.overlong_buffer:
        yield f"overlong penalty, buffer {found.overlong_buffer} tokens"
    elif found.overlong_share and found.overlong_buffer is None:
        yield f"overlong penalty, buffer {found.overlong_share:.0%} of the limit"
    if found.dynamic_sampling:
        yield "dynamic sampling"
    if found.filtration != "none":
        yield f"filtration {found.filtration}"
    if found.from_pairs:
        yield f"{found.dpo_loss}, beta {found.pairs.beta:g}"


def _bounds(name: str) -> str:
    spec: Any = losses.LOSSES.get(name)
    if spec is None or spec.clip_low is None:
        gate = losses.Bounds()
        return f"tau {gate.tau_positive:g}/{gate.tau_negative:g}" if spec is not None and spec.gate else ""
    return f"-{spec.clip_low:g}/+{spec.clip_high:g}"


def _coefficient(value: float, estimator: str) -> str:
    return f"{value:g} x {estimator}" if value else "-"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
