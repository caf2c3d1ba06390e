"""Offload: training state is copied to the host, its device memory is freed, and later it is restored.

Megatron keeps many views of the same memory: parameters, buckets, gradients, shards of main parameters. New tensors
would break them. So storages are resized: a storage that is resized to zero bytes frees its memory. When it is resized
again, all its views see the restored bytes.

Copies overlap other work (`Device.copier`): `start_offload` and `start_onload` only begin them. Between `start_offload`
and `finish_offload` the state may be read but not written. Between `start_onload` and `wait` it may be neither read nor
written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from mindspeed_rl_plugin.device import Device, get_device
from mindspeed_rl_plugin.device.device import Copying
from mindspeed_rl_plugin.weights import aliases, storages
from mindspeed_rl_plugin.weights.host_memory import HostCopy, HostMemoryBudget, HostPieces, paired, to_host
from mindspeed_rl_plugin.weights.storages import bytes_of, keep_wide
from mindspeed_rl_plugin.weights.verify import BLOCK_BYTES, WeightMismatch, storage_digests

CATEGORIES = ("params", "grads", "optimizer")
LISTED_NAMES = 4  # names that an error lists


@dataclass
class _Saved:
    """A storage whose memory was freed."""

    storage: torch.UntypedStorage
    nbytes: int
    host: HostCopy | None  # copy of its bytes on the host; None: not kept
    digests: Tensor | None  # of its bytes; None: not verified


_Underway = tuple[list[_Saved], Copying]  # storages of a category, and their running copies


class TrainState:
    """The state that a training rank has on its device, by CATEGORIES. Host memory is kept for the next offload.

    params: parameters, buffers and Megatron's parameter buffers.
    optimizer: main parameters and moments that do not share memory with params.
    grads: freed without a copy; when restored, they are zeros.
    budget: host memory of the machine; with it `start_offload` is collective over the machine's ranks.
    verify: compare digests of the restored bytes with those of the offloaded ones.
    """

    def __init__(
        self,
        model_chunks: Sequence[Module],
        optimizer: Any = None,
        device: Device | None = None,
        *,
        budget: HostMemoryBudget | None = None,
        verify: bool = False,
    ) -> None:
        self.chunks, self.optimizer, self.device = list(model_chunks), optimizer, device or get_device()
        self.budget, self.verify = budget or HostMemoryBudget(self.device), verify
        keep_wide(self.chunks)
        self._copier = self.device.copier()
        self._offloading: dict[str, _Underway] = {}
        self._offloaded: dict[str, list[_Saved]] = {}
        self._onloading: dict[str, _Underway] = {}
        self._host = {name: HostPieces(self.device) for name in CATEGORIES}

    @property
    def off_device(self) -> frozenset[str]:
        """Categories that may not be used: offloaded, or not restored completely."""
        return frozenset(self._offloaded) | frozenset(self._onloading)

    def offload(self, what: Iterable[str] = CATEGORIES) -> int:
        """Free the device memory of categories. Returns its bytes. Raises what `start_offload` raises."""
        self.start_offload(what)
        return self.finish_offload()

    @torch.no_grad()
    def start_offload(self, what: Iterable[str] = CATEGORIES) -> None:
        """Begin to copy categories to the host, except those whose copy has begun already. `start_onload` cancels this.

        Offloaded categories must not be given. Raises MemoryError if the host has no memory for the copies; then no
        copy has begun.
        """
        names = _ordered(set(what) - set(self._offloading))
        assert not {*names} & {*self._offloaded}, f"of {names} some are offloaded already"
        if not names:
            return
        self.wait(set(names) & set(self._onloading))
        if "grads" in names:
            storages.drop_grads(self.chunks, self.optimizer)
        by_name = {name: list(self._find(name).values()) for name in names}
        sizes = {n: [s.nbytes() for s in by_name[n]] for n in names if n != "grads"}
        hosts = self.budget.places(self._host, sizes, "--rl-swap")
        for name in names:
            places = hosts.get(name, [None] * len(by_name[name]))
            parts = [
                _Saved(s, s.nbytes(), host, storage_digests(s) if self.verify and name != "grads" else None)
                for s, host in zip(by_name[name], places, strict=True)
            ]
            self._offloading[name] = parts, self._copier.start(lambda parts=parts: _to_host(parts))

    def finish_offload(self) -> int:
        """Wait for the copies of `start_offload`, and free the device memory of the categories. Returns its bytes."""
        total = 0
        if self._offloading:
            self.device.synchronize()  # MindSpeed's --swap-optimizer copies on other streams
        for name, (parts, copies) in self._offloading.items():
            copies.synchronize()
            self._offloaded[name] = parts
            for part in parts:
                _release(part.storage)
                total += part.nbytes
        self._offloading = {}
        self.device.empty_cache()
        return total

    def onload(self, what: Iterable[str] | None = None) -> int:
        """Restore categories (None: all that are offloaded) and wait for them. Returns what `start_onload` returns."""
        total = self.start_onload(what)
        self.wait(what)
        return total

    @torch.no_grad()
    def start_onload(self, what: Iterable[str] | None = None) -> int:
        """Begin to restore categories (None: all that are offloaded), parameters first. Returns the bytes that are
        allocated again.

        Each must be offloaded, or its offload must have begun; an offload that has only begun is cancelled.
        """
        away, total = {*self._offloaded, *self._offloading}, 0
        names = _ordered(away if what is None else what)
        assert away >= {*names}, f"of {names} only {away} are offloaded"
        for name in names:
            if name in self._offloading:
                _, copies = self._offloading.pop(name)
                copies.synchronize()
                continue
            parts = self._offloaded.pop(name)
            for part in parts:
                _revive(part.storage, part.nbytes)
                total += part.nbytes
            aliases.repoint(part.storage for part in parts)
            self._onloading[name] = parts, self._copier.start(lambda parts=parts: _from_host(parts))
        return total

    def wait(self, what: Iterable[str] | None = None) -> None:
        """Let later work on the device wait until categories (None: all that `start_onload` began) are restored.

        Raises WeightMismatch, naming tensors, rank and range, if `verify` finds other bytes than were offloaded.
        """
        for name in _ordered(self._onloading if what is None else what):
            if name in self._onloading:
                parts, copies = self._onloading.pop(name)
                copies.wait()
                for part in parts:
                    if part.digests is not None:
                        self._compare(name, part)

    def discard(self) -> None:
        """At the end of a run: free the device memory of all state, without copies."""
        for _, copies in (*self._offloading.values(), *self._onloading.values()):
            copies.synchronize()
        self._offloading, self._onloading = {}, {}
        storages.drop_grads(self.chunks, self.optimizer)
        for name in CATEGORIES:
            for storage in self._find(name).values():
                _release(storage)
        self.device.empty_cache()

    def _compare(self, name: str, part: _Saved) -> None:
        wrong = (storage_digests(part.storage) != part.digests).nonzero().flatten().tolist()
        if wrong:
            low, high = wrong[0] * BLOCK_BYTES, min((wrong[0] + 1) * BLOCK_BYTES, part.nbytes)
            named = storages.optimizer_state(self.chunks, self.optimizer) if name == "optimizer" else None
            inside = storages.names_within(named or storages.weights(self.chunks), part.storage, low, high)
            more = f" and {len(inside) - LISTED_NAMES} more" if len(inside) > LISTED_NAMES else ""
            rank = dist.get_rank() if dist.is_initialized() else 0
            raise WeightMismatch(
                f"{', '.join(inside[:LISTED_NAMES])}{more}: bytes [{low}, {high}) of {part.nbytes} of their storage on "
                f"trainer rank {rank} came back from the host with other values; "
                "resume from the last checkpoint"
            )

    def _find(self, name: str) -> storages.Storages:
        params = storages.distinct(tensor for _, tensor in storages.weights(self.chunks))
        if name == "params":
            return params
        named = storages.optimizer_state(self.chunks, self.optimizer)
        tensors = storages.gradients(self.chunks) if name == "grads" else (tensor for _, tensor in named)
        state = storages.distinct(tensors)
        # Main parameters may be views of the parameter buffer, and gradients may share its storage. An optimizer may
        # have state on the host (CPU offload); this state is left out.
        return {k: s for k, s in state.items() if k not in params and s.device.type == self.device.kind}


def _to_host(parts: Sequence[_Saved]) -> None:
    for part in parts:
        to_host(part.host or [], part.storage)


def _from_host(parts: Sequence[_Saved]) -> None:
    for part in parts:
        if part.host is None:
            bytes_of(part.storage).zero_()
        else:
            for mine, live in paired(part.host, part.storage):
                live.copy_(mine, non_blocking=True)


def _release(storage: torch.UntypedStorage) -> None:
    """Free a storage's memory; its views stay valid."""
    storage.resize_(0)


