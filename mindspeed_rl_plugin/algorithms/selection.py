"""Which samples are trained: DAPO's dynamic sampling and PF-PPO's filtration, as pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mindspeed_rl_plugin.algorithms.estimators import all_equal
from mindspeed_rl_plugin.rows import SampleId


def carries_signal(rewards: Tensor, groups: Tensor) -> Tensor:
    """Dynamic sampling: a group is kept unless its rewards are all equal, since then every advantage would be 0.

    rewards: `[B]` *task* rewards, before any length penalty; groups: `[B]` int64. Returns `[B]` bool, the same for
    all rows of a group. Source: DAPO, arXiv 2503.14476, Eq. 11.
    """
    names, member = groups.unique(return_inverse=True)
    return ~all_equal(rewards, member, names.numel())[member]


def best_worst(rewards: Tensor, power: float) -> Tensor:
    """Weight 1 for the largest and the smallest reward, 0 for others. Source: PF-PPO, arXiv 2409.06957."""
    return ((rewards == rewards.max()) | (rewards == rewards.min())).double()


def best_random(rewards: Tensor, power: float) -> Tensor:
    """Weight 0.4 for the largest reward, 0.1 for the others. Source: PF-PPO, arXiv 2409.06957."""
    return torch.full_like(rewards, 0.1, dtype=torch.float64).masked_fill(rewards == rewards.max(), 0.4)


def reward_power(rewards: Tensor, power: float) -> Tensor:
    """Weight `|R|^p`; equal weights if all rewards are 0. Source: verl, compute_pf_ppo_reweight_data ("pow")."""
    weights = rewards.double().abs() ** power
    return weights if bool(weights.any()) else torch.ones_like(weights)


FILTRATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "best-worst": best_worst,
    "best-random": best_random,
    "pow": reward_power,
}


def resample(rewards: Tensor, groups: Tensor, draws: Tensor, *, rule: str, power: float = 2.0) -> Tensor:
    """PF-PPO: each row is replaced by a row of its group, chosen with replacement by the weights of `rule`.

    rewards: `[B]`; groups: `[B]` int64; draws: `[B]` uniform in [0, 1), one per row (`uniform_draws`); rule: a name in
    `FILTRATIONS`. Returns `[B]` int64, the row that replaces each row; it depends on the order of the rows in a group.
    verl takes all rows as one group; if rewards are only 0 and 1, that filters little. Source: PF-PPO, arXiv
    2409.06957; verl, compute_pf_ppo_reweight_data.
    """
    chosen = torch.empty(len(rewards), dtype=torch.int64)
    for name in groups.unique().tolist():
        rows = (groups == name).nonzero().flatten()
        edges = FILTRATIONS[rule](rewards[rows], power).cumsum(0)
        # right=True: a draw on an edge takes the row after it, so that a row of weight 0 is never chosen.
        place = torch.searchsorted(edges, draws[rows].double() * edges[-1], right=True)
        chosen[rows] = rows[place.clamp(max=int((edges < edges[-1]).sum()))]
    return chosen


def uniform_draws(seed: int, ids: Sequence[SampleId]) -> Tensor:
    """`[B]` float64 in [0, 1). The draw of a row depends only on seed and id, so it is the same on every rank."""
    digests = [hashlib.blake2b(f"{seed}/{tuple(i)}".encode(), digest_size=8).digest() for i in ids]
    return torch.tensor([(int.from_bytes(d, "big") >> 11) / 2**53 for d in digests], dtype=torch.float64)
