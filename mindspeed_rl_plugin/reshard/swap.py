"""Swap: training state leaves the device and returns, by resizing storages, so that every view stays valid.

Megatron keeps many views of the same memory: parameters, buckets, gradients, shards of main
parameters. Moving tensors would break them. A storage that is resized to zero bytes gives its memory
back, and when it is resized again all its views see the restored bytes.

Copies pass on a lane of their own (`Device.copier`): `start_out` and `start_in` only begin them. Until `finish_out`
what leaves may be read but not written; until `wait` what returns may not be touched at all.

Parameters of a model whose parameter gather is overlapped with the forward pass are complete only
inside `gathered`: enter it before exporting, swapping or scoring.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from mindspeed_rl_plugin.copies import Copying
from mindspeed_rl_plugin.device import Device, get_device
from mindspeed_rl_plugin.reshard.wide import keep_wide

CATEGORIES = ("params", "grads", "optimizer")
_SCRATCH = 64 << 20  # bytes of device memory that an exchange of weights uses

Storages = dict[int, torch.UntypedStorage]


@dataclass
class _Away:
    """A storage that gave its memory back, and the host copy of its bytes (None: nothing is kept)."""

    storage: torch.UntypedStorage
    nbytes: int
    host: Tensor | None


@dataclass
class _Trip:
    """The storages of a category on their way, and the copies that carry them."""

    parts: list[_Away]
    copies: Copying


class TrainState:
    """Everything a training rank keeps on its device: parameters, gradients, optimizer state.

    Methods take names of CATEGORIES (or "none"): params are the parameters, buffers and Megatron's parameter buffers;
    optimizer are main parameters and moments that do not share memory with params; grads are freed without a copy and
    come back as zeros. Host buffers are kept for the next time. sharing: ranks whose host buffers are on this machine.
    """

    def __init__(
        self, model_chunks: Sequence[Module], optimizer: Any = None, device: Device | None = None, *, sharing: int = 1
    ) -> None:
        self.chunks, self.optimizer, self.device = list(model_chunks), optimizer, device or get_device()
        self.sharing = sharing
        self._copier = self.device.copier()
        self._leaving: dict[str, _Trip] = {}
        keep_wide(self.chunks)
        self._away: dict[str, list[_Away]] = {}
        self._arriving: dict[str, _Trip] = {}
        self._host: dict[int, list[Tensor]] = {}
        for chunk in self.chunks:
            if getattr(getattr(chunk, "ddp_config", None), "nccl_ub", False):
                raise ValueError("--use-nccl-ub registers Megatron's buffers for good; drop it, or give --rl-swap none")

    @property
    def out(self) -> frozenset[str]:
        """Categories that may not be touched: away, or on their way back."""
        return frozenset(self._away) | frozenset(self._arriving)

    def swap_out(self, what: Iterable[str] = CATEGORIES) -> int:
        """Free the device memory of categories. Returns its bytes. Raises what `start_out` does."""
        self.start_out(what)
        return self.finish_out()

    @torch.no_grad()
    def start_out(self, what: Iterable[str] = CATEGORIES) -> None:
        """Begin to copy categories to the host.

        Raises ValueError for an unknown category and for one that is out already, MemoryError where the host has no
        room for the copies; the training state is then as it was.
        """
        names = _categories(what)
        for name in names:
            if name in self._away or name in self._leaving:
                raise ValueError(f"{name} are swapped out already; call swap_in first")
        self.wait(set(names) & set(self._arriving))
        if "grads" in names:
            _drop_grads(self.chunks, self.optimizer)
        found = {name: self._find(name) for name in names}
        hosts = self._take_hosts([s.nbytes() for name in names if name != "grads" for s in found[name].values()])
        for name in names:
            parts = [_Away(s, s.nbytes(), None if name == "grads" else next(hosts)) for s in found[name].values()]
            self._leaving[name] = _Trip(parts, self._copier.start(lambda parts=parts: _to_host(parts)))

    def finish_out(self) -> int:
        """Free what `start_out` began to copy. Returns its bytes."""
        total = 0
        for name, trip in list(self._leaving.items()):
            trip.copies.synchronize()
            self._away[name] = self._leaving.pop(name).parts
            for part in trip.parts:
                _release(part.storage)
                total += part.nbytes
        self.device.empty_cache()
        return total

    def swap_in(self, what: Iterable[str] | None = None) -> int:
        """Bring categories back and wait for them (None: all that are out). Returns the bytes that were away.

        Raises ValueError for an unknown category and for one that is not out.
        """
        total = self.start_in(what)
        self.wait(what)
        return total

    @torch.no_grad()
    def start_in(self, what: Iterable[str] | None = None) -> int:
        """Begin to bring categories back (None: all that are away), parameters first. Returns their bytes.

        Raises ValueError for an unknown category and for one that is not away.
        """
        names = _categories(self._away if what is None else what)
        for name in names:
            if name not in self._away:
                raise ValueError(f"{name} are not swapped out; away are: {', '.join(sorted(self._away)) or 'none'}")
        total = 0
        for name in names:
            parts = self._away.pop(name)
            for part in parts:
                _revive(part.storage, part.nbytes)
                total += part.nbytes
            self._arriving[name] = _Trip(parts, self._copier.start(lambda parts=parts: _from_host(parts)))
        return total

    def wait(self, what: Iterable[str] | None = None) -> None:
        """What was started back (None: all of it) is there for whatever is done next."""
        for name in _categories(self._arriving if what is None else what):
            if name in self._arriving:
                trip = self._arriving.pop(name)
                trip.copies.wait()
                for part in trip.parts:
                    if part.host is not None:
                        self._host.setdefault(part.nbytes, []).append(part.host)

    def _find(self, name: str) -> Storages:
        params = _storages(tensor for _, tensor in _weights(self.chunks))
        if name == "params":
            return params
        tensors = _grad_buffers(self.chunks) if name == "grads" else _optimizer_tensors(self.chunks, self.optimizer)
        # Main parameters may be views of the parameter buffer, and gradients may share its storage. State
        # that an optimizer keeps on the host anyway (CPU offload) stays there.
        return {k: s for k, s in _storages(tensors).items() if k not in params and s.device.type == self.device.kind}

    def _take_hosts(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """A host buffer of each size, in order: kept ones first, new ones only where all of them find room."""
        kept = [self._host[size].pop() if self._host.get(size) else None for size in sizes]
        try:
            self._demand(sum(size for size, host in zip(sizes, kept, strict=True) if host is None))
            for i, size in enumerate(sizes):
                kept[i] = self.device.host_empty((size,), torch.uint8) if kept[i] is None else kept[i]
        except BaseException:
            for host in kept:
                if host is not None:
                    self._host.setdefault(host.numel(), []).append(host)
            raise
        return iter(kept)

    def _demand(self, nbytes: int) -> None:
        """Raises MemoryError unless the host has room for so many more bytes of each rank on this machine."""
        free = self.device.host_available() if nbytes else 0
        if nbytes * self.sharing > free:
            raise MemoryError(
                f"--rl-swap needs {nbytes} more bytes of host memory on each of {self.sharing} ranks of this machine, "
                f"{free} are free; swap less (for example --rl-swap grads,optimizer), or run fewer ranks a machine"
            )


def _to_host(parts: Sequence[_Away]) -> None:
    for part in parts:
        if part.host is not None:
            part.host.copy_(_bytes(part.storage), non_blocking=True)


def _from_host(parts: Sequence[_Away]) -> None:
    for part in parts:
        if part.host is None:
            _bytes(part.storage).zero_()
        else:
            _bytes(part.storage).copy_(part.host, non_blocking=True)


def _release(storage: torch.UntypedStorage) -> None:
    """Give a storage's memory back; its views stay."""
    storage.resize_(0)


