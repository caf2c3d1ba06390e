"""Forward step, data iterator and metrics of one optimizer step, for Megatron's own train_step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from megatron.core import num_microbatches_calculator
from megatron.core.utils import get_model_config
from torch import Tensor

from mindspeed_rl_plugin.algorithms import Algorithm, Totals
from mindspeed_rl_plugin.forward import ForwardSettings, MicroBatch, collate, router_replay
from mindspeed_rl_plugin.forward.pipeline import (
    data_iterators,
    device_of,
    ends_here,
    head_of,
    micro_batch_count,
    run_model,
)
from mindspeed_rl_plugin.rows import Ragged, Rows, spread
from mindspeed_rl_plugin.update.megatron_loss import scaling_of_job
from mindspeed_rl_plugin.update.objective import objective
from mindspeed_rl_plugin.update.tallies import SUM_COUNT, reduce_tallies, summed, to_metrics


class MegatronStep:
    """Optimizer steps by Megatron's own `train_step`. For each step every rank calls `prepare`, `run` and `metrics`.

    model: this rank's chunks; norm_length: constant of the aggregation `token-sum-norm` [tokens].
    """

    inputs: ClassVar[tuple[str, ...]] = ()  # per-token columns that the loss may read, in addition to the tokens

    def __init__(
        self,
        algorithm: Algorithm,
        settings: ForwardSettings,
        model: Sequence[torch.nn.Module],
        norm_length: int | None = None,
    ) -> None:
        self.algorithm, self.settings, self.model, self.norm_length = algorithm, settings, model, norm_length
        config = get_model_config(model[0])
        if settings.max_tokens is not None:  # pipeline stages must accept micro-batches of any shape
            config.variable_seq_lengths = True
        self._device, self._per_token = device_of(model), bool(config.calculate_per_token_loss)
        self._entropy_grad = algorithm.entropy_coef != 0

    def prepare(self, micro_batches: Sequence[Rows], version: int = 0) -> None:
        """Take the rows of the next optimizer step.

        micro_batches: those of this data parallel rank, in order. Each has `micro_batch_size` rows; with `max_tokens`
        it has any number of rows, and every rank has equally many micro-batches. Columns: `tokens`, `loss_mask`;
        `valid` (`[B]`, 0: not trained) if rows were dropped; `multiplicity` (`[B]`, how often a row counts) if rows
        were filtered; on the last pipeline stage the columns of the loss. version: of the weights with which the
        rollout began. Collective. Raises ValueError for a missing column or a wrong number of micro-batches.
        """
        expected = num_microbatches_calculator.get_num_microbatches()
        if self.settings.max_tokens is None and len(micro_batches) != expected:
            raise ValueError(
                f"{len(micro_batches)} micro-batches prepared, but Megatron's step runs {expected}; "
                "the plan and --global-batch-size disagree"
            )
        rows = [self._checked(part) for part in micro_batches]
        counts = [_trained(part) for part in rows]
        often = [part.columns.get("multiplicity", torch.ones_like(n)) for part, n in zip(rows, counts, strict=True)]
        self._totals = totals = self._count(counts, often)
        self._scaling = scaling_of_job(len(rows), per_token=self._per_token, total_tokens=totals.tokens)
        self._batches = [self._collate(i, part) for i, part in enumerate(rows)]
        self._multiplicity = [k.to(self._device) for k in often]
        self._fresh = [_sampled_by(part, version).to(self._device) for part in rows]
        # The same gradient as if each row was in the batch as often as filtration drew it, but it is computed once.
        self.weights = [(self._weigh(n) * k).float().to(self._device) for n, k in zip(counts, often, strict=True)]
        self._tallies: dict[int, Tensor] = {}

    def run(self, train_step: Callable[..., tuple], args: tuple, kwargs: Mapping[str, Any]) -> tuple:
        """Run Megatron's `train_step` on the prepared rows. args: its arguments after forward step and iterator."""
        every = (self.forward_step, data_iterators(self._batches, len(self.model)), *args)
        if self.settings.max_tokens is None:
            return train_step(*every, **kwargs)
        with micro_batch_count(len(self._batches), train_step, every, kwargs) as (positional, named):
            return train_step(*positional, **named)

    def metrics(self) -> dict[str, float]:
        """Metrics of the step, exact over the global batch and the same on all ranks. Collective."""
        raise NotImplementedError

    def forward_step(
        self, data_iterator: Iterator[MicroBatch], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[..., tuple]]:
        """Megatron's forward step function: runs one micro-batch and returns its output and loss function."""
        batch = next(data_iterator).to(self._device)
        return self._forward(model, batch), functools.partial(self._loss, batch)

    def _forward(self, model: torch.nn.Module, batch: MicroBatch) -> Tensor:
        return run_model(model, batch, self.settings, entropy_grad=self._entropy_grad)

    def _loss(self, batch: MicroBatch, output: Tensor) -> tuple:
        """Megatron's loss function: returns `_result` for one micro-batch."""
        raise NotImplementedError

    def _needed(self, rows: Rows) -> list[str]:
        """Columns that the last pipeline stage needs in addition to the tokens."""
        raise NotImplementedError

    def _weigh(self, counts: Tensor) -> Tensor:
        """Weight of a trained token of each row, `[mb]`. counts: `[mb]`, number of trained tokens of each row."""
        return self.algorithm.weights(counts, self._totals)

    def _checked(self, rows: Rows) -> Rows:
        needed = ["tokens", "loss_mask", *(self._needed(rows) if ends_here(self.model) else [])]
        missing = [name for name in needed if name not in rows.columns]
        if missing:
            raise ValueError(f"the update lacks columns {missing}; it was given {sorted(rows.columns)}")
        if {"valid", "multiplicity"} & rows.columns.keys():
            mask = rows["loss_mask"]
            counted = [rows[name] > 0 for name in ("valid", "multiplicity") if name in rows.columns]
            counted = torch.stack(counted).all(0).repeat_interleave(mask.lengths)
            rows = rows.with_columns(loss_mask=Ragged(mask.values * counted, mask.offsets), scored=mask)
        if "advantages" not in rows.columns and "advantage" in rows.columns:
            rows = rows.with_columns(advantages=spread(rows["advantage"], rows["loss_mask"]))
        return rows

    def _collate(self, index: int, rows: Rows) -> MicroBatch:
        return collate(rows, self.settings, index=index, columns=[n for n in self.inputs if n in rows.columns])

    def _count(self, counts: Sequence[Tensor], multiplicity: Sequence[Tensor]) -> Totals:
        every, often = torch.cat(list(counts)), torch.cat(list(multiplicity)).long()
        tokens, sequences = summed(torch.stack([(often * every).sum(), (often * (every > 0)).sum()]))
        return Totals(tokens, sequences, self.norm_length)

    def _result(self, batch: MicroBatch, loss: Tensor, tally: Tensor, name: str = "loss") -> tuple:
        """The result for Megatron. loss: what the micro-batch adds to that of the step; name: in Megatron's log."""
        self._tallies[batch.index] = tally  # by index, since Megatron may repeat a step to validate its result
        # Megatron averages this over micro-batches of this rank; `metrics` has the exact value.
        seen = (loss.detach() * (self._scaling.micro_batches * self._scaling.dp_size)).view(1)
        return self._scaling.result(loss, self._multiplicity[batch.index][batch.sequence].sum(), {name: seen})

    def _reduced(self, sums: int) -> Tensor:
        """Tally of the global batch, the same on all ranks. Collective. sums: see `reduce_tallies`."""
        ends = ends_here(self.model)
        assert len(self._tallies) == (len(self._batches) if ends else 0), "metrics before the step ran"
        return reduce_tallies(self._tallies.values() if ends else None, sums)


