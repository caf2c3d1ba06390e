"""Forward step, data iterator and metrics of one optimizer step on preference pairs, for Megatron's train_step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from mindspeed_rl_plugin.algorithms import Algorithm
from mindspeed_rl_plugin.algorithms.pair_losses import Pairs, pair_terms
from mindspeed_rl_plugin.forward import ForwardSettings, MicroBatch, collate
from mindspeed_rl_plugin.forward.schedule import data_iterators, device_of, head_of, is_last_stage, run_model
from mindspeed_rl_plugin.rows import Rows
from mindspeed_rl_plugin.update.megatron_loss import scaling_of_job
from mindspeed_rl_plugin.update.tallies import reduce_tallies

# Sums over pairs; log-probs are summed over a response's trained tokens, in nats.
TALLY = ("loss", "margin", "accuracy", "chosen_reward", "rejected_reward", "chosen_logp", "rejected_logp", "pairs")


def pair_objective(algorithm: Algorithm, logp: Tensor, mask: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the pair losses of a micro-batch with its gradient, and its tally `[len(TALLY)]`, detached.

    logp, mask: `[2 * p, S]`, rows in the order chosen, rejected, chosen, ...; reference: `[2 * p]` log-prob of each
    response under the reference. The loss of the step is the sum over all pairs / their number.
    """
    sums = torch.where(mask, logp, 0.0).sum(1)
    counts = mask.sum(1).to(sums)
    pairs = Pairs(sums[0::2], sums[1::2], reference[0::2], reference[1::2], counts[0::2], counts[1::2])
    terms = pair_terms(algorithm.dpo_loss, pairs, algorithm.pairs)
    gains = algorithm.pairs.beta * (sums - reference).detach()
    if algorithm.pairs.length_norm:
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


class PairStep:
    """As `update.step.PolicyStep`, for pairs: `prepare`, `run`, `metrics`. model: this rank's chunks; pairs: of the
    global batch."""

    def __init__(
        self, algorithm: Algorithm, settings: ForwardSettings, model: Sequence[torch.nn.Module], pairs: int
    ) -> None:
        self.algorithm, self.settings, self.model, self._pairs = algorithm, settings, model, pairs
        self._device = device_of(model)
        self._per_token = bool(get_model_config(model[0]).calculate_per_token_loss)
        self._batches: list[MicroBatch] = []
        self._references: list[Tensor] = []
        self._tallies: dict[int, Tensor] = {}

    def prepare(self, micro_batches: Sequence[Rows]) -> None:
        """Take the rows of the next optimizer step.

        micro_batches: this data parallel rank's, each of `micro_batch_size` rows, the two of a pair beside each other,
        chosen first, with `tokens`, `loss_mask` (ragged `[L]`) and `reference` (`[B]`).
        Collective over the data parallel ranks. Raises ValueError for a pair that is cut, and for a wrong number of
        micro-batches.
        """
        expected = num_microbatches_calculator.get_num_microbatches()
        if len(micro_batches) != expected:
            raise ValueError(f"{len(micro_batches)} micro-batches prepared where Megatron's step runs {expected}")
        for rows in micro_batches:
            ids = rows.ids
            if any(a.member or b != (a.epoch, a.group, 1) for a, b in zip(ids[0::2], ids[1::2], strict=True)):
                raise ValueError(f"a micro-batch cuts a pair: {[tuple(i) for i in ids[:4]]}")
        self._batches = [collate(rows, self.settings, index=i) for i, rows in enumerate(micro_batches)]
        self._references = [rows["reference"].float().to(self._device) for rows in micro_batches]
        tokens = torch.stack([batch.mask.sum() for batch in self._batches]).sum().to(self._device)
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
        self._scaling = scaling_of_job(len(self._batches), per_token=self._per_token, total_tokens=int(tokens))
        self._tallies = {}

    def run(self, train_step: Callable[..., tuple], args: tuple, kwargs: Mapping[str, Any]) -> tuple:
        """Megatron's `train_step` on what was prepared. args: what it is given after forward step and iterator."""
        return train_step(self.forward_step, self.iterator(), *args, **kwargs)

    def iterator(self) -> Any:
        """A fresh data iterator over the prepared micro-batches; a list of them under virtual pipeline stages."""
        return data_iterators(self._batches, len(self.model))

    def forward_step(
        self, data_iterator: Iterator[MicroBatch], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[..., tuple]]:
        """Megatron's forward step function: runs one micro-batch and returns its output and loss function."""
        batch = next(data_iterator).to(self._device)
        return run_model(model, batch, self.settings), functools.partial(self._loss, batch)

    def metrics(self) -> dict[str, float]:
        """Means over the pairs of the global batch by the names of `TALLY`, the same on all ranks. Collective."""
        assert len(self._tallies) == (len(self._batches) if is_last_stage() else 0), "metrics before the step ran"
        width = len(TALLY)
        tally = reduce_tallies(self._tallies.values(), self._device, width=width, sums=width)
        sums = dict(zip(TALLY, tally.tolist(), strict=True))
        assert sums["pairs"] == self._pairs
        return {name: value / self._pairs for name, value in sums.items() if name != "pairs"}

    def _loss(self, batch: MicroBatch, output: Tensor) -> tuple:
        logp, _ = head_of(output, batch, self.settings)
        total, tally = pair_objective(self.algorithm, logp, batch.mask, self._references[batch.index])
        self._tallies[batch.index] = tally  # by index, for Megatron may run a step again
        loss = total / self._pairs
        seen = (loss.detach() * (self._scaling.micro_batches * self._scaling.dp_size)).view(1)
        return self._scaling.result(loss, batch.mask.sum(), {"loss": seen})
