"""Forward step, data iterator and metrics of one optimizer step on preference pairs, for Megatron's train_step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mindspeed_rl_plugin.algorithms import Algorithm
from mindspeed_rl_plugin.algorithms.pair_losses import PairBatch, pair_terms
from mindspeed_rl_plugin.forward import ForwardSettings, MicroBatch
from mindspeed_rl_plugin.forward.pipeline import head_of
from mindspeed_rl_plugin.rows import Rows
from mindspeed_rl_plugin.update.step import MegatronStep

# Entries of a tally, summed over pairs; log-probs are sums over a response's trained tokens, in nats.
TALLY = ("loss", "margin", "accuracy", "chosen_reward", "rejected_reward", "chosen_logp", "rejected_logp", "pairs")


def pair_objective(algorithm: Algorithm, logp: Tensor, mask: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the pair losses of a micro-batch with its gradient, and its tally `[len(TALLY)]`, detached.

    logp, mask: `[2 * p, S]`, rows in the order chosen, rejected, chosen, ...; reference: `[2 * p]`, log-prob of each
    response under the reference. The loss of the step is the mean over all pairs of the global batch.
    """
    sums = torch.where(mask, logp, 0.0).sum(1)
    counts = mask.sum(1).to(sums)
    pairs = PairBatch(sums[0::2], sums[1::2], reference[0::2], reference[1::2], counts[0::2], counts[1::2])
    terms = pair_terms(pairs, algorithm)
    gains = algorithm.dpo_beta * (sums - reference).detach()
    if algorithm.dpo_length_norm:
        gains = gains / counts.clamp(min=1)
    tally = {
        "loss": terms.loss,
        "margin": terms.margin,
        "accuracy": terms.margin > 0,
        "chosen_reward": gains[0::2],
        "rejected_reward": gains[1::2],
        "chosen_logp": pairs.chosen,
        "rejected_logp": pairs.rejected,
        "pairs": torch.ones_like(terms.loss),
    }
    return terms.loss.sum(), torch.stack([tally[name].detach().float().sum() for name in TALLY])


class PairStep(MegatronStep):
    """The policy's step on pairs. In micro-batches the rejected row of a pair follows the chosen one; there is a column
    `reference` (`[B]`). `prepare` raises ValueError for other orders. pairs: their number in the global batch."""

    def __init__(
        self, algorithm: Algorithm, settings: ForwardSettings, model: Sequence[torch.nn.Module], pairs: int
    ) -> None:
        super().__init__(algorithm, settings, model)
        self._pairs = pairs
        self._references: dict[int, Tensor] = {}  # by micro-batch

    def metrics(self) -> dict[str, float]:
        """Means over the pairs of the global batch, by the names of `monitor.names`."""
        sums = dict(zip(TALLY, self._reduced(len(TALLY)).tolist(), strict=True))
        assert sums.pop("pairs") == self._pairs
        return {name if name == "loss" else f"dpo/{name}": value / self._pairs for name, value in sums.items()}

    def _needed(self, rows: Rows) -> list[str]:
        return ["reference"]

    def _weigh(self, counts: Tensor) -> Tensor:
        return torch.ones_like(counts)

    def _collate(self, index: int, rows: Rows) -> MicroBatch:
        ids = rows.ids
        if any(a.member or b != (a.epoch, a.group, 1) for a, b in zip(ids[0::2], ids[1::2], strict=True)):
            raise ValueError(f"a micro-batch cuts a pair; the ids of its first rows are {[tuple(i) for i in ids[:4]]}")
        if "reference" in rows.columns:
            self._references[index] = rows["reference"].float().to(self._device)
        return super()._collate(index, rows)

    def _loss(self, batch: MicroBatch, output: Tensor) -> tuple:
        logp, _ = head_of(output, batch, self.settings)
        logp, mask = (_by_row(each, batch) for each in (logp, batch.mask))
        total, tally = pair_objective(self.algorithm, logp, mask, self._references[batch.index])
        return self._result(batch, total / self._pairs, tally)


def _by_row(values: Tensor, batch: MicroBatch) -> Tensor:
    """`[2 * p, S]`, padded with 0; packed values `[1, S]` are divided into their rows."""
    if batch.segments is None:
        return values
    rows = values[0, : int(batch.lengths.sum())].split(batch.lengths.tolist())
    return pad_sequence(rows, batch_first=True)
