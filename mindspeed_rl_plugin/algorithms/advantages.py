"""Advantage estimators: from the rewards of whole groups to one number a sample or a token.

Every estimator takes a `RewardBatch` and `eps` and returns `[B]` (the same advantage on every trained
token of the sample) or a `Ragged` aligned with the tokens. Groups are told apart by their id and
never by position: rows may be filtered, balanced, or arrive in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_rl_plugin.types import Ragged, SampleId


@dataclass(frozen=True)
class RewardBatch:
    """What an estimator may read. Every group in it must be whole.

    rewards: `[B]` outcome reward of each response; groups: `[B]` int64, equal for the responses of
    one prompt; loss_mask: ragged `[L]` uint8 a sample, or None where an estimator does not need it.
    """

    rewards: Tensor
    groups: Tensor
    loss_mask: Ragged | None = None

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


Estimator = Callable[..., "Tensor | Ragged"]


def group_norm(batch: RewardBatch, eps: float) -> Tensor:
    """GRPO: `(R - mean_g) / (std_g + eps)`, sample standard deviation over the group.

    Returns `[B]` float32. A group of one response, or one whose rewards are all equal, gives exactly 0.
    Computed in float64, so that the order of the rows cannot be seen in the result at float32.
    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2.
    """
    rewards = batch.rewards.double()
    names, member = batch.groups.unique(return_inverse=True)
    count = torch.bincount(member, minlength=names.numel()).double()
    centred = rewards - _group_sum(rewards, member, names.numel())[member] / count[member]
    variance = _group_sum(centred.square(), member, names.numel()) / (count - 1).clamp(min=1)
    normed = centred / (variance.sqrt()[member] + eps)
    # Rounding leaves a mean of equal rewards a hair beside them, which a small eps would blow up.
    return torch.where(_all_equal(rewards, member, names.numel())[member], 0.0, normed).float()


ADVANTAGES: dict[str, Estimator] = {
    "group-norm": group_norm,
}


def group_index(ids: Sequence[SampleId]) -> Tensor:
    """`[B]` int64, one number for each (epoch, group) among `ids`."""
    seen: dict[tuple[int, int], int] = {}
    numbers = [seen.setdefault((sample.epoch, sample.group), len(seen)) for sample in ids]
    return torch.tensor(numbers, dtype=torch.int64)


def spread(advantages: Tensor, loss_mask: Ragged) -> Ragged:
    """Put one advantage a sample on each of its trained tokens.

    advantages: `[B]`; loss_mask: ragged `[L]`. Returns ragged `[L]` float32, 0.0 where the mask is 0.
    """
    lengths = loss_mask.lengths.to(advantages.device)
    values = advantages.float().repeat_interleave(lengths) * loss_mask.values.to(advantages.device).float()
    return Ragged(values, loss_mask.offsets)


def _group_sum(values: Tensor, member: Tensor, groups: int) -> Tensor:
    return values.new_zeros(groups).index_add_(0, member, values)


def _all_equal(values: Tensor, member: Tensor, groups: int) -> Tensor:
    """`[groups]` bool: whether the group's values are one and the same number."""
    low = values.new_empty(groups).scatter_reduce_(0, member, values, "amin", include_self=False)
    high = values.new_empty(groups).scatter_reduce_(0, member, values, "amax", include_self=False)
    return low == high
