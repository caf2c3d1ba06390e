"""Context parallel ranks: each rank runs its own positions through the model, and then gets the results of all ranks.

So losses get complete rows in every layout, and need no sum over ranks for a sequence's ratio or mean, or for a pair.
Each rank computes the complete loss, and its gradient reaches the weights only through the positions of this rank.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core import utils as core_utils
from torch import Tensor

from mindspeed_rl_plugin.forward.collate import MicroBatch


def positions(length: int, device: torch.device | str = "cpu") -> Tensor | None:
    """`[S / cp]` int64, positions of this rank in rows of `length`, in the rank's order; None if it has all positions.

    The training framework's function that splits tokens also splits these positions, as attention and rotary embeddings
    of this job expect it. Megatron and MindSpeed's ring give a rank two pieces, one from each half of the row.
    MindSpeed's ulysses gives one piece, and its hybrid algorithm mixes both.
    """
    if parallel_state.get_context_parallel_world_size() <= 1:
        return None
    split = _split()
    known = inspect.signature(split, follow_wrapped=False).parameters
    given = {"is_hybrid_cp": False, "cp_group": parallel_state.get_context_parallel_group()}
    every = torch.arange(length, device=device)[None]
    return split({"tokens": every}, **{name: value for name, value in given.items() if name in known})["tokens"][0]


def of_this_rank(batch: MicroBatch) -> MicroBatch:
    """This rank's part of a micro-batch; the micro-batch itself if the rank has all positions.

    Columns were shifted before the split, so every label is still the token after its position.
    """
    at = positions(batch.tokens.shape[1], batch.tokens.device)
    if at is None:
        return batch
    assert batch.bounded or (batch.segments is None and not batch.explicit_mask), "masks are not split"
    names = ("tokens", "labels", "position_ids", "mask", *(["segments"] if batch.bounded else []))
    columns = {name: column.index_select(1, at) for name, column in batch.columns.items()}
    ranks = parallel_state.get_context_parallel_world_size()
    parts = {name: getattr(batch, name).index_select(1, at) for name in names}
    return dataclasses.replace(batch, columns=columns, ranks=ranks, **parts)


def of_all_ranks(values: Tensor, batch: MicroBatch) -> Tensor:
    """From values `[mb, S / cp, ...]` of this rank's positions to `[mb, S, ...]`, equal on all context parallel ranks.

    batch: the micro-batch before the split. Backward gives each rank the gradient of its own positions, so every rank
    must compute the same loss.
    """
    length = batch.tokens.shape[1]
    at = positions(length, values.device)
    return values if at is None else _AllPositions.apply(values, at, length)


class _AllPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, at, length):
        ctx.save_for_backward(at)
        # Each position belongs to one rank, so the sum is exact.
        every = values.new_zeros(values.shape[0], length, *values.shape[2:]).index_copy_(1, at, values)
        dist.all_reduce(every, group=parallel_state.get_context_parallel_group())
        return every

    @staticmethod
    def backward(ctx, grad):
        (at,) = ctx.saved_tensors
        return grad.index_select(1, at), None, None


def _split() -> Callable[..., dict[str, Tensor]]:
    """The training framework's function that splits tokens. It is looked up at every call by the name that scripts
    import, since MindSpeed and MindSpeed-LLM replace it, maybe late. After core 0.16 megatron.training lacks the name.
    """
    from megatron.training import utils as training_utils

    name = "get_batch_on_this_cp_rank"
    return getattr(training_utils, name, None) or getattr(core_utils, name)
