"""The checks of ranks, one on each device: storages and copies of its memory, messages of each ordered pair of ranks,
collectives with right values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from statistics import median_low
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl_plugin.device.device import Device, get_device
from mindspeed_rl_plugin.environment import launch_env
from mindspeed_rl_plugin.generators.launcher_ranks import init_group, store
from mindspeed_rl_plugin.processes import machine
from mindspeed_rl_plugin.ranks import gather_all, wait_at_most
from mindspeed_rl_plugin.tools.doctor.machine import DEVICE_CHECKS, device_results
from mindspeed_rl_plugin.tools.doctor.program import CheckCall, work
from mindspeed_rl_plugin.tools.doctor.result import Check, Result
from mindspeed_rl_plugin.tools.plan.plan import FAR_GB_PER_SECOND, HOST_GB_PER_SECOND, NEAR_GB_PER_SECOND
from mindspeed_rl_plugin.weights.p2p import MessageBatch, P2PChannel

_why = "the message, or the log that --keep keeps, says why"
RANKS_START = Check("links", "start of the ranks", "", _why, "machine memory links trainer")
COPY_WORDS = (1, 7, 4097, (1 << 18) + 3)  # sizes in 32-bit words; not multiples of a vector or a page
LEAST_SHARE = 0.1  # of what `plan` assumes; a device or link that is slower fails
_driver = "report it with the versions of driver, torch and torch-npu; until it is mended, train with --rl-swap none"
_slot = "look at the device's PCIe slot and at its NUMA node (numactl), and give `plan --host` this figure"
_bits = partial(Check, "memory", limit="every bit is equal", fix=_driver, explains="memory links engine trainer")
# All but "blocking" start behind other work on the device. If their wait did not work, wrong bits would be read.
COPIES = tuple(_bits(f"copies, {how}") for how in ("blocking", "non_blocking", "a stream waits", "the host waits"))
FREED = _bits("storage allocated again")
BANDWIDTH = Check("memory", "bandwidth", "at least {least:g} GB/s; plan assumes {plan:g}", _slot)
MEMORY_CHECKS = (*COPIES, FREED, BANDWIDTH)
ETHERNET = 1.25  # GB/s of 10 Gbit/s: a link between machines that is as fast passes, whatever `plan` assumes
SLOWER = 5  # times the median: named
_link_fix = "test this link alone (nccl-tests, hccl_test); look at cable, port, switch and *_SOCKET_IFNAME"
_rank_fix = "look at temperature, clock and other processes of this device, and at the CPU cores of this rank"
_slower = f"less than {SLOWER} times the median"
SPEED = Check("links", "compute speed", _slower, _rank_fix, "links")
POINT_TO_POINT = Check("links", "point to point", f"{_slower} of {{usual}} ms", _link_fix, "links")
_least = "at least {near:g} GB/s within a machine, {far:g} between two"
LINK_SPEED = Check("links", "speed of most links", _least, "give `plan` these figures (--near, --far); " + _link_fix)
_texts = "right values in time", "report it with the versions of all libraries", "links trainer"
_names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
COLLECTIVES = tuple(Check("links", name, *_texts) for name in _names)
LINK_CHECKS = (SPEED, POINT_TO_POINT, LINK_SPEED, *COLLECTIVES)
RANK_CHECKS = (RANKS_START, *DEVICE_CHECKS, *MEMORY_CHECKS, *LINK_CHECKS)
Pair = tuple[int, int]  # sender, receiver


def steps(seconds: float) -> Iterator[CheckCall]:
    """All checks of a rank, in the same order on all ranks. seconds: limit for all; a fifth of it for each wait."""
    device, limit = get_device(), seconds / 5

    def start() -> tuple[bool, str]:
        wait_at_most(limit)
        init_group(store(), timedelta(seconds=limit))
        return True, ""

    yield CheckCall(RANKS_START, start)
    yield CheckCall(DEVICE_CHECKS[0], partial(device_results, device, launch_env()["local_rank"], gather_all))
    yield from memory_steps(device)
    yield from link_steps(device, limit)


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
    calls = [*(partial(_copies, device, way) for way in ways), partial(_again, device)]
    yield from (CheckCall(check, partial(_equal, call)) for check, call in zip((*COPIES, FREED), calls, strict=True))
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
    """Queue work of some milliseconds on the current stream; a rank that is 20 times slower must not be too late."""
    matrix = torch.full(2 * (192 if device.is_cpu else 4096,), 1e-4, device=device.current())
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


def link_steps(device: Device, limit: float) -> Iterator[CheckCall]:
    """The checks; all ranks call them in this order. limit: seconds of each wait."""
    if dist.get_world_size() == 1:
        yield from (CheckCall(check, lambda: (None, "there is one rank")) for check in LINK_CHECKS)
        return
    channel = P2PChannel(dist.get_rank(), deadline=limit)
    yield CheckCall(SPEED, partial(_speed, device))
    yield CheckCall(POINT_TO_POINT, partial(_pairs, device, channel))
    yield from (CheckCall(check, partial(_run, check.name, device, channel)) for check in COLLECTIVES)


def _shared(value: Any) -> list[Any]:
    """Each rank's value, in rank order. Raises ConnectionError if a rank is lost, TimeoutError if it is late."""
    try:
        return gather_all(value)
    except RuntimeError as error:
        raise ConnectionError(str(error)) from error


