"""Links between ranks: speed of each rank, messages of each ordered pair of ranks, collectives with right values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl_plugin.device.device import Device
from mindspeed_rl_plugin.processes import machine
from mindspeed_rl_plugin.ranks import gather_all
from mindspeed_rl_plugin.tools.doctor.memory_checks import busy, timed
from mindspeed_rl_plugin.tools.doctor.result import FAIL, NOT_RUN, PASS, Result, result
from mindspeed_rl_plugin.weights.p2p import MessageBatch, P2PChannel

SPEED, POINT_TO_POINT = "compute speed", "point to point"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SLOWER = 5  # times the median: named
LINK_FIX = "test this link alone (nccl-tests, hccl_test); look at cable, port, switch and *_SOCKET_IFNAME"
RANK_FIX = "look at temperature, clock and other processes of this device, and at the CPU cores of this rank"
Pair = tuple[int, int]  # sender, receiver


def link_checks(device: Device, limit: float) -> dict[str, Callable[[], list[Result]]]:
    """The checks by name; all ranks call them in this order. limit: seconds of each wait."""
    channel, slow = P2PChannel(dist.get_rank(), deadline=limit), set[int]()
    calls = {SPEED: partial(_speed, device, slow), POINT_TO_POINT: partial(_pairs, device, channel, slow)}
    calls |= {name: partial(_collective, name, device, channel) for name in COLLECTIVES}
    alone = {name: partial(list, [Result("links", name, NOT_RUN, "there is one rank")]) for name in calls}
    return alone if dist.get_world_size() == 1 else calls


def _shared(value: Any) -> list[Any]:
    """Each rank's value, in rank order. Raises ConnectionError if a rank is lost, TimeoutError if it is late."""
    try:
        return gather_all(value)
    except RuntimeError as error:
        raise ConnectionError(str(error)) from error


def _speed(device: Device, slow: set[int]) -> list[Result]:
    every = _shared(min(timed(device, partial(busy, device)) for _ in range(15)))
    middle = median_low(every)
    slow.update(rank for rank, seconds in enumerate(every) if seconds >= SLOWER * middle)
    who = "".join(f"; rank {rank}: {every[rank] / middle:.0f} times as long" for rank in sorted(slow))
    limit = f"less than {SLOWER} times the median"
    return [result("links", SPEED, not slow, f"median {middle * 1e3:.1f} ms{who}", limit, RANK_FIX)]


def meetings(rank: int, world: int) -> Iterator[Pair]:
    """Pairs of this rank. In round i ranks a and a ^ i meet, so that a round's pairs have no rank in common."""
    for peer in (rank ^ i for i in range(1, 1 << world.bit_length())):
        if peer < world:
            yield from sorted([(rank, peer), (peer, rank)])


def slow_pairs(times: Mapping[Pair, float], places: Sequence[str]) -> list[Pair]:
    """Pairs that take SLOWER times as long as usual within a machine, or between machines. Usual: the median over ranks
    of the fastest pair of each rank, since a slow rank of three is in most of the pairs. places: machines of ranks."""
    best: dict[bool, dict[int, float]] = {True: {}, False: {}}
    for (a, b), seconds in times.items():
        own = best[places[a] == places[b]]
        own.update({rank: min(seconds, own.get(rank, math.inf)) for rank in (a, b)})
    usual = {kind: median_low(own.values()) for kind, own in best.items() if own}
    return [(a, b) for (a, b), s in times.items() if s >= SLOWER * usual[places[a] == places[b]]]


def blame(slow: Sequence[Pair], world: int, known: set[int]) -> list[str]:
    """A rank instead of its links if all of them are slow; other links. known: ranks that were named before."""
    whole = {r for r in range(world) if world > 2 and sum(r in pair for pair in slow) == 2 * (world - 1)} - known
    return [f"rank {r}" for r in sorted(whole)] + [f"{a}->{b}" for a, b in slow if not {a, b} & (whole | known)]


def _pairs(device: Device, channel: P2PChannel, known: set[int]) -> list[Result]:
    rank, world, send = channel.rank, dist.get_world_size(), partial(_message, device, channel)
    channel.share("the first collective", [rank], 1, device.current())  # connects all ranks
    places, parts = zip(*_shared((machine(), {pair: send(pair) for pair in meetings(rank, world)})), strict=True)
    times = {(a, b): seconds for b, part in enumerate(parts) for (a, to), seconds in part.items() if to == b}
    named = blame(slow_pairs(times, places), world, known)
    for pair in 3 * [p for p in times if f"{p[0]}->{p[1]}" in named]:  # again, alone: other load is no reason then
        times[pair] = min(times[pair], _shared(send(pair) if rank in pair else 0.0)[pair[1]])
    limit = f"less than {SLOWER} times the median of {median_low(times.values()) * 1e3:.1f} ms"
    figures = {f"{a}->{b}": f"{s * 1e3:.1f} ms" for (a, b), s in times.items()}
    bad = [(w, figures.get(w, "all its links are slow")) for w in blame(slow_pairs(times, places), world, known)]
    row = partial(Result, "links", POINT_TO_POINT)
    good = row(PASS, f"{len(times)} pairs, at most {max(times.values()) * 1e3:.1f} ms", limit)
    return [row(FAIL, figure, limit, LINK_FIX if "->" in w else RANK_FIX, w) for w, figure in bad] or [good]


def _message(device: Device, channel: P2PChannel, pair: Pair) -> float:
    """Least seconds of three messages of a pair; both ranks call it. The receiver asks for each message, so that the
    first one puts both ranks in step. Raises ValueError if a value is wrong."""
    (a, b), what = pair, f"the message {pair[0]}->{pair[1]}"
    right = torch.arange(1 << (22 if device.is_cpu else 24), dtype=torch.int32, device=device.current()) + a
    data, request = right * (channel.rank == a), right[:1].clone()

    def once() -> None:
        for tensor, origin, target in ((request, b, a), (data, a, b)):
            sends, receives = ([(tensor, target, 0)], []) if channel.rank == origin else ([], [(tensor, origin, 0)])
            channel.post(what, sends, receives).wait()

    seconds = min(timed(device, once) for _ in range(3))
    if not torch.equal(data, right):
        raise ValueError(f"{what} arrived with other values")
    return seconds


def _collective(name: str, device: Device, channel: P2PChannel) -> list[Result]:
    rank, world = channel.rank, dist.get_world_size()
    part = (1 << (18 if device.is_cpu else 22)) // world
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
    figure, fix = f"{timed(device, lambda: work().wait()) * 1e3:.1f} ms", "report it with the versions of all libraries"
    return [result("links", name, torch.equal(out, right), figure, "right values in time", fix)]
