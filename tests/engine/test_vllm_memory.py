"""The share of memory an engine gets; HostMemory: storages come back under the same tensors, a KV cache as zeros."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl_plugin.device import Device
from mindspeed_rl_plugin.engine import vllm_memory
from mindspeed_rl_plugin.engine.vllm_memory import HostMemory, fill_with_zeros, free_share


@pytest.mark.parametrize("bytes_", [1, 64, 4096, 5000, 3 << 20, 40 << 20])
@pytest.mark.parametrize("drops", [True, False])
def test_zeros_stay_within_the_storage(bytes_, drops, monkeypatch) -> None:
    if not drops:
        monkeypatch.setattr(vllm_memory, "_drop_pages", lambda address, size: False)
    # Neighbours on the heap: what is not ours must not change.
    tensors = [torch.full((bytes_,), 7, dtype=torch.uint8) for _ in range(3)]
    fill_with_zeros(tensors[1].untyped_storage())
    assert [(int(t.min()), int(t.max())) for t in tensors] == [(7, 7), (0, 0), (7, 7)]
    tensors[1].fill_(3)
    assert int(tensors[1].min()) == 3


@pytest.fixture
def engine():
    """One rank: a tied weight, a buffer, and a KV cache of two tensors in one storage."""
    model = torch.nn.Module()
    model.embed = torch.nn.Parameter(torch.ones(6, 4))
    model.head = model.embed
    model.norm = torch.nn.Parameter(torch.ones(4))
    model.register_buffer("rotary", torch.arange(4.0))
    cache = torch.full((2, 3000), torch.nan)
    runner = SimpleNamespace(get_model=lambda: model, kv_caches=[cache[0], cache[1]])
    return SimpleNamespace(model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)))


def test_sleep_and_wake(engine) -> None:
    runner = engine.model_executor.driver_worker.model_runner
    model, (first, second) = runner.get_model(), runner.kv_caches
    memory = HostMemory(engine)
    memory.sleep(1)
    sizes = [t.untyped_storage().nbytes() for t in (model.embed, model.norm, first, model.rotary)]
    assert sizes == [0, 0, 0, 16]
    memory.wake_up(["weights"])
    assert [t.untyped_storage().nbytes() for t in (model.embed, model.norm, first)] == [96, 16, 0]
    model.embed.data.fill_(2)
    assert model.head.sum() == 48
    memory.wake_up(["kv_cache"])
    assert first.tolist() == second.tolist() == [0.0] * 3000
    assert model.rotary.tolist() == [0, 1, 2, 3]


def test_a_reused_block_is_zeroed_too(engine, monkeypatch) -> None:
    # What an allocator hands out again is not zero; resize_ alone would not do.
    resize = torch.UntypedStorage.resize_

    def dirty(storage, size):
        resize(storage, size)
        if size:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", dirty)
    memory = HostMemory(engine)
    memory.sleep(1)
    memory.wake_up(["kv_cache"])
    assert engine.model_executor.driver_worker.model_runner.kv_caches[1].tolist() == [0.0] * 3000


class Accelerator(Device):
    """A device of which so much is free."""

    def __init__(self, free, total):
        super().__init__("cuda")
        self.free, self.total, self.events = free, total, []

    def memory_info(self):
        self.events.append("measure")
        return self.free, self.total

    def synchronize(self):
        self.events.append("synchronize")

    def empty_cache(self):
        self.events.append("empty_cache")

    def current(self):
        return torch.device("cpu")


GIB = 1 << 30


def ranks(monkeypatch, *others):
    """The world has these shares besides this rank's."""

    def all_reduce(least, op):
        assert op == torch.distributed.ReduceOp.MIN
        least.fill_(min([int(least), *(int(1000 * other) for other in others)]))

    monkeypatch.setattr(vllm_memory.dist, "get_world_size", lambda: 1 + len(others))
    monkeypatch.setattr(vllm_memory.dist, "all_reduce", all_reduce)


@pytest.mark.parametrize(
    "free, total, others, expected",
    [
        (60, 64, (), 0.837),  # (60 - 6.4) / 64
        (80, 80, (), 0.9),
        (60, 64, (0.5, 0.9), 0.5),  # another rank has less
        (8, 12, (), 0.5),  # at least two GiB stay
    ],
)
def test_the_engine_gets_what_is_free_less_a_reserve(monkeypatch, free, total, others, expected):
    ranks(monkeypatch, *others)
    device = Accelerator(free * GIB, total * GIB)
    share = free_share(device)
    assert share == expected and share * total + max(0.1 * total, 2) <= free
    assert device.events == ["synchronize", "empty_cache", "measure"]  # what torch keeps is free too


@pytest.mark.parametrize("free, others", [(6, ()), (60, (-0.1,))])
def test_no_memory_for_an_engine_is_refused_on_every_rank(monkeypatch, free, others):
    ranks(monkeypatch, *others)
    with pytest.raises(ValueError, match=f"{free} of 64 GiB .*--rl-device-memory-utilization"):
        free_share(Accelerator(free * GIB, 64 * GIB))