def _revive(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Allocate a storage's memory again; its contents are undefined until its copy has ended."""
    storage.resize_(nbytes)


@contextlib.contextmanager
def gathered(model_chunks: Sequence[Module]) -> Iterator[None]:
    """Within the context all parameters of the chunks are up to date, to export them, offload them, or run a forward
    pass. Collective over data parallel ranks.

    After a step of Megatron's distributed optimizer with --overlap-param-gather, parameters are stale until pre-hooks
    of the next forward pass gather them. Here the hooks are removed, which gathers the parameters, and set again at the
    end. In the first iteration of a process Megatron itself has removed the hooks; then `start_param_sync` gathers.
    """
    gathering = [chunk for chunk in model_chunks if getattr(chunk, "use_forward_hook", False)]
    hooked = [chunk for chunk in gathering if chunk.remove_forward_pre_hook_handles]
    for chunk in gathering:
        if chunk.remove_forward_pre_hook_handles:
            chunk.disable_forward_pre_hook()
        else:
            chunk.start_param_sync(force_sync=True)
    try:
        yield
    finally:
        for chunk in hooked:
            chunk.enable_forward_pre_hook()


def _ordered(what: Iterable[str]) -> list[str]:
    """Names in the order of CATEGORIES: parameters are restored first, since the next stages need them first."""
    asked = set(what)
    assert asked <= {*CATEGORIES}, f"unknown categories: {asked}"
    return [name for name in CATEGORIES if name in asked]
