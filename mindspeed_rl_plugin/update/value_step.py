"""The critic's optimizer step: the value loss through Megatron's own train_step, and metrics of the critic."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mindspeed_rl_plugin.algorithms.aggregate import sequence_weights
from mindspeed_rl_plugin.algorithms.value_loss import value_loss
from mindspeed_rl_plugin.forward import MicroBatch
from mindspeed_rl_plugin.forward.context_parallel import of_all_ranks
from mindspeed_rl_plugin.forward.pipeline import run_model
from mindspeed_rl_plugin.rows import Rows
from mindspeed_rl_plugin.update.step import MegatronStep

# Entries of a tally, summed over the trained tokens. Errors are those of the values from before the update.
MEANS = ("critic/loss", "critic/clip_fraction", "critic/value_mean", "critic/return_mean")  # names of `monitor.names`
TALLIED = (*MEANS, "return_square", "error", "error_square")


class ValueStep(MegatronStep):
    """The critic's step. Micro-batches have the columns `values` (from before the update) and `returns`. The loss is
    the mean over the trained tokens of the global batch, however the policy loss is aggregated."""

    inputs = ("values", "returns", "scored")

    def metrics(self) -> dict[str, float]:
        """See `value_metrics`."""
        return value_metrics(dict(zip(TALLIED, self._reduced(len(TALLIED)).tolist(), strict=True)), self._totals.tokens)

    def _needed(self, rows: Rows) -> list[str]:
        return ["values", "returns"]

    def _weigh(self, counts: Tensor) -> Tensor:
        return sequence_weights("token-mean", counts, self._totals)

    def _forward(self, model: torch.nn.Module, batch: MicroBatch) -> Tensor:
        return run_model(model, batch)

    def _loss(self, batch: MicroBatch, output: Tensor) -> tuple:
        weights, multiplicity = self.weights[batch.index], self._multiplicity[batch.index]
        values = of_all_ranks(output[..., 0], batch)
        return self._result(
            batch, *value_objective(batch, weights, multiplicity, values, self.algorithm.value_clip), "value loss"
        )


def value_objective(
    batch: MicroBatch, weights: Tensor, multiplicity: Tensor, values: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """The part of the value loss of the step that this micro-batch contributes, and its tally.

    batch: with columns `values` and `returns`; weights, multiplicity: as in `objective`; values: `[mb, S]` (packed:
    `[1, S]`), of the critic that is trained. Returns a scalar with its gradient, and a vector in the order `TALLIED`.
    """
    mask, sequence = batch.mask, batch.sequence
    old, returns = batch.columns["values"][mask], batch.columns["returns"][mask]
    terms = value_loss(values[mask], old, returns, clip)
    loss = (weights[sequence] * terms.loss).sum()
    counted = multiplicity[sequence].to(old)
    error = returns - old
    tally = {
        "critic/loss": (counted * terms.loss).sum(),
        "critic/clip_fraction": (counted * terms.clipped).sum(),
        "critic/value_mean": (counted * old).sum(),
        "critic/return_mean": (counted * returns).sum(),
        "return_square": (counted * returns.square()).sum(),
        "error": (counted * error).sum(),
        "error_square": (counted * error.square()).sum(),
    }
    return loss, torch.stack([tally[name].detach().float() for name in TALLIED])


def value_metrics(sums: Mapping[str, float], tokens: int) -> dict[str, float]:
    """The metrics of sums over `tokens` trained tokens, by the names of `monitor.names`.

    All are means, except `critic/explained_variance`: `1 - Var(return - value) / Var(return)` with the values from
    before the update. It is 1 for a perfect critic, 0 for a constant one, and is left out if all returns are equal.
    """
    n = max(tokens, 1)
    mean = {name: value / n for name, value in sums.items()}
    named = {name: mean[name] for name in MEANS}
    spread = mean["return_square"] - mean["critic/return_mean"] ** 2
    # A smaller variance is only a rounding error of float32.
    if spread > 1e-6 * mean["return_square"]:
        named["critic/explained_variance"] = 1.0 - (mean["error_square"] - mean["error"] ** 2) / spread
    return named
