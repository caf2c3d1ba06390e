"""Changes of the reward before the advantage estimator: KL to the reference, and DAPO's length penalty."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_rl_plugin.rows import Ragged


def overlong_penalty(lengths: Tensor, limit: int, buffer: int, factor: float) -> Tensor:
    """Soft overlong punishment: 0 up to `limit - buffer` tokens, then falling to `-factor` at `limit`.

    `min(0, -min(len - (L - B), B) / B * f)`, to be added to the reward. lengths: `[B]` response tokens; limit: L, the
    largest number of tokens of a response; buffer: B, in tokens, 0: no penalty; factor: f. Returns `[B]` float64.
    Source: DAPO, arXiv 2503.14476, Eq. 13 (L 20480, B 4096, f 1).
    """
    lengths = lengths.double()
    if buffer == 0:
        return torch.zeros_like(lengths)
    return (lengths - (limit - buffer)).clamp(0, buffer) * (-factor / buffer)


def token_rewards(
    rewards: Tensor, loss_mask: Ragged, kl_cost: Ragged | None = None, turn_rewards: Ragged | None = None
) -> Ragged:
    """Reward of each token: R on the last trained token of the response, minus the KL cost of each trained token.

    rewards: `[B]`, R; loss_mask, kl_cost, turn_rewards: ragged `[L]`; turn_rewards: parts of R that stay on the
    tokens where they are. Returns ragged `[L]` float64, 0 on masked tokens; the R of a response without a trained token
    is dropped. Source: InstructGPT, arXiv 2203.02155, Eq. 2.
    """
    rewards = rewards.double()
    trained = loss_mask.values.bool()
    position = torch.arange(1, trained.numel() + 1, device=trained.device) * trained
    out = torch.zeros(trained.numel(), dtype=torch.float64, device=trained.device)
    if kl_cost is not None:
        out -= kl_cost.values.double() * trained
    if turn_rewards is not None:
        out += turn_rewards.values.double() * trained
        rewards = rewards - row_sums(turn_rewards)
    bounds = loss_mask.offsets.tolist()
    for row, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        last = int(position[start:end].max()) if end > start else 0
        if last:
            out[last - 1] += rewards[row]
    return Ragged(out, loss_mask.offsets)


def rows_of(column: Ragged) -> Tensor:
    """`[T]` int64, row of each entry."""
    return torch.arange(len(column)).repeat_interleave(column.lengths.cpu()).to(column.values.device)


def row_sums(column: Ragged) -> Tensor:
    """`[B]` float64, sum of each row of a ragged column; 0 for an empty row."""
    out = torch.zeros(len(column), dtype=torch.float64, device=column.values.device)
    return out.index_add_(0, rows_of(column), column.values.double())