def _speed(device: Device) -> list[Result]:
    every = _shared(min(timed(device, partial(busy, device)) for _ in range(15)))
    middle = median_low(every)
    slow = tuple(rank for rank, seconds in enumerate(every) if seconds >= SLOWER * middle)
    times = ", ".join(f"{every[rank] / middle:.0f}" for rank in slow)
    figure = f"{times} times as long as the median of " if slow else "median "
    return [replace(SPEED.result(not slow, f"{figure}{middle * 1e3:.1f} ms"), ranks=slow)]


def meetings(rank: int, world: int) -> Iterator[Pair]:
    """Pairs of this rank. In round i ranks a and a ^ i meet, so that a round's pairs have no rank in common."""
    for peer in (rank ^ i for i in range(1, 1 << world.bit_length())):
        if peer < world:
            yield from sorted([(rank, peer), (peer, rank)])


def usual_times(times: Mapping[Pair, float], places: Sequence[str]) -> dict[bool, float]:
    """Usual seconds of a message within a machine (True) and between machines (False): the median; with 2 or 3 ranks,
    of which a slow one is in most pairs, the median over ranks of each one's fastest. places: machines of ranks."""
    usual = {}
    for kind in (True, False):
        of = {pair: seconds for pair, seconds in times.items() if (places[pair[0]] == places[pair[1]]) == kind}
        ranks = {rank for pair in of for rank in pair}
        fastest = [min(seconds for pair, seconds in of.items() if rank in pair) for rank in ranks]
        if of:
            usual[kind] = median_low(of.values() if len(ranks) > 3 else fastest)
    return usual


def slow_pairs(times: Mapping[Pair, float], places: Sequence[str]) -> list[Pair]:
    """Pairs that take SLOWER times as long as usual."""
    usual = usual_times(times, places)
    return [(a, b) for (a, b), seconds in times.items() if seconds >= SLOWER * usual[places[a] == places[b]]]


def blame(slow: Sequence[Pair], world: int) -> dict[str, tuple[int, ...]]:
    """What is slow -> its ranks: a rank instead of its links if all of them are slow; other links."""
    whole = {r for r in range(world) if world > 2 and sum(r in pair for pair in slow) == 2 * (world - 1)}
    return {f"rank {r}": (r,) for r in sorted(whole)} | {f"{a}->{b}": (a, b) for a, b in slow if not {a, b} & whole}


