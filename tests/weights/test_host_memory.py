"""A host without memory for what a swap wants to keep there: real allocations that fail, and limits that are read."""

import os
import sys
from pathlib import Path

import pytest
from commands import ended

from mindspeed_rl_plugin.device.meters import host_available

TESTS = Path(__file__).parent
MB = 1 << 20

# A trainer of 80 MB whose process may not grow: the kernel itself refuses the host buffers.
FULL = f"""
import resource, sys
sys.path.insert(0, {str(TESTS)!r})
import torch
from mindspeed_rl_plugin.device import Device
from mindspeed_rl_plugin.weights.host_memory import HostWeights
from mindspeed_rl_plugin.weights.offload import TrainState

model = torch.nn.ModuleList(torch.nn.Linear(1 << 10, 10 << 10, bias=False) for _ in range(2))
before = [p.detach().clone() for p in model.parameters()]
state = TrainState([model], None, Device("cpu"))
unlimited = resource.getrlimit(resource.RLIMIT_AS)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

def refused(work):
    resource.setrlimit(resource.RLIMIT_AS, (size + (68 << 20), unlimited[1]))  # enough for the first of two pieces
    try:
        work()
    except MemoryError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, unlimited)

swap, capture = (lambda: state.offload(["params"])), (lambda: HostWeights.capture([model]))
for work, lacked in ((swap, 16), (swap, 16), (capture, 64)):
    said = refused(work)
    assert said and f"the host does not have {{lacked << 20}} more bytes for training state" in said, said
    assert "--rl-swap grads,optimizer" in said and not state.off_device
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
assert state.offload(["params"]) == 80 << 20
state.onload()
assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
print("kept")
"""


def test_a_process_that_may_not_grow_keeps_its_weights():
    assert ended(sys.executable, "-c", FULL).stdout.strip() == "kept"


def group(root: Path, path: str, limit: str, used: int, file_pages: int, *, version: int = 2) -> None:
    """A control group's files."""
    folder = root / "sys/fs/cgroup" / ("memory" if version == 1 else "") / path
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    own = "inactive_file 1\ntotal_" if version == 1 else ""  # which counts the groups inside as well
    (folder / "memory.stat").write_text(f"anon 5\n{own}inactive_file {file_pages}\n")


@pytest.mark.parametrize(
    "groups, expected",
    [
        ((), 900 * MB),  # the kernel's own number
        ((("", "max", 0, 0),), 900 * MB),
        ((("", str(500 * MB), 450 * MB, 30 * MB),), 80 * MB),  # a container's
        ((("jobs/one", str(500 * MB), 100 * MB, 0), ("jobs", str(300 * MB), 250 * MB, 0)), 50 * MB),  # the outer one
        ((("jobs/one", str(200 * MB), 90 * MB, 0), ("jobs", "max", 0, 0)), 110 * MB),
        ((("jobs/one", str(200 * MB), 300 * MB, 0),), 0),
        ((("jobs/two", str(200 * MB), 300 * MB, 0),), 900 * MB),  # another job's
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_control_groups(tmp_path, version, groups, expected):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {900 << 10} kB\n")
    lines = ["9:name=systemd:/", "4:memory:/jobs/one", "0::/"] if version == 1 else ["0::/jobs/one"]
    (tmp_path / "proc/self/cgroup").write_text("\n".join(lines) + "\n")
    for path, limit, used, file_pages in groups:
        if version == 1 and limit == "max":
            limit = str(2**63 - 4096)  # how version 1 says it
        group(tmp_path, path, limit, used, file_pages, version=version)
    assert host_available(tmp_path) == expected


def test_the_machine_that_runs_this():
    assert 0 < host_available() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
