"""One micro-batch's part of the loss of the step, and its sums for the metrics. Pure tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_rl_plugin.algorithms import Algorithm, TrainedTokens
from mindspeed_rl_plugin.algorithms.kl import k3
from mindspeed_rl_plugin.forward import MicroBatch

# Sums weighted as the loss is; sums over trained tokens, to be divided by their number; maxima.
WEIGHTED = ("loss", "pg_loss", "kl_loss", "entropy_loss")
PER_TOKEN = ("ratio", "clip_fraction", "entropy", "kl", "kl_old", "logp_diff_mean")
MAXIMA = ("ratio_max", "ratio_min", "logp_diff_max")


def objective(
    algorithm: Algorithm, batch: MicroBatch, weights: Tensor, logp: Tensor, entropy: Tensor
) -> tuple[Tensor, Tensor]:
    """Part of the global loss that this micro-batch contributes, and its tally.

    batch: with columns `logp_old` and `advantages`, `logp_ref` where the algorithm needs it, `logp_rollout`
    where known; weights: `[mb]` weight of a trained token of each row; logp, entropy: `[mb, S]`.
    Returns the scalar `sum_t w_t * (policy + kl_coef * KL - entropy_coef * H)` with its gradient, and
    a detached vector laid out as `WEIGHTED + PER_TOKEN + MAXIMA`. The ratio is tallied as ratio - 1, so that
    the mean of ratios of 1 is 1 to the last bit; `ratio_min` as a maximum of its negative.
    """
    mask = batch.mask
    sequence = mask.nonzero()[:, 0]
    tokens = TrainedTokens(logp[mask], batch.columns["logp_old"][mask], batch.columns["advantages"][mask], sequence)
    entropy = entropy[mask]
    weight = weights[sequence]
    zero = torch.zeros_like(tokens.logp_old)

    terms = algorithm.policy_terms(tokens)
    reference = batch.columns.get("logp_ref")
    kl = algorithm.kl(tokens.logp, reference[mask]) if reference is not None else zero
    rollout = batch.columns.get("logp_rollout")
    engine_gap = (tokens.logp_old - rollout[mask]).abs() if rollout is not None else zero

    pg_loss = (weight * terms.loss).sum()
    kl_loss = algorithm.kl_loss_coef * (weight * kl).sum()
    entropy_loss = -algorithm.entropy_coef * (weight * entropy).sum()
    loss = pg_loss + kl_loss + entropy_loss
    tally = [
        *(loss, pg_loss, kl_loss, entropy_loss),
        *(x.sum() for x in (terms.ratio - 1.0, terms.clipped.float(), entropy, kl)),
        k3(tokens.logp_old, tokens.logp.detach()).sum(),
        engine_gap.sum(),
        *(_maximum(x) for x in (terms.ratio, -terms.ratio, engine_gap)),
    ]
    return loss, torch.stack([x.detach().float() for x in tally])


def _maximum(values: Tensor) -> Tensor:
    """Largest value, -inf of none."""
    return values.max() if values.numel() else values.new_tensor(-torch.inf)