def _pairs(device: Device, channel: P2PChannel) -> list[Result]:
    rank, world, send = channel.rank, dist.get_world_size(), partial(_message, device, channel)
    channel.share("the first collective", [rank], 1, device.current())  # connects all ranks
    places, parts = zip(*_shared((machine(), {pair: send(pair) for pair in meetings(rank, world)})), strict=True)
    times = {(a, b): seconds for b, part in enumerate(parts) for (a, to), seconds in part.items() if to == b}
    named = blame(slow_pairs(times, places), world)
    for pair in 3 * [(a, b) for a, b in times if f"{a}->{b}" in named]:  # again, alone: other load is no reason then
        times[pair] = min(times[pair], _shared(send(pair) if rank in pair else 0.0)[pair[1]])
    usual = usual_times(times, places)
    row = partial(POINT_TO_POINT.result, usual=", ".join(f"{seconds * 1e3:.1f}" for seconds in usual.values()))
    figures = {f"{a}->{b}": f"{s * 1e3:.1f} ms" for (a, b), s in times.items()}
    bad = blame(slow_pairs(times, places), world)
    found = [replace(row(False, figures.get(w, "all its links are slow"), w), ranks=ranks) for w, ranks in bad.items()]
    good = row(True, f"{len(times)} pairs, at most {max(times.values()) * 1e3:.1f} ms")
    return [*(found or [good]), speed_of_most(times, places, device.is_cpu)]


def speed_of_most(times: Mapping[Pair, float], places: Sequence[str], host: bool) -> Result:
    """The median speed of the links within machines and of those between them. host: on a CPU each speed passes."""
    sent, near, far = _bytes(host) / 1e9, NEAR_GB_PER_SECOND, FAR_GB_PER_SECOND / places.count(places[0])
    least = [0.0 if host else min(LEAST_SHARE * plan, most) for plan, most in ((near, near), (far, ETHERNET))]
    of_kind = [[s for (a, b), s in times.items() if (places[a] == places[b]) == kind] for kind in (True, False)]
    found = [(sent / median_low(of), low) for of, low in zip(of_kind, least, strict=True) if of]
    figure = ", ".join(f"{speed:.2f} GB/s" for speed, _ in found)
    return LINK_SPEED.result(all(speed >= low for speed, low in found), figure, near=least[0], far=least[1])


def _bytes(host: bool) -> int:
    """Size of a message [bytes]. On an accelerator it takes a millisecond or more, and `_message` 1.2 GiB of memory."""
    return 4 << (22 if host else 27)


def _message(device: Device, channel: P2PChannel, pair: Pair) -> float:
    """Least seconds of three messages of a pair; both ranks call it. The receiver asks for each message, so that the
    first one puts both ranks in step. Raises ValueError if a value is wrong."""
    (a, b), what = pair, f"the message {pair[0]}->{pair[1]}"
    right = torch.arange(_bytes(device.is_cpu) // 4, dtype=torch.int32, device=device.current()) + a
    data, request = right * (channel.rank == a), right[:1].clone()

    def once() -> None:
        for tensor, origin, target in ((request, b, a), (data, a, b)):
            sends, receives = ([(tensor, target, 0)], []) if channel.rank == origin else ([], [(tensor, origin, 0)])
            channel.post(what, sends, receives).wait()

    seconds = min(timed(device, once) for _ in range(3))
    if not torch.equal(data, right):
        raise ValueError(f"{what} arrived with other values")
    return seconds


def _run(name: str, device: Device, channel: P2PChannel) -> tuple[bool, str, float]:
    rank, world = channel.rank, dist.get_world_size()
    part = max((1 << (20 if device.is_cpu else 24)) // world**2, 1)
    of = [torch.arange(world * part, device=device.current()).remainder(251).float() + r for r in range(world)]
    own, total, mine = of[rank].clone(), torch.stack(of).sum(0), slice(rank * part, (rank + 1) * part)
    start, out, right = {  # call, its output, right values
        "all_reduce": (partial(dist.all_reduce, own), own, total),
        "all_gather": (partial(dist.all_gather_into_tensor, o := torch.cat(of) * 0, own), o, torch.cat(of)),
        "reduce_scatter": (partial(dist.reduce_scatter_tensor, o := own[mine] * 0, own), o, total[mine]),
        "all_to_all": (partial(dist.all_to_all_single, o := own * 0, own), o, torch.cat([t[mine] for t in of])),
        "broadcast": (partial(dist.broadcast, own, world - 1), own, of[-1]),
    }[name]
    work = partial(MessageBatch, channel, name, {*range(world)} - {rank}, lambda: [start(async_op=True)], [out, own])
    seconds = timed(device, lambda: work().wait())
    return torch.equal(out, right), f"{seconds * 1e3:.1f} ms", seconds


if __name__ == "__main__":
    work(steps)