class PolicyStep(MegatronStep):
    """The policy's step."""

    inputs = ("logp_old", "advantages", "logp_ref", "logp_rollout", "scored")

    def metrics(self) -> dict[str, float]:
        """See `to_metrics`."""
        metrics = to_metrics(self._reduced(SUM_COUNT), self._totals)
        if any(batch.routes is not None for batch in self._batches):
            metrics |= router_replay.differences(self.settings.routed)
        return metrics if self.algorithm.needs_reference else {k: v for k, v in metrics.items() if k != "kl/ref"}

    def _loss(self, batch: MicroBatch, output: Tensor) -> tuple:
        of_rows = (each[batch.index] for each in (self.weights, self._multiplicity, self._fresh))
        logp, entropy = head_of(output, batch, self.settings, entropy_grad=self._entropy_grad)
        return self._result(batch, *objective(self.algorithm, batch, *of_rows, logp, entropy))

    def _needed(self, rows: Rows) -> list[str]:
        needed = ["logp_old"] if self.algorithm.old_logps else []
        needed += ["logp_ref"] if self.algorithm.kl_loss_coef else []
        return [*needed, "logp_rollout", *([] if "advantage" in rows.columns else ["advantages"])]


def _trained(rows: Rows) -> Tensor:
    """`[mb]` int64, trained tokens of each row; entry 0 of a row has no logits before it and is never trained."""
    return torch.stack([row[1:].sum(dtype=torch.int64) for row in rows["loss_mask"].rows()])


def _sampled_by(rows: Rows, version: int) -> Tensor:
    """`[mb]` bool, rows that weights of this version or newer ones sampled; True if there is no column `version`."""
    return rows["version"] >= version if "version" in rows.columns else torch.ones(len(rows), dtype=torch.bool)
