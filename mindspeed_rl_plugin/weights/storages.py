"""The storages that a training rank has on its device (parameters, gradients, optimizer state), with names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from mindspeed_rl_plugin.weights.aliases import places

Storages = dict[int, torch.UntypedStorage]
NamedTensors = Iterator[tuple[str, Tensor]]


def unwrap(chunk: Module) -> Module:
    """The model inside Megatron's wrappers (DistributedDataParallel, Float16Module)."""
    while isinstance(getattr(chunk, "module", None), Module):
        chunk = chunk.module
    return chunk


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """`[nbytes]` uint8, a view of the complete storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def distinct(tensors: Iterable[Tensor]) -> Storages:
    """The distinct storages that are not empty. An alias (`aliases.py`) counts as the storage that owns its bytes.
    Storages are compared by identity, since a freed storage has no address."""
    out, owners = Storages(), places()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storage, _ = owners.get(storage._cdata, (storage, 0))
        if storage.nbytes():
            out.setdefault(storage._cdata, storage)
    return out


def weights(chunks: Sequence[Module]) -> NamedTensors:
    """Parameter buffers, parameters and buffers of the chunks."""
    for i, chunk in enumerate(chunks):
        model = unwrap(chunk)
        for j, buffer in enumerate(_ddp_buffers(chunk)):
            if buffer.param_data is not None:
                yield f"chunk {i} parameter buffer {j}", buffer.param_data
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            yield f"chunk {i} {name}", tensor.data


def _ddp_buffers(chunk: Module) -> list[Any]:
    """Megatron's parameter and gradient buffers; a plain module's `buffers` is a method."""
    each = (getattr(chunk, name, None) for name in ("buffers", "expert_parallel_buffers"))
    return [buffer for buffers in each if isinstance(buffers, list) for buffer in buffers]


def gradients(chunks: Sequence[Module]) -> Iterator[Tensor]:
    """Gradient buffers, and gradients outside of them."""
    for chunk in chunks:
        for buffer in _ddp_buffers(chunk):
            yield buffer.grad_data
            yield from getattr(buffer, "extra_main_grads", ())
        for param in chunk.parameters():
            main_grad = getattr(param, "main_grad", None)
            if main_grad is not None:
                yield main_grad


def drop_grads(chunks: Sequence[Module], optimizer: Any) -> None:
    """Drop every `.grad`: one that is not in Megatron's buffers would keep memory. Megatron sets them in each step."""
    for chunk in chunks:
        for param in chunk.parameters():
            param.grad = None
    for inner in _inner_optimizers(optimizer):
        for group in inner.param_groups:
            for param in group["params"]:
                param.grad = None


def _inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """The torch optimizers inside Megatron's: distributed, mixed precision or fp32."""
    for part in _parts(optimizer):
        if getattr(part, "optimizer", None) is not None and not getattr(part, "is_stub_optimizer", False):
            yield part.optimizer


def _parts(optimizer: Any) -> Iterator[Any]:
    """Megatron's optimizers: a single one, or those of a chain, which may itself contain chains."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer
    else:
        for part in chained:
            yield from _parts(part)


def optimizer_state(chunks: Sequence[Module], optimizer: Any) -> NamedTensors:
    """Main parameters, the part of them that --reuse-fp32-param stores outside of the weights, and moments.

    Parameters of an optimizer are shards without names, so they are numbered.
    """
    for part in _parts(optimizer):
        for i, residual in enumerate(getattr(part, "shard_main_param_res_buffers", ())):
            yield f"residual {i} of main parameters", residual
    for i, inner in enumerate(_inner_optimizers(optimizer)):
        numbers = {}
        for group in inner.param_groups:
            for param in group["params"]:
                numbers[param] = len(numbers)
                yield f"main parameter {numbers[param]} of optimizer {i}", param.data
        for param, state in inner.state.items():
            # One-element tensors are step counters, not worth a copy.
            for name, t in state.items():
                if isinstance(t, Tensor) and t.numel() > 1:
                    yield f"{name} of parameter {numbers.get(param, '?')} of optimizer {i}", t
    for i, chunk in enumerate(chunks):
        for name, param in chunk.named_parameters():
            main_param = getattr(param, "main_param", None)
            if isinstance(main_param, Tensor):
                yield f"main parameter of chunk {i} {name}", main_param.data


def names_within(named: NamedTensors, storage: torch.UntypedStorage, low: int, high: int) -> list[str]:
    """Names of the tensors that have bytes in `[low, high)` of a storage, the smallest tensor first."""
    spans, owners = [], places()
    for name, t in named:
        mine = t.untyped_storage()
        owner, at = owners.get(mine._cdata, (mine, 0))
        at, size = at + t.storage_offset() * t.element_size(), t.numel() * t.element_size()
        if owner._cdata == storage._cdata and at < high and at + size > low:
            spans.append((size, name))
    return [name for _, name in sorted(spans)]


def keep_wide(chunks: Iterable[Module]) -> None:
    """Make the expert bias of every router float32 now, so that the final tensor is offloaded.

    Megatron casts the bias with the model, and later replaces it by a float32 tensor: in the first forward pass (core
    0.12), or while it builds the model (later cores).
    """
    for chunk in chunks:
        for module in chunk.modules():
            widen = getattr(module, "_maintain_float32_expert_bias", None)
            if widen is not None:
                widen()
