"""Advantage estimators: they compute one number per sample or per token from the rewards of complete groups.

Every estimator takes a `RewardBatch` and the flags. It returns `[B]` (the same advantage on every trained token of a
sample) or a `Ragged` with an entry per token. Rows of a group are found by the group's id, never by their position, so
groups may be missing and rows may be in any order. Sums are in float64, so that order does not change float32 results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_rl_plugin.algorithms.rewards import row_sums, rows_of, token_rewards
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.rows import Ragged


@dataclass(frozen=True)
class RewardBatch:
    """The inputs of an estimator. Every group must be complete."""

    rewards: Tensor  # `[B]`, outcome reward of each response
    groups: Tensor  # `[B]` int64, equal for the responses of one prompt
    loss_mask: Ragged | None = None  # `[L]` uint8 per sample; None: the estimator does not need it
    kl_cost: Ragged | None = None  # `[L]` per sample, KL cost of each trained token; None: not in the reward
    values: Ragged | None = None  # `[L]` per sample, the critic's value before each token; None: no critic
    turn_rewards: Ragged | None = None  # `[L]` per sample, reward of each turn at its last token; None: no turns

    def __post_init__(self) -> None:
        if self.rewards.dim() != 1 or self.rewards.shape != self.groups.shape:
            raise ValueError(
                f"rewards and groups must be two vectors of one length, got shapes "
                f"{tuple(self.rewards.shape)} and {tuple(self.groups.shape)}"
            )
        bad = (~torch.isfinite(self.rewards)).nonzero().flatten().tolist()
        if bad:
            raise ValueError(
                f"reward {float(self.rewards[bad[0]])} at row {bad[0]} ({len(bad)} such rows of "
                f"{len(self.rewards)}) is not finite; the grader must return a finite number"
            )

    def outcome(self) -> Tensor:
        """`[B]` float64, R of each response: its reward minus the sum of its KL costs."""
        rewards = self.rewards.double()
        return rewards if self.kl_cost is None else rewards - row_sums(self.kl_cost)

    def token_rewards(self) -> Ragged:
        """Ragged `[L]` float64: each turn's reward at its last token, the rest of the response's reward on the last
        trained token, minus each token's KL cost."""
        return token_rewards(self.rewards, self.loss_mask, self.kl_cost, self.turn_rewards)


def group_norm(batch: RewardBatch, config: AlgorithmConfig) -> Tensor:
    """GRPO: `(R - mean_g) / (std_g + eps)`, sample standard deviation over the group.

    Returns `[B]` float32, exactly 0 for a group of one response or of equal R.
    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2.
    """
    groups = _GroupOutcomes(batch)
    variance = groups.sum(groups.centred.square()) / (groups.count - 1).clamp(min=1)
    # Avoids 0 / 0 if all R of a group are equal and eps is 0.
    return torch.where(
        groups.centred == 0, 0.0, groups.centred / (variance.sqrt()[groups.member] + config.advantage_eps)
    ).float()


def group_mean(batch: RewardBatch, config: AlgorithmConfig) -> Tensor:
    """Dr.GRPO: `R - mean_g`, no division by the standard deviation.

    Returns `[B]` float32, exactly 0 for a group of one response or of equal R.
    Source: arXiv 2503.20783, section 3.2.
    """
    return _GroupOutcomes(batch).centred.float()


def rloo(batch: RewardBatch, config: AlgorithmConfig) -> Tensor:
    """RLOO: R minus the mean R of the other responses to the prompt, `(R - mean_g) * N / (N - 1)`.

    Returns `[B]` float32. Groups have at least two responses (`AdvantageSpec.members`).
    Source: arXiv 2402.14740.
    """
    groups = _GroupOutcomes(batch)
    return (groups.centred * (groups.count / (groups.count - 1))[groups.member]).float()


def reinforce_plus_plus(batch: RewardBatch, config: AlgorithmConfig) -> Ragged:
    """REINFORCE++: discounted sum of the rewards rho of a token and all later ones, `A_t = rho_t + gamma * A_{t+1}`.

    Needs `loss_mask`. Masked tokens are skipped: t + 1 is the next trained token. Returns ragged `[L]` float64, 0 on
    masked tokens, to be whitened over the rollout (`whiten`). Source: arXiv 2501.03262.
    """
    return _backwards(batch.token_rewards(), batch.loss_mask, config.gamma)


def reinforce_baseline(batch: RewardBatch, config: AlgorithmConfig) -> Tensor:
    """REINFORCE++-baseline: `R - mean_g`, to be whitened over the trained tokens of the rollout.

    Returns `[B]` float64. Source: arXiv 2501.03262.
    """
    return _GroupOutcomes(batch).centred


