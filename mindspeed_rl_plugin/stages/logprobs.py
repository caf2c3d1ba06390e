"""Log-probs of every trained token by a forward-only pass of Megatron's own schedule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_rl_plugin.forward import ForwardSettings, MicroBatch, collate, to_rows
from mindspeed_rl_plugin.forward.schedule import head_of, run_forward_only
from mindspeed_rl_plugin.reshard.offload import gathered
from mindspeed_rl_plugin.rows import Ragged, Rows


def compute_logps(
    model: Sequence[torch.nn.Module], micro_batches: Sequence[Rows], settings: ForwardSettings
) -> list[Ragged] | None:
    """Log-prob of each trained token, in nats, at the sampling temperature.

    model: this rank's chunks; micro_batches: this data parallel rank's, each of `micro_batch_size` rows
    with `tokens` and `loss_mask`. Give the update's own micro-batches: the same rows padded to the same
    length go through the same arithmetic, so the first ratio of the update is exactly 1.
    Returns one ragged column `[L]` float32 for each micro-batch, aligned with its tokens, 0.0 where
    the mask is 0; None on ranks that are not on the last pipeline stage. Collective over the model
    parallel ranks.
    """
    both = compute_logps_and_entropy(model, micro_batches, settings)
    return None if both is None else [logp for logp, _ in both]


def compute_logps_and_entropy(
    model: Sequence[torch.nn.Module], micro_batches: Sequence[Rows], settings: ForwardSettings
) -> list[tuple[Ragged, Ragged]] | None:
    """As `compute_logps`, with the entropy of the whole distribution beside each log-prob, in nats."""
    batches = [collate(rows, settings, index=i) for i, rows in enumerate(micro_batches)]

    def collect(output: Tensor, batch: MicroBatch) -> tuple[Ragged, Ragged]:
        both = head_of(output, batch, settings)
        logp, entropy = (torch.where(batch.mask, column, 0.0).cpu() for column in both)
        packed = settings.packed
        return to_rows(logp, batch.lengths, packed=packed), to_rows(entropy, batch.lengths, packed=packed)

    with gathered(model):
        return run_forward_only(model, batches, settings, collect, scored=True)
