"""Metrics of a rollout: pure functions from rows to numbers named as in `names.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mindspeed_rl_plugin.monitor.names import Metric
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

FINISH_STOP, FINISH_LENGTH, FINISH_ABORT = 0, 1, 2


def rollout_metrics(rows: Rows, *, solved: Sequence[bool] | None = None) -> dict[str, float]:
    """Metrics of a whole rollout, from whichever of these columns the rows hold.

    reward `[B]` -> reward/* and groups/informative; response_length `[B]`, else loss_mask ragged ->
    response/length_*; finish `[B]` -> response/truncated; version `[B]` -> version; logp_rollout and logp_old with
    loss_mask, all ragged -> logp_diff/*. solved: whether each of the B responses is -> groups/solved and
    groups/unsolved, left out where it is None. Means over no trained token are NaN. Raises ValueError for no
    rows at all.
    """
    if not len(rows):
        raise ValueError("rollout_metrics: no rows; a rollout has at least one sample")
    columns = rows.columns
    out: dict[str, float] = {}
    if "reward" in columns:
        out |= reward_metrics(columns["reward"])
        out["groups/informative"] = informative_share(columns["reward"], rows.ids)
    if solved is not None:
        out |= group_shares(solved, rows.ids)
    if "response_length" in columns:
        out |= length_metrics(columns["response_length"].double())
    elif "loss_mask" in columns:
        out |= length_metrics(_row_sums(columns["loss_mask"]))
    if "finish" in columns:
        out["response/truncated"] = float((columns["finish"] == FINISH_LENGTH).double().mean())
    if "version" in columns:
        out["version"] = int(columns["version"].max())
    if {"loss_mask", "logp_rollout", "logp_old"} <= columns.keys():
        out |= logp_difference(columns["logp_rollout"], columns["logp_old"], columns["loss_mask"])
    return out


def reward_metrics(reward: Tensor) -> dict[str, float]:
    """Mean and sample standard deviation of rewards `[B]`; one sample has deviation 0."""
    reward = reward.double()
    return {"reward/mean": float(reward.mean()), "reward/std": float(reward.std()) if len(reward) > 1 else 0.0}


def grader_metrics(parts: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Mean of each column of the grades `[B, n]`, before weights, by the names of the n graders; of one alone nothing,
    for that says what the reward says."""
    means = parts.double().mean(0).tolist()
    return {f"reward/mean/{name}": mean for name, mean in zip(names, means, strict=True)} if len(names) > 1 else {}


def filtration_metrics(multiplicity: Tensor, reward: Tensor) -> dict[str, float]:
    """What filtration chose: share of `[B]` responses that are trained at all, and the mean reward of what is trained,
    each response as often as `multiplicity` `[B]` says."""
    weights = multiplicity.double()
    mean = float((weights * reward.double()).sum() / weights.sum().clamp(min=1))
    return {"filtration/distinct": float((multiplicity > 0).double().mean()), "filtration/reward_mean": mean}


def group_shares(solved: Sequence[bool], ids: Sequence[SampleId]) -> dict[str, float]:
    """Shares of groups whose responses, B in all groups together, are all solved, and of those where none is.

    A group is known by (epoch, group) of its ids, never by position.
    """
    groups: dict[tuple[int, int], list[bool]] = {}
    for sample, right in zip(ids, solved, strict=True):
        groups.setdefault((sample.epoch, sample.group), []).append(right)
    every = sum(all(g) for g in groups.values())
    none = sum(not any(g) for g in groups.values())
    count = len(groups)
    return {
        "groups/solved": every / count,
        "groups/unsolved": none / count,
    }


def informative_share(reward: Tensor, ids: Sequence[SampleId]) -> float:
    """Share of groups whose rewards, of `[B]` for all groups, are not all equal: the others have advantage 0
    throughout in a group-normalised algorithm. With graded rewards a group may inform where none or all is solved."""
    groups: dict[tuple[int, int], set[float]] = {}
    for sample, value in zip(ids, reward.tolist(), strict=True):
        groups.setdefault((sample.epoch, sample.group), set()).add(value)
    return sum(len(values) > 1 for values in groups.values()) / len(groups)


def length_metrics(lengths: Tensor) -> dict[str, float]:
    """Mean and longest of `[B]` responses in trained tokens."""
    return {"response/length_mean": float(lengths.mean()), "response/length_max": float(lengths.max())}


def logp_difference(logp_rollout: Ragged, logp_old: Ragged, loss_mask: Ragged) -> dict[str, float]:
    """Mean and largest |engine - trainer| log-prob over trained tokens, in nats; NaN where there is none."""
    trained = loss_mask.values.bool()
    diff = (logp_rollout.values.double() - logp_old.values.double()).abs()[trained]
    if not diff.numel():
        return {"logp_diff/mean": math.nan, "logp_diff/max": math.nan}
    return {"logp_diff/mean": float(diff.mean()), "logp_diff/max": float(diff.max())}


def token_count(rows: Rows) -> int:
    """Prompt and response tokens of the rows, T, from their column length, tokens or loss_mask."""
    if "length" in rows.columns:
        return int(rows["length"].sum())
    column = rows.columns.get("tokens", rows.columns.get("loss_mask"))
    if not isinstance(column, Ragged):
        held = sorted(rows.columns)
        raise ValueError(f"token_count needs the column length, tokens or loss_mask; the rows hold {held}")
    return int(column.offsets[-1] - column.offsets[0])


def throughput(tokens: int, *, devices: int, seconds: float) -> dict[str, float]:
    """Tokens a second, per device and of all devices, of one rollout whose iterations took `seconds` end to end.

    Equation 5 of the paper, T = G*N*(PL + SL) / ND / ETE, with one difference: the paper counts G*N
    samples at a fixed prompt and response length, this counts the tokens that really were there
    (`token_count`). With unequal lengths ours is the smaller number; with equal ones they agree.
    """
    if devices < 1 or not seconds > 0:
        raise ValueError(f"throughput: devices {devices} must be >= 1 and seconds {seconds} > 0")
    return {"tokens_per_second": tokens / devices / seconds, "tokens_per_second_total": tokens / seconds}


def largest(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each metric's largest value over ranks; a rank that did not measure it has no say."""
    out: dict[str, float] = {}
    for metrics in ranks:
        for name, value in metrics.items():
            out[name] = max(value, out.get(name, value))
    return out


def merge(*parts: Mapping[str, Metric]) -> dict[str, Metric]:
    """All metrics in one dict. Raises ValueError where two parts write the same name with unlike values."""
    out: dict[str, Metric] = {}
    for part in parts:
        for name, value in part.items():
            if name in out and out[name] != value:
                raise ValueError(f"metric {name!r} is written twice, as {out[name]} and as {value}; rename one")
            out[name] = value
    return out


def _row_sums(mask: Ragged) -> Tensor:
    """`[B]` float64 sums of the rows of a ragged `[T]` mask."""
    running = torch.cat([torch.zeros(1, dtype=torch.float64), mask.values.double().cumsum(0)])
    return running[mask.offsets[1:]] - running[mask.offsets[:-1]]
