"""The engine's memory: how much it gets, and how it is freed between rollouts and allocated again.

There are two implementations with one interface. On accelerators vLLM's own sleep mode unmaps device memory, while
tensors keep their addresses. On a CPU vLLM has no sleep mode, so storages are resized to 0 bytes. Both implementations
keep tensor objects and views valid: the reshard's views of the parameters, and vLLM's references to its KV cache.
"""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl_plugin.device import Device
from mindspeed_rl_plugin.engine import vllm_api
from mindspeed_rl_plugin.host import engine_env
from mindspeed_rl_plugin.weights.p2p import P2PChannel
from mindspeed_rl_plugin.weights.storages import bytes_of, distinct

# Reserve as a share of the device's memory, and its least bytes. It is for memory that vLLM's profiling run does not
# measure: graphs that vLLM captures later, and communicators and workspaces of the trainer's first update.
RESERVE, LEAST_RESERVE = 0.1, 2 << 30


def free_share(device: Device, deadline: float) -> float:
    """Share of a device's memory that an engine may use: the free memory minus a reserve; the minimum over all ranks.

    Collective over the world; the trainer must be offloaded. deadline: seconds that ranks wait for each other. vLLM
    uses no more than this share of the total, and its KV cache gets the rest after weights and the largest step (0.32:
    `request_memory`, `determine_available_memory`; vllm-ascend from 0.15 on: worker/worker.py). Raises ValueError on
    every rank if a rank has no memory left, and the errors of `MessageBatch.wait`.
    """
    gc.collect()
    device.synchronize()
    device.empty_cache()
    free, total = device.memory_info()
    reserve = max(RESERVE * total, LEAST_RESERVE)
    least = thousandths = math.floor((free - reserve) / total * 1000)
    if dist.get_world_size() > 1:
        channel = P2PChannel(dist.get_rank(), deadline=deadline)
        each = channel.share("the engine's share of the device", [thousandths], 1, device.current())
        least = min(own for (own,) in each)
    if least <= 0:
        raise ValueError(
            f"no memory is left for the rollout engine: {free / 2**30:.3g} of {total / 2**30:.3g} GiB are free here "
            f"while the trainer is offloaded, {RESERVE:.0%} (at least {LEAST_RESERVE / 2**30:g} GiB) are reserved; "
            "offload more (--rl-swap params,grads,optimizer), or give --rl-device-memory-utilization"
        )
    if device.kind == "npu" and engine_env.vllm_version() < engine_env.ASCEND_SHARE_FREE:
        least = math.floor((total - reserve) / total * 1000)  # vLLM itself subtracts memory that is not free
    return least / 1000


class PoolMemory:
    """vLLM's sleep mode on an accelerator at level 2: weights are not copied, since the next reshard writes them again.

    Other tensors in the pool of the weights (rotary tables, expert maps, scales) are copied to the host and back: vLLM
    saves at most the model's buffers, and vllm-ascend 0.9 not even these. Waking in vllm-ascend 0.18 to 0.23 replaces
    expert weights by transposed views (worker/worker.py), so each parameter is set to its former object again, which
    captured graphs use. `refresh_derived` computes tensors that are derived from weights.
    """

    def __init__(self, engine: Any, worker: Any, pool: Sequence[range]) -> None:
        """pool: addresses of the pool of the weights."""
        assert pool, "vLLM's sleep mode took no memory for weights"
        modules = list(vllm_api.model(worker).modules())
        self._engine = engine
        self._parameters = [(m, name, p) for m in modules for name, p in m._parameters.items() if p is not None]
        written = distinct([*(p for _, _, p in self._parameters), *vllm_api.derived(worker)])
        self._kept = [s for key, s in distinct(_tensors_in(pool)).items() if key not in written]
        self._copies: list[torch.Tensor] = []

    def sleep(self) -> None:
        self._copies = [bytes_of(storage).to("cpu", copy=True) for storage in self._kept]
        self._engine.sleep(2)

    @torch.no_grad()
    def wake_up(self, tags: Sequence[str]) -> None:
        """Allocate parts ("weights", "kv_cache") again; the values of weights are undefined."""
        self._engine.wake_up(list(tags))
        if "weights" in tags:
            for module, name, parameter in self._parameters:
                module._parameters[name] = parameter
            for storage, copy in zip(self._kept, self._copies, strict=False):
                bytes_of(storage).copy_(copy)
            self._copies = []


def _tensors_in(pool: Sequence[range]) -> list[torch.Tensor]:
    """Every tensor of this process in the pool's memory. vLLM freezes its objects, and the garbage collector does not
    list frozen objects."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    known = [o for o in gc.get_objects() if type(o) is torch.Tensor or issubclass(type(o), torch.nn.Parameter)]
    if frozen:
        gc.freeze()
    return [t for t in known if t.layout == torch.strided and any(t.data_ptr() in piece for piece in pool)]


class HostMemory:
    """Sleep on a CPU: storages of parameters and KV cache are resized to 0 bytes and back, buffers (rotary tables) are
    not. A KV cache is filled with zeros: attention multiplies entries after a sequence's end by 0, and undefined
    entries may be NaN."""

    def __init__(self, worker: Any) -> None:
        self._storages = {
            "weights": list(distinct(vllm_api.model(worker).parameters()).values()),
            "kv_cache": list(distinct(worker.model_runner.kv_caches).values()),
        }
        self._bytes = {part: [s.nbytes() for s in storages] for part, storages in self._storages.items()}

    def sleep(self) -> None:
        for storages in self._storages.values():
            for storage in storages:
                storage.resize_(0)

    def wake_up(self, tags: Sequence[str]) -> None:
        """Allocate parts ("weights", "kv_cache") again; the values of weights are undefined."""
        for part in tags:
            for storage, size in zip(self._storages[part], self._bytes[part], strict=True):
                storage.resize_(size)
                if part == "kv_cache":
                    fill_with_zeros(storage)


def fill_with_zeros(storage: torch.UntypedStorage) -> None:
    """Fill a storage with zeros. On Linux its pages are dropped, since writing zeros takes seconds per GiB."""
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    if first < last and sys.platform == "linux" and _drop_pages(first, last - first):
        whole[: first - start].zero_()
        whole[last - start :].zero_()
    else:
        whole.zero_()


def _drop_pages(address: int, size: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(mmap.MADV_DONTNEED)) == 0
