"""Calls the model's own forward on a micro-batch, with a mask, with none, or with the branches of packed rows.

Megatron's own attention takes no boundaries, and a mask that separates the rows would cost as much as one row of all
tokens. So the branches go through the layers in place of the mask, and hooks give them to the attention. Attention that
takes boundaries gets those of packed rows from Megatron. Those of a tree have other keys than queries, by which
Megatron's layers would cut rotary embeddings, so they go in place of the mask, too.

MindSpeed's ulysses (core/context_parallel/dot_product_attention.py, v2.3.0 and 26.1.0) accepts boundaries, since in
attention its ranks have complete rows. But Megatron's layers around it would cut rotary embeddings by the boundaries,
as for a ring, and drop the batch dimension, so that ulysses would not find the heads. So here, too, they are the mask,
and a hook gives them to the attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.forward import layer_hooks, router_replay, tree_kernels
from mindspeed_rl_plugin.forward.carried import Carried
from mindspeed_rl_plugin.forward.collate import MicroBatch
from mindspeed_rl_plugin.forward.tree_kernels import Kernel, packed_seq_params
from mindspeed_rl_plugin.weights.storages import unwrap


def call_model(model: torch.nn.Module, batch: MicroBatch) -> Tensor:
    """Output of one model chunk for a micro-batch: `[mb, S, V/tp]` logits of a language model, or hidden states; of a
    tree the output of its T tokens."""
    run = batch.tree or batch
    if router_replay.recorded is not None or batch.routes is not None:
        _install(model, batch)
    if batch.segments is None and batch.routes is None:
        return model(run.tokens, run.position_ids, batch.attention_mask)
    if batch.segments is None:
        causal = run.tokens.shape[1] if batch.explicit_mask else 0
        return model(run.tokens, run.position_ids, Carried(causal=causal, routes=batch.routes).encoded())
    if batch.bounded and batch.ranks == 1 and batch.tree is None and batch.routes is None:
        boundaries = packed_seq_params(batch.branches, run.tokens.device)
        return model(run.tokens, run.position_ids, None, packed_seq_params=boundaries)
    if batch.ranks > 1:
        _take_boundaries(model)
    else:
        _install(model, batch)
    with own_positions(model, batch):
        return model(run.tokens, run.position_ids, Carried(batch.branches, routes=batch.routes).encoded())


def _install(model: torch.nn.Module, batch: MicroBatch) -> None:
    layer_hooks.install(model, _kernel(model) if batch.bounded else tree_kernels.by_torch, batch.routed)


def _kernel(model: torch.nn.Module) -> Kernel:
    """The kernel of attention that takes boundaries. Only MindSpeed's configurations have `pre_tockens`."""
    mindspeed = hasattr(unwrap(model).config, "pre_tockens")
    return tree_kernels.by_npu if mindspeed else tree_kernels.by_transformer_engine


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
    boundaries = packed_seq_params(Carried.decoded(mask).branches, "cpu")
    return (query, key, value, None, *more), {**named, "packed_seq_params": boundaries}


def own_positions(model: torch.nn.Module, batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
    """Within the context, rotary embeddings of packed rows restart with each row, as in the engine.

    Megatron's positions continue over the complete micro-batch. In exact arithmetic the result is the same, since
    attention depends on differences of positions. In float32 an angle at position 10,000 is a thousand times less exact
    than at 10. With boundaries Megatron's attention restarts positions by itself. Latent attention has its own in each
    layer (`layer_hooks`).
    """
    rotary = getattr(unwrap(model), "rotary_pos_emb", None)
    if batch.segments is None or rotary is None:
        return contextlib.nullcontext()
    forward, positions = rotary.forward, (batch.tree or batch).position_ids[0]
    whole = {"packed_seq": True} if batch.ranks > 1 else {}  # embeddings of all positions, also those of other ranks

    def restarted(*positional: Any, **named: Any) -> Any:
        return layer_hooks.at_positions(forward(*positional, **named | whole), positions)

    return swapped(vars(rotary), forward=restarted)


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
