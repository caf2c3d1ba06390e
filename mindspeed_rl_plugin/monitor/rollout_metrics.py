"""Metrics of a rollout: pure functions from rows to numbers named as in `names.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from mindspeed_rl_plugin.rows import FINISH, Rows


def rollout_metrics(rows: Rows, solved: Sequence[bool]) -> dict[str, float]:
    """Metrics of a rollout's valid rows, from their columns reward, response_length, finish and version, `[B]` each.

    solved: whether each of the B responses is solved. A group, given by (epoch, group) of its ids, is informative if
    its rewards differ. Raises ValueError without rows.
    """
    if not len(rows):
        raise ValueError("rollout_metrics: no rows; a rollout has at least one sample")
    rewards: dict[tuple[int, int], set[float]] = {}
    right: dict[tuple[int, int], set[bool]] = {}
    for sample, value, solves in zip(rows.ids, rows["reward"].tolist(), solved, strict=True):
        rewards.setdefault((sample.epoch, sample.group), set()).add(value)
        right.setdefault((sample.epoch, sample.group), set()).add(bool(solves))
    reward, length = rows["reward"].double(), rows["response_length"].double()
    return {
        "reward/mean": float(reward.mean()),
        "reward/std": float(reward.std()) if len(rows) > 1 else 0.0,
        "groups/informative": sum(len(values) > 1 for values in rewards.values()) / len(rewards),
        "groups/solved": sum(values == {True} for values in right.values()) / len(right),
        "groups/unsolved": sum(values == {False} for values in right.values()) / len(right),
        "response/length_mean": float(length.mean()),
        "response/length_max": float(length.max()),
        "response/truncated": float((rows["finish"] == FINISH.index("length")).double().mean()),
        "version": int(rows["version"].max()),
    }


def grader_metrics(parts: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Mean of each column of the grades `[B, n]`, before weights, by the names of the n graders; empty for a single
    grader, whose grade is the reward."""
    means = parts.double().mean(0).tolist()
    return {f"reward/mean/{name}": mean for name, mean in zip(names, means, strict=True)} if len(names) > 1 else {}


def filtration_metrics(multiplicity: Tensor, reward: Tensor) -> dict[str, float]:
    """Metrics of filtration: share of `[B]` responses that are trained, and the mean reward of trained responses, each
    counted `multiplicity` `[B]` times."""
    weights = multiplicity.double()
    mean = float((weights * reward.double()).sum() / weights.sum().clamp(min=1))
    return {"filtration/distinct": float((multiplicity > 0).double().mean()), "filtration/reward_mean": mean}


def throughput(tokens: int, *, devices: int, seconds: float) -> dict[str, float]:
    """Tokens per second, per device and of all devices, of one rollout whose iterations took `seconds` end to end.

    tokens: prompt and response tokens of the rollout. Equation 5 of the paper (MindSpeed RL, arXiv 2507.19017) has
    fixed lengths: T = G*N*(PL + SL) / ND / ETE: G prompts of PL tokens, N responses of SL tokens to each, ND devices,
    ETE seconds. Here real tokens count.
    """
    return {"tokens_per_second": tokens / devices / seconds, "tokens_per_second_total": tokens / seconds}


def largest(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each metric's largest value over the ranks that measured it."""
    out: dict[str, float] = {}
    for metrics in ranks:
        for name, value in metrics.items():
            out[name] = max(value, out.get(name, value))
    return out
