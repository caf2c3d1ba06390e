"""Permanent hooks with which a model's layers run packed rows, trees and given routes, by what travels in the place of
the mask.

A layer that is recomputed in the backward pass runs outside of any context manager of the forward pass: its attention
would then attend to all rows, and the gradient would be wrong while log-probs are right. Recomputing passes a layer its
mask again. So the mask is the key: `Carried.encoded`, a tensor of one dimension, which Megatron's masks never have.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from mindspeed_rl_plugin.forward import router_replay
from mindspeed_rl_plugin.forward.carried import Carried
from mindspeed_rl_plugin.forward.collate import causal_mask
from mindspeed_rl_plugin.forward.settings import AUXILIARY
from mindspeed_rl_plugin.forward.tree_kernels import Kernel

_layer_masks: list[Tensor | None] = [None]  # of the layer that runs now, at the end
# the mask that was decoded last, which keeps its address from being reused
_last: list[tuple[Tensor, torch.device, Carried]] = []


def install(model: torch.nn.Module, kernel: Kernel, routed: Sequence[int] = ()) -> None:
    """Hook the attention, rotary embeddings, experts and layers of a model chunk, once. kernel: of the attention of
    packed rows; routed: Megatron's numbers of the layers whose experts may be given."""
    if "_rl_layers_hooked" in vars(model):
        return
    vars(model)["_rl_layers_hooked"] = True
    for name, module in model.named_modules():
        if hasattr(attention := getattr(module, "self_attention", None), "core_attention"):
            _hook(module, "forward", _layer)
            _hook(attention.core_attention, "forward", functools.partial(_attend, kernel))
            rotary = getattr(attention, "rotary_pos_emb", None)
            if isinstance(rotary, torch.nn.Module):  # of latent attention, which calls it in each layer
                _hook(rotary, "forward", _rotary)
        if hasattr(router := getattr(module, "router", None), "routing"):
            own = {"mtp", "mtp_layers"}.intersection(name.split("."))  # these layers predict further tokens
            layer = None if own or router.layer_number not in routed else routed.index(router.layer_number)
            _hook(router, "routing", functools.partial(_routing, layer))
            _hook(module, "forward", _experts)


def at_positions(embeddings: Any, positions: Tensor) -> Any:
    """Rotary embeddings `[S, ...]` at positions `[T]`; YaRN's are a tuple with its factor, which is kept."""
    if isinstance(embeddings, tuple):
        return embeddings[0][positions], *embeddings[1:]
    return embeddings[positions]


def _hook(owner: torch.nn.Module, name: str, hook: Callable[..., Any]) -> None:
    """Replace a method of one object, unless it has been. The hook gets the object and the method before its arguments.
    Later wrappers of others stay around it."""
    hooked = vars(owner).setdefault("_rl_hooked", set())
    if name not in hooked:
        hooked.add(name)
        setattr(owner, name, functools.partial(hook, owner, getattr(owner, name)))


@contextlib.contextmanager
def _running(mask: Tensor | None) -> Iterator[None]:
    _layer_masks.append(mask)
    try:
        yield
    finally:
        _layer_masks.pop()


def _carried(mask: Tensor | None, device: torch.device) -> Carried:
    """What a mask carries; nothing if it is another mask. Since all layers of a pass get one mask, the last one is
    kept, with its positions on the device."""
    if mask is None or mask.dim() != 1:
        return Carried()
    if not _last or _last[0][0].data_ptr() != mask.data_ptr() or _last[0][1] != device:
        _last[:] = [(mask, device, Carried.decoded(mask).to(device))]
    return _last[0][2]


