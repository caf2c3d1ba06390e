"""What one micro-batch contributes to the loss of a step and to its metrics. Pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_rl_plugin.algorithms import Algorithm, TrainedTokens
from mindspeed_rl_plugin.algorithms.corrections import CORRECTION_LEVELS, importance_weights
from mindspeed_rl_plugin.algorithms.kl import k3
from mindspeed_rl_plugin.forward import MicroBatch

# Entries of a tally (sums and maxima for the metrics), by the names of `monitor.names`: sums with the weights of the
# loss; sums over trained tokens; sums over sequences that have a trained token; maxima.
WEIGHTED = ("loss", "loss/policy", "loss/kl", "loss/entropy")
PER_TOKEN = (
    *("ratio/mean", "clip_fraction", "entropy", "kl/ref", "kl/old", "logp_diff/mean"),
    *("rollout/weight_mean", "rollout/weight_outside", "rollout/kl", "rollout/stale"),
)
PER_SEQUENCE = (
    *("rollout/sequence_weight_mean", "rollout/sequence_weight_outside"),
    *("rollout/geometric_weight_mean", "rollout/geometric_weight_outside"),
)
MAXIMA = ("ratio/max", "ratio/min", "logp_diff/max", "rollout/weight_max")


def objective(
    algorithm: Algorithm,
    batch: MicroBatch,
    weights: Tensor,
    multiplicity: Tensor,
    fresh: Tensor,
    logp: Tensor,
    entropy: Tensor,
) -> tuple[Tensor, Tensor]:
    """The part of the loss of the step that this micro-batch contributes, and its tally.

    batch: with columns `advantages`, `logp_rollout`, and, if the algorithm needs them, `logp_old` and `logp_ref`.
    weights: `[mb]`, weight of a trained token of each row. multiplicity: `[mb]`, how often a row counts in the tally
    (`weights` has this factor already). fresh: `[mb]` bool, rows that the weights of this rollout sampled; only these
    show whether engine and trainer agree. logp, entropy: `[mb, S]`. Returns the scalar `sum_t w_t * (c_t * policy +
    kl_coef * KL - entropy_coef * H)` with its gradient (c_t: off-policy correction, or 1), and the tally, a detached
    vector in the order `WEIGHTED + PER_TOKEN + PER_SEQUENCE + MAXIMA`. Ratios and importance weights are
    summed as `x - 1`, so that the mean of ratios of 1 is exactly 1; `ratio/min` is the maximum of negative ratios.
    """
    mask = batch.mask
    sequence = batch.sequence
    logp, advantages = logp[mask], batch.columns["advantages"][mask]
    logp_old = batch.columns["logp_old"][mask] if algorithm.old_logps else logp.detach()
    tokens = TrainedTokens(logp, logp_old, advantages, sequence, len(weights))
    entropy = entropy[mask]
    weight = weights[sequence]
    zero = torch.zeros_like(tokens.logp_old)
    counted = multiplicity[sequence].to(tokens.logp_old)

    terms = algorithm.policy_terms(tokens)
    reference = batch.columns.get("logp_ref")
    kl = algorithm.kl(tokens.logp, reference[mask]) if reference is not None else zero
    correction, gap = _engine_gap(algorithm, tokens, batch.columns["logp_rollout"][mask], counted, fresh[sequence])

    policy = terms.loss if correction is None else correction * terms.loss
    pg_loss = (weight * policy).sum()
    kl_loss = algorithm.kl_loss_coef * (weight * kl).sum()
    entropy_loss = -algorithm.entropy_coef * (weight * entropy).sum()
    tally = {
        "loss": pg_loss + kl_loss + entropy_loss,
        "loss/policy": pg_loss,
        "loss/kl": kl_loss,
        "loss/entropy": entropy_loss,
        "ratio/mean": (counted * (terms.ratio - 1.0)).sum(),
        "clip_fraction": (counted * terms.clipped).sum(),
        "entropy": (counted * entropy).sum(),
        "kl/ref": (counted * kl).sum(),
        "kl/old": (counted * k3(tokens.logp_old, tokens.logp.detach())).sum(),
        "ratio/max": _maximum(terms.ratio),
        "ratio/min": _maximum(-terms.ratio),
        **gap,
    }
    names = WEIGHTED + PER_TOKEN + PER_SEQUENCE + MAXIMA
    return tally["loss"], torch.stack([tally[name].detach().float() for name in names])


def _engine_gap(
    algorithm: Algorithm, tokens: TrainedTokens, rollout: Tensor, counted: Tensor, fresh: Tensor
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The off-policy correction `[T]` (None: off), and metrics of the gap between engine and trainer for the tally."""
    old, sequence, rows = tokens.logp_old, tokens.sequence, tokens.sequences
    by_level = {level: importance_weights(old, rollout, sequence, rows, level) for level in CORRECTION_LEVELS}
    token = by_level["token"]
    # Each of the n tokens of a sequence counts 1 / n, so the sequence counts once.
    once = counted / torch.bincount(sequence, minlength=rows).clamp(min=1)[sequence]
    outside = {level: algorithm.out_of_bounds(weights).float() for level, weights in by_level.items()}
    difference = (old - rollout).abs()
    return algorithm.corrected(by_level[algorithm.correction_level]), {
        "logp_diff/mean": (counted * difference)[fresh].sum(),
        "logp_diff/max": _maximum(difference[fresh]),
        "rollout/weight_mean": (counted * (token - 1.0)).sum(),
        "rollout/weight_outside": (counted * outside["token"]).sum(),
        "rollout/weight_max": _maximum(token),
        "rollout/kl": (counted * k3(rollout, old)).sum(),
        "rollout/stale": counted[~fresh].sum(),
        **{f"rollout/{n}_weight_mean": (once * (by_level[n] - 1.0)).sum() for n in CORRECTION_LEVELS[1:]},
        **{f"rollout/{n}_weight_outside": (once * outside[n]).sum() for n in CORRECTION_LEVELS[1:]},
    }


def _maximum(values: Tensor) -> Tensor:
    """Largest value; -inf without values."""
    return values.max() if values.numel() else values.new_tensor(-torch.inf)
