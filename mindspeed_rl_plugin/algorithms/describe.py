"""A resolved algorithm as text, for the line at the start of a run, run.json, and the command `algorithms`."""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_rl_plugin.algorithms import losses
from mindspeed_rl_plugin.algorithms.algorithm import Algorithm


def describe(algorithm: Algorithm) -> str:
    """One line: what this run computes, by its flags and its preset."""
    a = algorithm
    spec = losses.LOSSES.get(a.loss)
    clipped = f" -{a.bounds.low:g}/+{a.bounds.high:g}" if spec is not None and spec.clip_low is not None else ""
    parts = [f"advantage {a.advantage}", f"loss {a.loss}{clipped}", f"aggregation {a.aggregation}"]
    parts += [f"KL in the loss {coefficient(a.kl_loss_coef, a.kl_estimator)}"]
    parts += [f"in the reward {coefficient(a.kl_reward_coef, a.kl_reward_estimator)}"]
    if a.correction != "off":
        parts.append(
            f"correction {a.correction} by {a.correction_level}, {a.correction_low:g} to {a.correction_high:g}"
        )
    if a.entropy_coef:
        parts.append(f"entropy {a.entropy_coef:g}")
    more = [*further_parts(a), *([f"{a.ppo_epochs} epochs"] if a.ppo_epochs > 1 else [])]
    return f"{a.algorithm}: " + ", ".join(more if a.from_pairs else parts + more)


def further_parts(algorithm: Algorithm) -> Iterable[str]:
    """Parts that only some algorithms have: critic, length penalty, selection, pairs."""
    a = algorithm
    if a.needs_critic:
        yield f"critic, value clip {a.value_clip:g}"
    if a.overlong_buffer:
        yield f"overlong penalty, buffer {a.overlong_buffer} tokens"
    elif a.overlong_share and a.overlong_buffer is None:
        yield f"overlong penalty, buffer {a.overlong_share:.0%} of the limit"
    if a.dynamic_sampling:
        yield "dynamic sampling"
    if a.filtration != "none":
        yield f"filtration {a.filtration}"
    if a.from_pairs:
        yield f"{a.dpo_loss}, beta {a.dpo_beta:g}"


def coefficient(value: float, estimator: str) -> str:
    """A coefficient of the KL and its estimator; "-" if the coefficient is 0."""
    return f"{value:g} x {estimator}" if value else "-"