def _layer(layer: torch.nn.Module, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """A transformer layer, whose parts find its mask."""
    with _running(named["attention_mask"] if "attention_mask" in named else given[1] if given[1:] else None):
        return forward(*given, **named)


def _attend(
    kernel: Kernel,
    attention: torch.nn.Module,
    forward: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *more: Any,
    **named: Any,
) -> Tensor:
    """Attention `[T, 1, heads x value_dim]` of each branch to its path. query: `[T, 1, heads, head_dim]`; key, value:
    the same with as many heads, or fewer."""
    carried = _carried(mask, query.device)
    branches = carried.branches
    if branches is None:
        if carried.routes is not None:
            mask = causal_mask(carried.causal, query.device) if carried.causal else None
        return forward(query, key, value, mask, *more, **named)
    if len(branches.kv_index):
        key, value = (t.index_select(0, branches.kv_index) for t in (key, value))
    return kernel(attention, forward, query, key, value, branches)


def _rotary(rotary: torch.nn.Module, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Rotary embeddings of each token's position in its row."""
    embeddings = forward(*given, **named)
    device = (embeddings[0] if isinstance(embeddings, tuple) else embeddings).device
    branches = _carried(_layer_masks[-1], device).branches
    return embeddings if branches is None else at_positions(embeddings, branches.positions)


def _routing(
    layer: int | None,
    router: torch.nn.Module,
    routing: Callable[..., tuple],
    logits: Tensor,
    *more: Any,
    **named: Any,
) -> tuple[Tensor, ...]:
    """Routes each token as often as it is in rows, so that auxiliary losses and counts are those of the rows; to the
    experts that are given, if any.

    layer: number among the layers with experts that may be given. logits: `[T, 1, experts]`, or `[T / tp, 1, experts]`
    with sequence parallelism. Returns what `routing` returns for the tokens of the tree: gradients of the losses, of
    which there is one for each row's token, are summed by autograd.
    """
    carried = _carried(_layer_masks[-1], logits.device)
    branches = carried.branches
    whole = branches is None or not len(branches.at) or not _looks_at_all(router)
    if layer is not None and (carried.routes is not None or router_replay.recorded is not None):
        at = None if whole else branches.at
        routing = functools.partial(router_replay.route, router, layer, routing, routes=carried.routes, at=at)
    if whole:
        return routing(logits, *more, **named)
    parts, at, first = int(branches.queries[-1]) // len(logits), branches.at, branches.first
    gather = tensor_parallel.gather_from_sequence_parallel_region
    if parts > 1:
        rank = parallel_state.get_tensor_model_parallel_rank()
        logits, at, mine = gather(logits), at.chunk(parts)[rank], first.chunk(parts)[rank]
    results = routing(logits.index_select(0, at), *more, **named)
    if len(results[0]) == len(branches.at):  # one rank, or core 0.12's alltoall_seq, which has gathered them itself
        return tuple(t.index_select(0, first) for t in results)
    whole = (gather(t.byte()).bool() if t.dtype == torch.bool else gather(t) for t in results)
    return tuple(t.index_select(0, mine) for t in whole)


def _looks_at_all(router: torch.nn.Module) -> bool:
    """Whether a router does more than to choose the experts of each token by itself."""
    losses = (getattr(router.config, name, None) for name in AUXILIARY)
    whole = router.routing_type in ("sinkhorn", "quantile_balancing")
    return any(any(c) if isinstance(c, list) else c for c in losses) or bool(router.enable_expert_bias) or whole


def _experts(moe: torch.nn.Module, forward: Callable[..., Any], hidden: Tensor, *more: Any, **named: Any) -> Any:
    """A layer of experts. Where it alone is recomputed, it has no mask, and the function that runs again brings it."""
    mask = _layer_masks[-1]
    if mask is None or mask.dim() != 1 or not (getattr(moe, "moe_layer_recompute", False) and moe.training):
        return forward(hidden, *more, **named)

    def again(hidden: Tensor) -> Any:
        moe.moe_layer_recompute = False
        try:
            with _running(mask):
                return forward(hidden, *more, **named)
        finally:
            moe.moe_layer_recompute = True

    return tensor_parallel.checkpoint(again, False, hidden)
