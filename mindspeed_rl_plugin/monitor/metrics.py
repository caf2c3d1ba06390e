"""Metrics of a rollout: pure functions from rows to named numbers, and the register of all names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mindspeed_rl_plugin.types import Ragged, Rows, SampleId

FINISH_STOP, FINISH_LENGTH, FINISH_ABORT = 0, 1, 2


def rollout_metrics(rows: Rows, *, correct_at: float = 1.0) -> dict[str, float]:
    """Metrics of a whole rollout, from whichever of these columns the rows hold.

    reward `[B]` -> reward/*, groups/*; loss_mask ragged -> response/length_*; finish `[B]` ->
    response/truncated; version `[B]` -> version; logp_rollout and logp_old ragged -> logp_diff/*.
    correct_at: a reward from here on counts as correct (the sum of the graders' weights where they
    answer 0 or 1). Means over nothing are NaN. Raises ValueError for no rows at all.
    """
    if not len(rows):
        raise ValueError("rollout_metrics: no rows; a rollout has at least one sample")
    columns = rows.columns
    out: dict[str, float] = {}
    if "reward" in columns:
        out |= reward_metrics(columns["reward"])
        out |= group_shares(columns["reward"], rows.ids, correct_at=correct_at)
    if "loss_mask" in columns:
        out |= length_metrics(columns["loss_mask"])
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


def group_shares(reward: Tensor, ids: Sequence[SampleId], *, correct_at: float = 1.0) -> dict[str, float]:
    """Shares of groups whose samples are all correct, none correct, or mixed; the three sum to 1.

    reward: `[B]`; groups are told apart by (epoch, group) of the ids, never by position. Only mixed
    groups teach a group-normalised algorithm anything.
    """
    correct: dict[tuple[int, int], list[bool]] = {}
    # A weighted sum of exact rewards may miss its own maximum by rounding.
    bound = correct_at - 1e-6 * max(1.0, abs(correct_at))
    for sample, value in zip(ids, reward.tolist(), strict=True):
        correct.setdefault((sample.epoch, sample.group), []).append(value >= bound)
    solved = sum(all(c) for c in correct.values())
    unsolved = sum(not any(c) for c in correct.values())
    count = len(correct)
    return {
        "groups/solved": solved / count,
        "groups/unsolved": unsolved / count,
        "groups/mixed": (count - solved - unsolved) / count,
    }


def length_metrics(loss_mask: Ragged) -> dict[str, float]:
    """Mean and longest response in trained tokens, from the ragged mask of B samples."""
    lengths = _row_sums(loss_mask)
    return {"response/length_mean": float(lengths.mean()), "response/length_max": float(lengths.max())}


def logp_difference(logp_rollout: Ragged, logp_old: Ragged, loss_mask: Ragged) -> dict[str, float]:
    """Mean and largest |engine - trainer| log-prob over trained tokens, in nats; NaN where there is none."""
    trained = loss_mask.values.bool()
    diff = (logp_rollout.values.double() - logp_old.values.double()).abs()[trained]
    if not diff.numel():
        return {"logp_diff/mean": math.nan, "logp_diff/max": math.nan}
    return {"logp_diff/mean": float(diff.mean()), "logp_diff/max": float(diff.max())}


def token_count(rows: Rows) -> int:
    """Prompt and response tokens of the rows, T; padding does not exist in packed rows."""
    column = rows.columns.get("tokens", rows.columns.get("loss_mask"))
    if not isinstance(column, Ragged):
        raise ValueError(f"token_count needs the column tokens or loss_mask; the rows hold {sorted(rows.columns)}")
    return int(column.offsets[-1] - column.offsets[0])


def throughput(tokens: int, *, devices: int, seconds: float) -> dict[str, float]:
    """Tokens a second, per device and of all devices, of one iteration that took `seconds` end to end.

    Equation 5 of the paper, T = G*N*(PL + SL) / ND / ETE, with one difference: the paper counts G*N
    samples at a fixed prompt and response length, this counts the tokens that really were there
    (`token_count`). With unequal lengths ours is the smaller number; with equal ones they agree (`paper_throughput`).
    """
    if devices < 1 or not seconds > 0:
        raise ValueError(f"throughput: devices {devices} must be >= 1 and seconds {seconds} > 0")
    return {"tokens_per_second": tokens / devices / seconds, "tokens_per_second_total": tokens / seconds}


def paper_throughput(
    *, groups: int, members: int, prompt_length: int, response_length: int, devices: int, seconds: float
) -> float:
    """Equation 5 of the paper to the letter: G*N*(PL + SL) / ND / ETE, tokens a second and device."""
    tokens = groups * members * (prompt_length + response_length)
    return throughput(tokens, devices=devices, seconds=seconds)["tokens_per_second"]


def merge(*parts: Mapping[str, float]) -> dict[str, float]:
    """All metrics in one dict. Raises ValueError where two parts write the same name with unlike values."""
    out: dict[str, float] = {}
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
