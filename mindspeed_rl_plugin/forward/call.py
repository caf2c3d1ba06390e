"""Calls the model's own forward on a micro-batch, with a mask, with none, or with the boundaries of packed rows.

Megatron's own attention takes no boundaries, and a mask that separates the rows would cost as much as one row of all
tokens. So the boundaries go through the layers in place of the mask, also to layers that are recomputed in the backward
pass, and the attention then runs on each row alone.

MindSpeed's ulysses (core/context_parallel/dot_product_attention.py, v2.3.0 and 26.1.0) accepts boundaries, since in
attention its ranks have complete rows. But Megatron's layers around it would cut rotary embeddings by the boundaries,
as for a ring, and drop the batch dimension, so that ulysses would not find the heads. So here, too, they are the mask,
and a hook gives them to the attention.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mindspeed_rl_plugin.forward.collate import MicroBatch
from mindspeed_rl_plugin.weights.storages import unwrap


def call_model(model: torch.nn.Module, batch: MicroBatch) -> Tensor:
    """Output of one model chunk for a micro-batch: `[mb, S, V/tp]` logits of a language model, or hidden states."""
    if batch.bounded and batch.ranks == 1:
        boundaries = packed_seq_params(batch.boundaries, batch.tokens.device)
        return model(batch.tokens, batch.position_ids, None, packed_seq_params=boundaries)
    mask = batch.attention_mask
    if batch.segments is not None:
        (_take_boundaries if batch.bounded else _divide_attention)(model)
        mask = torch.tensor(batch.boundaries)
    with own_positions(model, batch):
        return model(batch.tokens, batch.position_ids, mask)


def _divide_attention(model: torch.nn.Module) -> None:
    """Make Megatron's own attention read a mask of one dimension as boundaries of packed rows."""
    for module in model.modules():
        attention = getattr(module, "core_attention", None)
        if attention is not None and "forward" not in vars(attention):
            attention.forward = functools.partial(_by_rows, attention, attention.forward)


def _by_rows(
    attention: torch.nn.Module,
    forward: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *more: Any,
    **named: Any,
) -> Tensor:
    """Attention within each packed row, `[S, 1, heads x value_dim]`. query: `[S, 1, heads, head_dim]`; key, value: the
    same with as many heads, or fewer; mask: boundaries, or a mask for `forward`, the attention's own."""
    if mask is None or mask.dim() != 1:
        return forward(query, key, value, mask, *more, **named)
    # Under --apply-query-key-layer-scaling the softmax multiplies by the number by which the scale is divided.
    scale = attention.softmax_scale * (attention.scale_mask_softmax.scale or 1.0)
    rows = zip(*(t.permute(1, 2, 0, 3).split(mask.diff().tolist(), 2) for t in (query, key, value)), strict=True)
    grouped = {"is_causal": True, "scale": scale, "enable_gqa": query.shape[2] != key.shape[2]}
    outputs = [F.scaled_dot_product_attention(*row, **grouped) for row in rows]
    return torch.cat(outputs, 2).permute(2, 0, 1, 3).flatten(2)


def _take_boundaries(model: torch.nn.Module) -> None:
    """Make the attention of MindSpeed's ulysses read its mask as boundaries of packed rows."""
    for module in model.modules():
        if hasattr(module, "ulysses_comm_para") and _mask_to_boundaries not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_mask_to_boundaries, with_kwargs=True)


def _mask_to_boundaries(attention: torch.nn.Module, given: tuple, named: dict[str, Any]) -> tuple[tuple, dict] | None:
    """The attention's arguments with the mask replaced by boundaries; None: no change. given: query
    `[S, 1, heads, head_dim]`, key, value, mask, and further arguments."""
    query, key, value, mask, *more = given
    if mask is None or mask.dim() != 1:
        return None
    return (query, key, value, None, *more), {**named, "packed_seq_params": packed_seq_params(mask.tolist(), "cpu")}


def own_positions(model: torch.nn.Module, batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
    """Within the context, rotary embeddings of packed rows restart with each row, as in the engine.

    Megatron's positions continue over the complete micro-batch. In exact arithmetic the result is the same, since
    attention depends on differences of positions. In float32 an angle at position 10,000 is a thousand times less exact
    than at 10. With boundaries Megatron's attention restarts positions by itself. Multi-latent attention never does.
    """
    rotary = getattr(unwrap(model), "rotary_pos_emb", None)
    if batch.segments is None or rotary is None:
        return contextlib.nullcontext()
    forward = rotary.forward
    whole = {"packed_seq": True} if batch.ranks > 1 else {}  # embeddings of all positions, also those of other ranks

    def restarted(*positional: Any, **named: Any) -> Any:
        embeddings = forward(*positional, **named | whole)
        if isinstance(embeddings, tuple):  # with YaRN's factor
            return embeddings[0][batch.position_ids[0]], *embeddings[1:]
        return embeddings[batch.position_ids[0]]

    return swapped(vars(rotary), forward=restarted)


def packed_seq_params(boundaries: list[int], device: torch.device | str) -> PackedSeqParams:
    """Boundaries of the packed rows for Megatron's attention (the same in core 0.12.1 to 0.19).

    Padding is one more row at the end, and there are no gaps between rows. MindSpeed passes the boundaries with the
    leading 0 to the NPU's kernel, which takes this 0 as one more, empty row.
    """
    longest = max(end - start for start, end in pairwise(boundaries))
    each = torch.tensor(boundaries, dtype=torch.int32, device=device)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=each, cu_seqlens_kv=each, max_seqlen_q=longest, max_seqlen_kv=longest
    )


@contextlib.contextmanager
def swapped(names: dict[str, Any], **values: Any) -> Iterator[None]:
    """Within the context the names of an object or a module (its `vars`) have these values. Afterwards they have their
    old values again; names that did not exist are removed."""
    before = {name: names[name] for name in values if name in names}
    names.update(values)
    try:
        yield
    finally:
        for name in values:
            names.pop(name, None)
        names.update(before)
