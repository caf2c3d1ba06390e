"""A stand-in for fused attention over context parallel ranks (TransformerEngine's, MindSpeed's), which no CPU can run.

Megatron's own attention, which refuses context parallelism, on keys and values of all ranks: gathered with a gradient,
and masked by the positions at which they and the queries stand. For tests only: it saves no memory.
"""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention

from mindspeed_rl_plugin.forward.context_parallel import positions

WHERE = "megatron.core.transformer.dot_product_attention.DotProductAttention"


class _Gathered(torch.autograd.Function):
    """`[S / cp, ...]` of each rank to `[S, ...]` in rank order; backward sums what all ranks made of a part."""

    @staticmethod
    def forward(ctx, part):
        group = parallel_state.get_context_parallel_group()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        group, grad = parallel_state.get_context_parallel_group(), grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=group)
        return grad.chunk(dist.get_world_size(group))[dist.get_rank(group)]


INIT, FORWARD = DotProductAttention.__init__, DotProductAttention.forward


def _init(self, config, *args, **kwargs):
    with mock.patch.object(config, "context_parallel_size", 1):
        INIT(self, config, *args, **kwargs)


def _forward(self, query, key, value, attention_mask, *args, **kwargs):
    cp_size = parallel_state.get_context_parallel_world_size()
    if cp_size > 1:
        assert attention_mask is None, "it says nothing of where this rank's positions stand"
        mine = positions(len(query) * cp_size)
        key, value, theirs = (_Gathered.apply(part) for part in (key, value, mine))
        attention_mask = (theirs[None] > mine[:, None])[None, None]
    return FORWARD(self, query, key, value, attention_mask, *args, **kwargs)


@contextlib.contextmanager
def gathered_attention():
    """Megatron's models are built and run with it meanwhile."""
    with mock.patch(f"{WHERE}.__init__", _init), mock.patch(f"{WHERE}.forward", _forward):
        yield