def gae(batch: RewardBatch, config: AlgorithmConfig) -> Ragged:
    """PPO: `delta_t = rho_t + gamma * V_{t+1} - V_t`, `A_t = delta_t + gamma * lambda * A_{t+1}`.

    Needs `loss_mask` and `values`; rho: `token_rewards`. Masked tokens are skipped: t + 1 is the next trained token;
    after the last one V is 0. Returns ragged `[L]` float64, 0 on masked tokens. `returns` takes this result; for the
    policy loss the result is whitened over the rollout. Source: GAE, arXiv 1506.02438, Eq. 16; PPO, arXiv 1707.06347,
    Eq. 11.
    """
    trained = batch.loss_mask.values.bool()
    rows = rows_of(batch.loss_mask)[trained]
    values = batch.values.values.double()[trained]
    follows = torch.zeros_like(values)
    follows[:-1] = torch.where(rows[1:] == rows[:-1], values[1:], 0.0)
    delta = torch.zeros_like(batch.loss_mask.values, dtype=torch.float64)
    delta[trained] = batch.token_rewards().values[trained] + config.gamma * follows - values
    return _backwards(Ragged(delta, batch.loss_mask.offsets), batch.loss_mask, config.gamma * config.gae_lambda)


def returns(advantages: Ragged, values: Ragged, loss_mask: Ragged) -> Ragged:
    """The critic's targets: `A_t + V_t` with the advantages before whitening, ragged `[L]` float64.

    Source: PPO, arXiv 1707.06347, section 5.
    """
    return Ragged((advantages.values + values.values.double()) * loss_mask.values.bool(), loss_mask.offsets)


@dataclass(frozen=True)
class AdvantageSpec:
    """An estimator, and what it needs."""

    function: Callable[[RewardBatch, AlgorithmConfig], Tensor | Ragged]
    per_token: bool = False  # it returns a `Ragged`, one advantage per token
    whitened: bool = False  # its result is whitened over the rollout
    members: int = 2  # least number of responses to a prompt that it needs
    critic: bool = False  # it needs a critic's values


ADVANTAGES: dict[str, AdvantageSpec] = {
    "group-norm": AdvantageSpec(group_norm),
    "group-mean": AdvantageSpec(group_mean),
    "rloo": AdvantageSpec(rloo),
    "reinforce++": AdvantageSpec(reinforce_plus_plus, per_token=True, whitened=True, members=1),
    "reinforce++-baseline": AdvantageSpec(reinforce_baseline, whitened=True),
    "gae": AdvantageSpec(gae, per_token=True, whitened=True, members=1, critic=True),
}


class _GroupOutcomes:
    """Outcome rewards by group. member: `[B]`, number of each row's group; count: `[groups]` float64, number of rows of
    each group; centred: `[B]` float64, R minus the mean of its group."""

    def __init__(self, batch: RewardBatch) -> None:
        outcome = batch.outcome()
        names, self.member = batch.groups.unique(return_inverse=True)
        self.count = torch.bincount(self.member, minlength=names.numel()).double()
        centred = outcome - (self.sum(outcome) / self.count)[self.member]
        # For equal R exactly 0: the rounded mean may differ from R, and division by a small eps would magnify this.
        self.centred = torch.where(all_equal(outcome, self.member, names.numel())[self.member], 0.0, centred)

    def sum(self, values: Tensor) -> Tensor:
        """`[groups]` sum of `values` `[B]` over each group."""
        return values.new_zeros(self.count.numel()).index_add_(0, self.member, values)


def all_equal(values: Tensor, member: Tensor, groups: int) -> Tensor:
    """`[groups]` bool: whether all values of a group are equal. values: `[B]`; member: `[B]` int64, row's group."""
    low = values.new_empty(groups).scatter_reduce_(0, member, values, "amin", include_self=False)
    high = values.new_empty(groups).scatter_reduce_(0, member, values, "amax", include_self=False)
    return low == high


def _backwards(column: Ragged, loss_mask: Ragged, factor: float) -> Ragged:
    """`y_t = x_t + factor * y_{t+1}` over the trained tokens of each row, from its end; 0 on masked tokens."""
    trained = loss_mask.values.bool()
    counts = row_sums(Ragged(trained, loss_mask.offsets)).long()
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    width = int(counts.max()) if len(counts) else 0
    steps = Ragged(column.values.double()[trained], offsets).padded(width)
    for t in range(width - 2, -1, -1):
        steps[:, t] += factor * steps[:, t + 1]
    out = torch.zeros_like(column.values, dtype=torch.float64)
    out[trained] = steps[torch.arange(width) < counts[:, None]]
    return Ragged(out, column.offsets)