def _revive(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Give a storage its memory again; what it holds is undefined until the copies have been waited for."""
    storage.resize_(nbytes)


class HostWeights:
    """A host copy of a model's weights, such as the frozen reference. Made by `capture`."""

    def __init__(self, labels: tuple[tuple[str, int], ...], host: list[Tensor], device: Device) -> None:
        self._labels, self._host, self._device = labels, host, device
        self._swapped = False

    @classmethod
    @torch.no_grad()
    def capture(cls, model_chunks: Sequence[Module], device: Device | None = None) -> HostWeights:
        """Copy all parameters, buffers and parameter buffers of the chunks to host memory."""
        device = device or get_device()
        keep_wide(model_chunks)
        labels, storages = _labelled(model_chunks)
        host = [device.host_empty((s.nbytes(),), torch.uint8) for s in storages]
        for buffer, storage in zip(host, storages, strict=True):
            buffer.copy_(_bytes(storage), non_blocking=True)
        device.synchronize()
        return cls(labels, host, device)

    @property
    def nbytes(self) -> int:
        """Host bytes."""
        return sum(buffer.numel() for buffer in self._host)

    @contextlib.contextmanager
    def swapped_into(self, model_chunks: Sequence[Module]) -> Iterator[None]:
        """Inside the context the live model has these weights; after it, bitwise its own again.

        The weights change places, so that no second host copy is needed. Do not step the optimizer
        inside. Raises ValueError when the chunks do not have the captured storages, or are swapped out.
        """
        if self._swapped:
            raise ValueError("these weights are in a model already; leave that context first")
        self._exchange(model_chunks)
        self._swapped = True
        try:
            yield
        finally:
            self._exchange(model_chunks)
            self._swapped = False

    @torch.no_grad()
    def _exchange(self, model_chunks: Sequence[Module]) -> None:
        labels, storages = _labelled(model_chunks)
        if labels != self._labels:
            changed = [f"{a} -> {b}" for a, b in zip(self._labels, labels, strict=False) if a != b]
            raise ValueError(
                "the model's storages are not those that were captured (swapped out, or another model): "
                + "; ".join(changed[:5] or [f"{len(self._labels)} -> {len(labels)} storages"])
            )
        if not storages:
            return
        largest = max(s.nbytes() for s in storages)
        scratch = torch.empty(min(_SCRATCH, largest), dtype=torch.uint8, device=storages[0].device)
        for host, storage in zip(self._host, storages, strict=True):
            for mine, live in zip(host.split(_SCRATCH), _bytes(storage).split(_SCRATCH), strict=True):
                spare = scratch[: live.numel()]
                spare.copy_(live)
                live.copy_(mine, non_blocking=True)
                mine.copy_(spare, non_blocking=True)
        self._device.synchronize()


@contextlib.contextmanager
def gathered(model_chunks: Sequence[Module]) -> Iterator[None]:
    """Inside, all parameters of the chunks are complete, whether or not their gather is overlapped.

    Megatron's distributed optimizer with --overlap-param-gather leaves parameters stale until the next
    forward pass gathers them in a pre-hook. Here the hooks are taken off, which gathers at once, and
    put back at the end. Collective over data parallel ranks.
    """
    hooked = [chunk for chunk in model_chunks if getattr(chunk, "remove_forward_pre_hook_handles", None)]
    for chunk in hooked:
        chunk.disable_forward_pre_hook()
    try:
        yield
    finally:
        for chunk in hooked:
            chunk.enable_forward_pre_hook()


def unwrap(chunk: Module) -> Module:
    """The model inside Megatron's wrappers (DistributedDataParallel, Float16Module)."""
    while isinstance(getattr(chunk, "module", None), Module):
        chunk = chunk.module
    return chunk


def _categories(what: Iterable[str]) -> list[str]:
    """Names in the order of CATEGORIES: parameters come back before what the next stages do not need."""
    asked = set(what) - {"none"}
    if unknown := asked - set(CATEGORIES):
        raise ValueError(f"cannot swap {', '.join(sorted(unknown))}; known: {', '.join(CATEGORIES)}, none")
    return [name for name in CATEGORIES if name in asked]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _storages(tensors: Iterable[Tensor]) -> Storages:
    """The different storages that are not empty, by identity: an address says nothing once memory is freed."""
    out: Storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            out.setdefault(storage._cdata, storage)
    return out


def _weights(chunks: Sequence[Module]) -> Iterator[tuple[str, Tensor]]:
    for i, chunk in enumerate(chunks):
        model = unwrap(chunk)
        for j, buffer in enumerate(_ddp_buffers(chunk)):
            if buffer.param_data is not None:
                yield f"chunk {i} parameter buffer {j}", buffer.param_data
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            yield f"chunk {i} {name}", tensor.data


def _labelled(chunks: Sequence[Module]) -> tuple[tuple[tuple[str, int], ...], list[torch.UntypedStorage]]:
    labels, storages, seen = [], [], set()
    for label, tensor in _weights(chunks):
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and tensor.numel():
            seen.add(storage._cdata)
            labels.append((label, storage.nbytes()))
            storages.append(storage)
    return tuple(labels), storages


def _ddp_buffers(chunk: Module) -> list[Any]:
    """Megatron's parameter and gradient buffers; a plain module's `buffers` is a method."""
    found = []
    for name in ("buffers", "expert_parallel_buffers"):
        buffers = getattr(chunk, name, None)
        if isinstance(buffers, list):
            found += buffers
    return found


def _grad_buffers(chunks: Sequence[Module]) -> Iterator[Tensor]:
    for chunk in chunks:
        for buffer in _ddp_buffers(chunk):
            yield buffer.grad_data
            yield from getattr(buffer, "extra_main_grads", ())
        for param in chunk.parameters():
            main_grad = getattr(param, "main_grad", None)
            if main_grad is not None:
                yield main_grad


def _drop_grads(chunks: Sequence[Module], optimizer: Any) -> None:
    """Megatron sets every `.grad` anew in each step; those outside its buffers own memory meanwhile."""
    for chunk in chunks:
        for param in chunk.parameters():
            param.grad = None
    for inner in _inner_optimizers(optimizer):
        for group in inner.param_groups:
            for param in group["params"]:
                param.grad = None


def _inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """The torch optimizers inside Megatron's: chained, distributed, mixed precision or fp32."""
    if optimizer is None:
        return
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        for part in chained:
            yield from _inner_optimizers(part)
    elif getattr(optimizer, "optimizer", None) is not None and not getattr(optimizer, "is_stub_optimizer", False):
        yield optimizer.optimizer


def _optimizer_tensors(chunks: Sequence[Module], optimizer: Any) -> Iterator[Tensor]:
    for inner in _inner_optimizers(optimizer):
        for group in inner.param_groups:
            yield from (param.data for param in group["params"])
        for state in inner.state.values():
            # One-element tensors are step counters, not worth a copy.
            yield from (t for t in state.values() if isinstance(t, Tensor) and t.numel() > 1)
    for chunk in chunks:
        for param in chunk.parameters():
            main_param = getattr(param, "main_param", None)
            if isinstance(main_param, Tensor):
                yield main_param.data
