"""Detection with its override, the no-op streams of the CPU, and what each memory meter counts."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl_plugin.device import Device, ProcessMeter, StorageMeter, detect
from mindspeed_rl_plugin.device.device import StreamCopier
from mindspeed_rl_plugin.dock.memory import mapped, nameless_file

pytestmark = pytest.mark.quick

MIB = 1 << 20


@pytest.mark.parametrize("kind", ["npu", "cuda", "cpu"])
def test_override_is_taken_at_its_word(monkeypatch, kind):
    monkeypatch.setenv("MINDSPEED_RL_DEVICE", kind.upper())
    assert detect() == kind


def test_unknown_kinds_are_refused(monkeypatch):
    monkeypatch.setenv("MINDSPEED_RL_DEVICE", "tpu")
    with pytest.raises(ValueError, match="MINDSPEED_RL_DEVICE='tpu'.*npu, cuda, cpu"):
        detect()


def test_cpu_is_what_is_left(monkeypatch):
    monkeypatch.delenv("MINDSPEED_RL_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect() == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert detect() == "cuda"


def test_an_npu_is_profiled_by_the_class_that_deletes_its_raw_data(monkeypatch):
    names = SimpleNamespace(CPU="cpu", NPU="npu")
    theirs = SimpleNamespace(ProfilerActivity=names, _KinetoProfile=lambda activities: activities, profile=None)
    monkeypatch.setitem(sys.modules, "torch_npu.profiler", theirs)
    assert Device("npu").profiler() == ["cpu", "npu"]


def test_a_meter_of_a_device_says_what_it_measures():
    assert "process on the host" in Device("cpu").memory.measures
    assert "device memory" in Device("cuda").memory.measures and "device memory" in Device("npu").memory.measures


def test_process_meter_sees_a_tensor_and_forgets_the_peak():
    meter = ProcessMeter()
    meter.reset_peak()
    before = meter.allocated()
    block = torch.ones(200 * MIB, dtype=torch.uint8)
    assert meter.allocated() - before > 190 * MIB
    del block
    assert meter.peak() - before > 190 * MIB
    meter.reset_peak()
    assert meter.peak() - before < 100 * MIB


def test_process_meter_without_the_kernels_peak():
    meter = ProcessMeter()
    meter._kernel_peak = False
    meter.reset_peak()
    meter._kernel_peak = False
    block = torch.ones(100 * MIB, dtype=torch.uint8)
    top = meter.allocated()
    del block
    assert meter.peak() >= top


def test_storage_meter_counts_each_storage_once():
    with StorageMeter() as meter:
        base = torch.zeros(MIB, dtype=torch.uint8)
        views = base[:10], base.view(2, -1)
        assert meter.allocated() == MIB
        double = base + base
        assert meter.allocated() == 2 * MIB
        del double
        assert (meter.allocated(), meter.peak()) == (MIB, 2 * MIB)
        meter.reset_peak()
        assert meter.peak() == MIB
        del base, views
        assert meter.allocated() == 0


def test_storage_meter_sees_storages_shrink_and_grow():
    with StorageMeter() as meter:
        weight = torch.arange(MIB, dtype=torch.int8)
        view = weight[5:]
        away = weight.clone()
        before = meter.allocated()
        weight.untyped_storage().resize_(0)
        assert meter.allocated() == before - MIB
        weight.untyped_storage().resize_(MIB)
        weight.copy_(away)
        assert meter.allocated() == before
        assert torch.equal(view, away[5:])
    assert torch.UntypedStorage.resize_ is torch._C.StorageBase.resize_


def test_host_buffers_are_no_device_memory():
    device = Device("cpu")
    with StorageMeter() as meter:
        host = device.host_empty((4, MIB // 16), torch.float32)
        assert host.shape == (4, MIB // 16) and host.is_contiguous()
        assert (meter.allocated(), meter.peak()) == (0, 0)
        host.fill_(1.0)
        copy = host * 1
        assert meter.allocated() == copy.nbytes
        del host, copy
        # A later tensor may get the same storage object's address, and must count again.
        rest = [torch.zeros(MIB // 4, dtype=torch.float32) for _ in range(4)]
        assert meter.allocated() == 4 * MIB
        del rest


def test_memory_is_page_locked_once_and_until_it_goes(monkeypatch):
    asked = []

    class Library:
        def cudaHostRegister(self, address, nbytes, flags):
            asked.append(("lock", address, nbytes))
            return 0

        def cudaHostUnregister(self, address):
            there = f"{address:x}-" in Path("/proc/self/maps").read_text()
            asked.append(("unlock", address, "mapped" if there else "gone"))

    monkeypatch.setattr(torch.cuda, "cudart", Library)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    file = nameless_file(MIB)
    memory = mapped(file, MIB)[: MIB - 5]
    os.close(file)
    address, device = memory.ctypes.data, Device("cuda")
    for _ in range(2):
        device.page_lock(memory)
    Device("cpu").page_lock(memory)
    assert asked == [("lock", address, MIB - 5)]
    held = torch.from_numpy(memory)
    del memory
    assert len(asked) == 1 and held.data_ptr() == address
    del held
    assert asked[1:] == [("unlock", address, "mapped")], "before the memory is"


def test_tracked_tensors_are_counted():
    older = torch.zeros(MIB, dtype=torch.uint8)
    with StorageMeter() as meter:
        meter.track(older, older[2:])
        assert meter.allocated() == MIB
        del older
        assert meter.allocated() == 0


def test_a_device_meter_asks_the_device_and_not_torch(monkeypatch):
    """A sleeping engine's memory is free again, while torch goes on counting its tensors."""
    free = iter([10, 4, 9, 9, 9])
    monkeypatch.setattr(Device, "memory_info", lambda self: (next(free), 16))
    meter = Device("npu").memory
    assert [meter.allocated(), meter.allocated()] == [6, 12] and meter.peak() == 12
    meter.reset_peak()
    assert meter.peak() == 7


@pytest.mark.gpu
def test_accelerator_counters():
    device = Device(detect())
    temporary = device.temporary()
    with temporary.measured():
        block = torch.zeros(8 * MIB, dtype=torch.uint8, device=device.current())
        del block
    assert temporary.peak >= 8 * MIB
    device.memory.reset_peak()
    assert 0 < device.memory.allocated() <= device.memory.peak() <= device.memory_info()[1]
    assert device.host_empty((3,), torch.float32).is_pinned()


def test_copies_pass_at_the_end_of_the_interpreter_too():
    """The engine is shut down in an atexit callback, when threads take nothing more."""
    script = """
import atexit
from mindspeed_rl_plugin.device.device import ThreadCopier

copier, done = ThreadCopier(), []
copier.start(lambda: done.append("before")).wait()

def last():
    copier.start(lambda: done.append("after")).wait()
    print(*done)

atexit.register(last)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (process.stdout.split(), process.stderr) == (["before", "after"], "")


def test_copies_on_a_side_stream_pass_between_what_was_queued_and_what_waits():
    order = []

    def stream(name):
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: order.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: order.append(f"{name} waits for the event"),
        )

    current, side = stream("current"), stream("side")
    event = SimpleNamespace(
        record=lambda where: order.append(f"event on {where.name}"), synchronize=lambda: order.append("host waits")
    )
    api = SimpleNamespace(Stream=lambda: side, Event=lambda: event, current_stream=lambda: current, stream=nullcontext)
    copies = StreamCopier(api).start(lambda: order.append("copies"))
    copies.wait()
    copies.synchronize()
    last = ["current waits for the event", "host waits"]
    assert order == ["side waits for current", "copies", "event on side", *last]
