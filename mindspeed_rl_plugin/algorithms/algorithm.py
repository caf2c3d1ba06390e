"""An algorithm with every part chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_rl_plugin.algorithms.aggregate import Totals, sequence_weights
from mindspeed_rl_plugin.algorithms.corrections import CORRECTIONS
from mindspeed_rl_plugin.algorithms.estimators import ADVANTAGES, RewardBatch
from mindspeed_rl_plugin.algorithms.kl import KL_ESTIMATORS
from mindspeed_rl_plugin.algorithms.losses import LOSSES, Bounds, LossSpec, PolicyTerms, TrainedTokens
from mindspeed_rl_plugin.algorithms.rewards import overlong_penalty
from mindspeed_rl_plugin.algorithms.selection import resample, uniform_draws
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.rows import Ragged, SampleId


@dataclass(frozen=True)
class Algorithm(AlgorithmConfig):
    """The result of `presets.resolve`: a value for each flag (the preset's if the flag was not given), and derived
    settings."""

    bounds: Bounds = Bounds()  # of the policy loss: from the flags, else the defaults of this loss
    # if `overlong_buffer` is None: the length penalty rises over this last fraction of the response limit
    overlong_share: float = 0.0
    # whether old log-probs are a column; if not, the update uses its own log-probs, detached, instead
    old_logps: bool = True

    @property
    def from_pairs(self) -> bool:
        """Whether the algorithm learns from given pairs of responses and samples nothing."""
        return self.loss == "dpo"

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs under the frozen reference are needed at all."""
        return self.from_pairs or self.kl_loss_coef != 0.0 or self.kl_reward_coef != 0.0

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage needs a critic's values."""
        return not self.from_pairs and ADVANTAGES[self.advantage].critic

    @property
    def loss_spec(self) -> LossSpec:
        """The entry of the policy loss in `LOSSES`, with its default bounds. DPO has none."""
        return LOSSES[self.loss]

    @property
    def members(self) -> int:
        """Least number of responses to a prompt that the advantage needs."""
        return 1 if self.from_pairs else ADVANTAGES[self.advantage].members

    @property
    def per_token(self) -> bool:
        """Whether advantages differ between the tokens of a response."""
        return ADVANTAGES[self.advantage].per_token

    @property
    def filters(self) -> bool:
        """Whether responses are resampled by their rewards."""
        return self.filtration != "none"

    @property
    def whitened(self) -> bool:
        """Whether advantages are to be whitened over the rollout (`whiten`)."""
        return ADVANTAGES[self.advantage].whitened

    def buffer(self, limit: int) -> int:
        """Number of tokens before `limit` over which the length penalty rises; 0: no penalty. limit: largest number of
        tokens of a response."""
        if self.overlong_buffer is not None:
            return self.overlong_buffer
        return max(1, round(self.overlong_share * limit)) if self.overlong_share else 0

    def shaped(self, rewards: Tensor, lengths: Tensor, limit: int) -> Tensor:
        """`[B]` rewards with the length penalty. lengths: `[B]` response tokens; limit: as in `buffer`."""
        return rewards.double() + overlong_penalty(lengths, limit, self.buffer(limit), self.overlong_penalty)

    def kl_cost(self, logp_old: Ragged, logp_ref: Ragged, loss_mask: Ragged) -> Ragged:
        """What the KL to the reference subtracts from the reward of each token, ragged `[L]`; 0 on masked tokens."""
        estimate = KL_ESTIMATORS[self.kl_reward_estimator](logp_old.values.double(), logp_ref.values.double())
        return Ragged(self.kl_reward_coef * torch.where(loss_mask.values.bool(), estimate, 0.0), loss_mask.offsets)

    def advantages(self, batch: RewardBatch) -> Tensor | Ragged:
        """Advantages of complete groups, before whitening: `[B]`, or ragged `[L]` if `per_token`."""
        return ADVANTAGES[self.advantage].function(batch, self)

    def multiplicity(self, rewards: Tensor, pools: Tensor, ids: Sequence[SampleId], seed: int) -> Tensor:
        """`[B]` int32, how often each row is trained. Each pool is resampled with replacement: a pool of n rows has n
        draws, and a row is trained as often as it was drawn, whatever the order of the rows.

        rewards: `[B]`; pools: `[B]` int64, equal for the rows of a pool; ids: of the rows; seed: of the draws.
        """
        order = torch.tensor(sorted(range(len(ids)), key=ids.__getitem__), dtype=torch.int64)
        draws = uniform_draws(seed, [ids[i] for i in order.tolist()])
        chosen = resample(rewards[order], pools[order], draws, rule=self.filtration, power=self.filtration_power)
        return torch.bincount(order[chosen], minlength=len(ids)).to(torch.int32)

    def policy_terms(self, tokens: TrainedTokens) -> PolicyTerms:
        """Policy loss of each trained token, its ratio, and whether it is clipped; each `[T]`."""
        return LOSSES[self.loss].function(tokens, self.bounds)

    def corrected(self, weights: Tensor) -> Tensor | None:
        """Factor of the policy loss of each token, `[T]`, from its importance weight; None: no factor."""
        function = CORRECTIONS[self.correction].function
        return None if function is None else function(weights, self.correction_low, self.correction_high)

    def out_of_bounds(self, weights: Tensor) -> Tensor:
        """`[T]` bool, whether an importance weight is outside the bounds of the correction (which may be off)."""
        return (weights < self.correction_low) | (weights > self.correction_high)

    def kl(self, logp: Tensor, logp_ref: Tensor) -> Tensor:
        """KL to the reference at each trained token, `[T]`."""
        return KL_ESTIMATORS[self.kl_estimator](logp, logp_ref)

    def weights(self, counts: Tensor, totals: Totals) -> Tensor:
        """See `sequence_weights`: `[B]` float64. counts: `[B]`, number of trained tokens of each sequence."""
        return sequence_weights(self.aggregation, counts, totals)
