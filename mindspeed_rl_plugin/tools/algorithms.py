"""`python -m mindspeed_rl_plugin algorithms`: the presets and their parts."""

from __future__ import annotations

import argparse
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mindspeed_rl_plugin.algorithms.aggregate import AGGREGATIONS
from mindspeed_rl_plugin.algorithms.corrections import CORRECTIONS
from mindspeed_rl_plugin.algorithms.describe import coefficient, further_parts
from mindspeed_rl_plugin.algorithms.estimators import ADVANTAGES
from mindspeed_rl_plugin.algorithms.kl import KL_ESTIMATORS
from mindspeed_rl_plugin.algorithms.losses import LOSSES, Bounds
from mindspeed_rl_plugin.algorithms.pair_losses import PAIR_LOSSES
from mindspeed_rl_plugin.algorithms.presets import ALGORITHMS, resolve
from mindspeed_rl_plugin.algorithms.rewards import overlong_penalty
from mindspeed_rl_plugin.algorithms.selection import FILTRATIONS, carries_signal
from mindspeed_rl_plugin.algorithms.value_loss import value_loss
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.tools.text_table import aligned

FORMULA_LEGEND = """\
[T]: one number per trained token. [P]: one number per pair.
R: reward of a response, minus its KL cost. N: responses to its prompt; mean_g, std_g: over these.
rho_t: reward of token t minus its KL cost. Only a response's (or turn's) last token has a reward.
V_t: the critic's value before token t. v: this value now; v_old: in the rollout.
A: advantage. sg(y): y without gradient.
r: exp(logp - logp_old). logp_old: log-prob by the policy at the start of the update.
low, high: bounds; those of a loss are --rl-clip-low and --rl-clip-high, shown as -low/+high.
c: --rl-dual-clip; in the value loss --rl-value-clip.
x: logp_ref - logp, so k1 is logp - logp_ref. w: exp(logp_old - logp_rollout).
constant length: --rl-max-response-length.
h: (logp - logp_ref) of the chosen answer minus (logp - logp_ref) of the rejected answer.
ls: --rl-dpo-label-smoothing."""

PRESET_HEAD = ("preset", "advantage", "loss", "aggregation", "KL in loss", "KL in reward")
WIDTH = 100  # columns of a terminal


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_rl_plugin algorithms",
        description="Presets of --rl-algorithm, and all parts (losses and others) that presets and flags can choose.",
    )
    parser.parse_args(argv)
    print("--rl-algorithm NAME chooses a row; the flag of a part replaces this part (dpo: not every part).")
    print("KL: coefficient x estimator\n")
    head, *rows = aligned([PRESET_HEAD, *map(preset_row, ALGORITHMS)], len(PRESET_HEAD))
    print(head)
    for name, row in zip(ALGORITHMS, rows, strict=True):
        more = further_parts(resolve(AlgorithmConfig(algorithm=name)))
        print(row, *_wrapped("; ".join(more)), *_wrapped(ALGORITHMS[name].source), sep="\n")
    for title, functions in parts():
        print(f"\n{title}")
        names = aligned([(name, settings) for name, (_, settings) in functions.items()], 2)
        for name, (function, _) in zip(names, functions.values(), strict=True):
            what, source = described(function)
            print(f"  {name}", *_wrapped(what), *_wrapped(source), sep="\n")
    print(f"\nlegend\n{textwrap.indent(FORMULA_LEGEND, '  ')}")
    return 0


def preset_row(name: str) -> tuple[str, ...]:
    """The cells of one preset, with no other flags given."""
    preset = resolve(AlgorithmConfig(algorithm=name))
    return (
        name,
        preset.advantage,
        f"{preset.loss} {_bounds(preset.loss)}".strip(),
        preset.aggregation,
        coefficient(preset.kl_loss_coef, preset.kl_estimator),
        coefficient(preset.kl_reward_coef, preset.kl_reward_estimator),
    )


def parts() -> Iterable[tuple[str, Mapping[str, tuple[Callable, str]]]]:
    """For every kind of part: title with its flag, and name -> (function, default settings)."""
    c = AlgorithmConfig()
    settings = {"group-norm": f"eps {c.advantage_eps:g}", "reinforce++": f"gamma {c.gamma:g}"}
    settings |= {"gae": f"gamma {c.gamma:g}, lambda {c.gae_lambda:g}", "pow": f"p {c.filtration_power:g}"}
    settings |= {"overlong penalty": f"f {c.overlong_penalty:g}", "value loss": f"c {c.value_clip:g}"}
    settings |= {name: f"low {s.low:g}, high {s.high:g}" for name, s in CORRECTIONS.items() if s.function}
    settings |= dict.fromkeys(PAIR_LOSSES, f"beta {c.dpo_beta:g}") | {name: _bounds(name) for name in LOSSES}
    others = {"overlong penalty": overlong_penalty, "dynamic sampling": carries_signal, "value loss": value_loss}
    kinds: dict[str, Mapping[str, Any]] = {
        "advantages, --rl-advantage": ADVANTAGES,
        "policy losses, --rl-loss": LOSSES,
        "aggregations, --rl-aggregation": AGGREGATIONS,
        "KL to the reference, --rl-kl-estimator, --rl-kl-reward-estimator": KL_ESTIMATORS,
        "off-policy corrections, --rl-correction, --rl-correction-level": CORRECTIONS,
        "filtrations, --rl-filtration": FILTRATIONS,
        "DPO losses, --rl-dpo-loss": PAIR_LOSSES,
        "others, --rl-overlong-buffer, --rl-dynamic-sampling, --rl-value-clip": others,
    }
    for title, known in kinds.items():
        functions = {name: getattr(part, "function", part) for name, part in known.items()}
        yield title, {name: (function, settings.get(name, "")) for name, function in functions.items() if function}


def described(function: Callable) -> tuple[str, str]:
    """Formula and source of a part, from its docstring."""
    first, *rest = inspect.getdoc(function).splitlines()
    text, _, source = " ".join([first, *rest]).partition("Source: ")
    return min(first, text, key=len).strip().rstrip("."), " ".join(source.split()).rstrip(".")


def _bounds(name: str) -> str:
    spec: Any = LOSSES.get(name)
    if spec is None or spec.clip_low is None:
        gate = Bounds()
        return f"tau {gate.tau_positive:g}/{gate.tau_negative:g}" if spec is not None and spec.gate else ""
    return f"-{spec.clip_low:g}/+{spec.clip_high:g}"


def _wrapped(text: str) -> list[str]:
    """A text as indented lines, to be printed below a name."""
    return textwrap.wrap(text, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 6, break_on_hyphens=False)
