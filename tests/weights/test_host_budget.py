"""Host memory of a machine: asked for by its ranks together, taken in sizes that nothing rounds up, used whole."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.device import Device
from mindspeed_rl_plugin.loop import build_async
from mindspeed_rl_plugin.weights import host_memory
from mindspeed_rl_plugin.weights.host_memory import HostMemoryBudget, HostPieces, HostWeights
from mindspeed_rl_plugin.weights.offload import TrainState

pytestmark = pytest.mark.quick
MB = 1 << 20


class Rank(Device):
    """A rank of a machine, whose allocator rounds up to powers of two, as torch's does for pinned memory."""

    def __init__(self, machine):
        super().__init__("cpu")
        self.machine = machine

    def host_available(self):
        return self.machine.total - self.machine.used

    def host_empty(self, shape, dtype):
        with self.machine.lock:
            self.machine.used += 1 << (shape[0] * dtype.itemsize - 1).bit_length()
        return super().host_empty(shape, dtype)


def machine_of(total):
    return SimpleNamespace(total=total, used=0, lock=threading.Lock())


class Table:
    """A wire between threads: everyone's row, once all have put theirs down."""

    def __init__(self, ranks):
        self.rows, self.all = {}, threading.Barrier(ranks, timeout=20)

    def share(self, what, row, length, device):
        self.rows[threading.get_ident()] = row
        self.all.wait()
        rows = list(self.rows.values())
        self.all.wait()
        return rows


@pytest.mark.parametrize(
    ("total", "each", "fits"),
    [
        (36, [8] * 4, True),  # where each counted for all after the others took theirs, the last saw 8 and asked for 32
        (70, [67], True),  # a buffer of 67 MB would take 128
        (30, [8, 4, 19], False),
    ],
)
def test_ranks_are_refused_together_and_take_what_they_ask_for(total, each, fits):
    """One thread per rank, whose weights have so many MB."""
    machine, table = machine_of(total * MB), Table(len(each))

    def swap(nbytes):
        layer, device = torch.nn.Linear(1024, nbytes // 4096, bias=False), Rank(machine)
        TrainState([layer], None, device, budget=HostMemoryBudget(device, table, len(each))).offload(["params"])

    with ThreadPoolExecutor(len(each)) as pool:
        done = [pool.submit(swap, size * MB) for size in each]
    for size, one in zip(each, done, strict=True):
        with nullcontext() if fits else pytest.raises(MemoryError) as caught:
            one.result()
        ours, all_ours = f"needs {size * MB} more bytes of host memory on this rank", f"{sum(each) * MB} on the"
        free = f"{len(each)} ranks of this machine together, and {total * MB} are free; offload less"
        assert fits or f"--rl-swap {ours}, {all_ours} {free}" in str(caught.value)
    assert machine.used == (sum(each) * MB if fits else 0)


def test_versions_of_the_weights_are_asked_for_together(monkeypatch):
    weights, machine = SimpleNamespace(shares=[SimpleNamespace(nbytes=10 * MB)]), machine_of(20 * MB - 1)
    monkeypatch.setattr(build_async.TrainerWeights, "of", lambda *given, **named: weights)
    for part in (build_async.ModelShape, build_async.Parallel):
        monkeypatch.setattr(part, "from_megatron_args", lambda *given: None)
    monkeypatch.setattr(build_async.engine_options, "dtype_of", lambda *given: torch.float32)
    budget = HostMemoryBudget(Rank(machine))
    inputs = SimpleNamespace(config=RLConfig(), args=None, vocab=8, host_memory_budget=lambda: budget)
    job = SimpleNamespace(ranks=SimpleNamespace(gather=None), topology=SimpleNamespace(rank=0))
    with pytest.raises(MemoryError, match=f"2 versions of the weights needs {20 * MB} more .*--rl-max-staleness"):
        build_async.make_publisher(SimpleNamespace(inputs=inputs, job=job), ())


def test_the_reference_is_asked_for_too():
    layer, device = torch.nn.Linear(1024, 1024, bias=False), Rank(machine_of(3 * MB))
    with pytest.raises(MemoryError, match=f"reference's weights .*{4 * MB} more bytes"):
        HostWeights.capture([layer], device)
    assert device.machine.used == 0


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(1, 5000), max_size=6), min_size=1, max_size=3))
def test_places_hold_what_is_written_into_them(swaps):
    """Over pieces that grow between swaps: every byte has a place of its own, and is found again."""
    with patch.object(host_memory, "GRANULE", 1024):
        memory = HostPieces(Device("cpu"))
        for sizes in swaps:
            memory.take(memory.lacking(sizes))
            assert not memory.lacking(sizes)
            places = memory.places(sizes)
            for number, (size, place) in enumerate(zip(sizes, places, strict=True)):
                assert sum(part.numel() for part in place) == size
                for part in place:
                    part.fill_(number)
            for number, place in enumerate(places):
                assert all((part == number).all() for part in place)
