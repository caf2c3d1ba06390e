"""Memory of one rank's device: storages that are freed and allocated again, copies that keep every bit, bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mindspeed_rl_plugin.device.device import Device
from mindspeed_rl_plugin.tools.doctor.program import CheckCall
from mindspeed_rl_plugin.tools.doctor.result import Check
from mindspeed_rl_plugin.tools.plan.plan import HOST_GB_PER_SECOND

COPY_WORDS = (1, 7, 4097, (1 << 18) + 3)  # sizes in 32-bit words; not multiples of a vector or a page
LEAST_SHARE = 0.1  # of what `plan` assumes; a device or link that is slower fails
_driver = "report it with the versions of driver, torch and torch-npu; until it is mended, train with --rl-swap none"
_slot = "look at the device's PCIe slot and at its NUMA node (numactl), and give `plan --host` this figure"
_bits = partial(Check, "memory", limit="every bit is equal", fix=_driver, explains="memory links engine trainer")
FREED = _bits("storage allocated again")
# The later ones start behind other work; without its wait, each would be wrong.
COPIES = (
    *map(_bits, ("copies, blocking", "copies, non_blocking", "copies, a stream waits", "copies, the host waits")),
)
BANDWIDTH = Check("memory", "bandwidth", "at least {least:g} GB/s; plan assumes {plan:g}", _slot)
MEMORY_CHECKS = (FREED, *COPIES, BANDWIDTH)


def memory_steps(device: Device) -> Iterator[CheckCall]:
    """The checks of one device."""
    copier = device.copier()

    def late(copy: Callable[[bool], object]) -> None:
        busy(device)
        copy(True)

    ways = (
        lambda copy: copy(False),
        lambda copy: (late(copy), device.synchronize()),
        lambda copy: copier.start(partial(late, copy)).wait(),
        lambda copy: copier.start(partial(late, copy)).synchronize(),
    )
    calls = [partial(_again, device), *(partial(_copies, device, way) for way in ways)]
    yield from (CheckCall(check, partial(_equal, call)) for check, call in zip((FREED, *COPIES), calls, strict=True))
    least = 0.0 if device.is_cpu else HOST_GB_PER_SECOND * LEAST_SHARE
    yield CheckCall(BANDWIDTH, partial(_bandwidth, device, least), limits={"least": least, "plan": HOST_GB_PER_SECOND})


def _equal(call: Callable[[Tensor], Iterator[Tensor]]) -> tuple[bool, str]:
    """Whether all tensors that the call yields for a pattern have its bits. One NaN is not equal to another one."""
    found = [(words, back.cpu()) for words in map(_pattern, COPY_WORDS) for back in call(words)]
    wrong = sum(not torch.equal(words.view(torch.int32), back.view(torch.int32)) for words, back in found)
    return not wrong, f"{wrong} of {len(found)} wrong"


def _pattern(count: int) -> Tensor:
    """`[count]` float32, whose words are all different; every third is a NaN with bits of its own."""
    words = np.arange(1, count + 1, dtype=np.uint32) * np.uint32(0x9E3779B1)
    words[::3] = (words[::3] & np.uint32(0x3FFFFF)) | np.uint32(0x7F800001)
    return torch.from_numpy(words).view(torch.float32)


def _again(device: Device, words: Tensor) -> Iterator[Tensor]:
    base = torch.zeros_like(words, device=device.current())
    storage, view = base.untyped_storage(), base.view(torch.int32).view(-1, 1)
    storage.resize_(0)
    storage.resize_(words.nbytes)
    view.copy_(words.view(torch.int32).view(-1, 1))
    yield base if base.untyped_storage()._cdata == storage._cdata else torch.zeros_like(base)


def _copies(device: Device, way: Callable[[Callable[[bool], object]], object], words: Tensor) -> Iterator[Tensor]:
    """What arrives on the device and on the host, through pageable and through pinned memory."""
    pinned = [device.host_empty(words.shape, words.dtype) for _ in range(2)]
    for host, back in ((words, torch.zeros_like(words)), (pinned[0].copy_(words), pinned[1].zero_())):
        there = torch.zeros_like(words, device=device.current())
        way(lambda late, h=host, t=there: t.copy_(h, non_blocking=late))
        yield there.clone()
        way(lambda late, b=back, t=there: b.copy_(t, non_blocking=late))
        there.zero_()
        device.synchronize()
        yield back


def busy(device: Device) -> None:
    """Queue work of some milliseconds on the current stream."""
    matrix = torch.full((256, 256) if device.is_cpu else (4096, 4096), 1e-4, device=device.current())
    for _ in range(8):
        torch.mm(matrix, matrix)


def timed(device: Device, call: Callable[[], object]) -> float:
    """Seconds until the device has done what the call queues."""
    device.synchronize()
    began = time.perf_counter()
    call()
    device.synchronize()
    return time.perf_counter() - began


def _bandwidth(device: Device, least: float) -> tuple[bool, str, float]:
    host = device.host_empty((1 << (22 if device.is_cpu else 26),), torch.float32).zero_()
    there = torch.zeros_like(host, device=device.current())
    ways = (partial(there.copy_, host, non_blocking=True), partial(host.copy_, there, non_blocking=True))
    up, down = (host.nbytes / 1e9 / min(timed(device, way) for _ in range(4)) for way in ways)
    figure = f"{min(up, down):.1f} GB/s (to the device {up:.1f}, to the host {down:.1f})"
    return min(up, down) >= least, figure, -min(up, down)
