"""Host memory of a machine: asked for by its ranks together, taken in sizes that nothing rounds up, used whole."""

import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.device import Device
from mindspeed_rl_plugin.loop import build_async
from mindspeed_rl_plugin.weights import host_memory
from mindspeed_rl_plugin.weights.host_memory import HostMemoryBudget, HostPieces
from mindspeed_rl_plugin.weights.host_weights import HostWeights
from mindspeed_rl_plugin.weights.offload import TrainState

MB = 1 << 20


class Machine:
    """Host memory of a machine whose allocator rounds up to powers of two, as torch's does for pinned memory."""

    def __init__(self, total):
        self.total, self.used, self.lock = total, 0, threading.Lock()


class Rank(Device):
    def __init__(self, machine):
        super().__init__("cpu")
        self.machine = machine

    def host_available(self):
        return self.machine.total - self.machine.used

    def host_empty(self, shape, dtype):
        with self.machine.lock:
            self.machine.used += 1 << (shape[0] * dtype.itemsize - 1).bit_length()
        return super().host_empty(shape, dtype)


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


def together(machine, nbytes):
    """One thread per rank, whose weights have so many bytes: what the swap of each raised, None where it went well."""
    table, said = Table(len(nbytes)), [None] * len(nbytes)

    def run(rank):
        device = Rank(machine)
        layer = torch.nn.Linear(1024, nbytes[rank] // 4096, bias=False)
        state = TrainState([layer], None, device, budget=HostMemoryBudget(device, table, len(nbytes)))
        try:
            state.offload(["params"])
        except MemoryError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=run, args=(r,)) for r in range(len(nbytes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_ranks_that_fit_together_are_not_refused():
    """Where each counted for all after the others had taken theirs, the last of them saw 8 MB free and asked for 32."""
    machine = Machine(36 * MB)
    assert together(machine, [8 * MB] * 4) == [None] * 4
    assert machine.used == 32 * MB


def test_ranks_that_do_not_fit_are_refused_alike_and_take_nothing():
    machine = Machine(30 * MB)
    said = together(machine, [8 * MB, 4 * MB, 19 * MB])
    assert machine.used == 0
    for text, own in zip(said, [8 * MB, 4 * MB, 19 * MB], strict=True):
        assert text.startswith(
            f"--rl-swap needs {own} more bytes of host memory on this rank, {31 * MB} on the 3 ranks of this machine "
            f"together, and {30 * MB} are free; offload less"
        )


def test_what_is_asked_for_is_what_a_rounding_allocator_takes():
    machine = Machine(70 * MB)  # a buffer of 67 MB would take 128
    assert together(machine, [67 * MB]) == [None]
    assert machine.used == 67 * MB


def test_versions_of_the_weights_are_asked_for_together(monkeypatch):
    weights, machine = SimpleNamespace(shares=[SimpleNamespace(nbytes=10 * MB)]), Machine(20 * MB - 1)
    monkeypatch.setattr(build_async.TrainerWeights, "of", lambda *given, **named: weights)
    for part in (build_async.ModelShape, build_async.Parallel):
        monkeypatch.setattr(part, "from_megatron_args", lambda *given: None)
    monkeypatch.setattr(build_async.engine_options, "dtype_of", lambda *given: torch.float32)
    inputs, ranks = SimpleNamespace(config=RLConfig(), args=None, vocab=8), SimpleNamespace(gather=None)
    with pytest.raises(MemoryError, match=f"2 versions of the weights needs {20 * MB} more .*--rl-max-staleness"):
        build_async.make_publisher(inputs, 0, ranks, None, (), HostMemoryBudget(Rank(machine)))


def test_the_reference_is_asked_for_too():
    layer, device = torch.nn.Linear(1024, 1024, bias=False), Rank(Machine(3 * MB))
    with pytest.raises(MemoryError, match=f"reference's weights .*{4 * MB} more bytes"):
        HostWeights.capture([layer], device)
    assert device.machine.used == 0


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(1, 5000), max_size=6), min_size=1, max_size=3))
def test_places_hold_what_is_written_into_them(swaps):
    """Over pieces that grow between swaps: every byte has a place of its own, and is found again."""
    before, host_memory.GRANULE = host_memory.GRANULE, 1024
    try:
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
    finally:
        host_memory.GRANULE = before
