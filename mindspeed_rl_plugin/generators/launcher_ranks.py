"""The last ranks of a job as generators: the process group of their engine, and how they find the trainers' dock.

Trainers and generators are ranks of one launcher and share the launcher's store; Megatron sees only the trainers.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.environment import (
    become_part,
    begin_start,
    last_words,
    launch_env,
    launcher_store,
    may_restart,
    say,
)

KEY, ENDED, START_NAME = "dock", "ended", "start"  # keys in the launcher's store
KEY_LOOK_SECONDS = 0.1  # between two looks for a key
BEGIN_SECONDS = 600.0  # most time from the start of rank 0 to that of another rank, or the reverse
WATCH_SECONDS = 1.0  # between two checks whether another rank was started again
_over = threading.Event()  # set when this process ends
_own_store: dist.Store | None = None  # the store of this start, held by rank 0


@dataclass(frozen=True)
class RankSplit:
    """How ranks are divided: trainers are the first ranks, generators the last."""

    world: int  # ranks of the launcher
    local: int  # ranks of one machine
    generators: int  # how many ranks generate
    engine: int  # ranks of one engine
    deadline: float  # seconds to wait for the trainers

    @property
    def trainers(self) -> int:
        return self.world - self.generators

    @property
    def engines(self) -> int:
        return self.generators // self.engine

    def check(self) -> None:
        """Raise ValueError if the ranks cannot be divided so."""
        flag = f"--rl-generators {self.generators}"
        if self.trainers < 1:
            raise ValueError(f"{flag} leaves no rank of {self.world} to train; start more ranks or fewer generators")
        if self.generators % self.engine:
            raise ValueError(
                f"{flag} is not a multiple of the {self.engine} ranks of an engine (--rl-generate-tp, "
                f"--rl-generate-ep); {self._near()}"
            )
        if self.world > self.local and self.generators % self.local:
            raise ValueError(
                f"{flag} with {self.local} ranks a machine leaves {self.trainers} trainers, but Megatron needs all "
                f"ranks of its machines; give a multiple of {self.local}"
            )

    def _near(self) -> str:
        """What to change, with the nearest valid numbers of generators, for the message."""
        step = math.lcm(self.engine, self.local) if self.world > self.local else self.engine
        below = self.generators - self.generators % step
        fit = [n for n in (below, below + step) if 0 < n < self.world]
        few = f"start more than {step} ranks, or make engines smaller"
        return f"give {' or '.join(map(str, fit))}" if fit else few

    def text(self) -> str:
        """The line that the job's first rank prints."""
        machines, each = max(self.trainers // self.local, 1), min(self.local, self.trainers)
        return (
            f"trainers: {ranks_text(0, self.trainers)} (WORLD_SIZE {self.trainers}: {self.world} less "
            f"--rl-generators {self.generators}; machines {machines}, ranks a machine {each}); generators: "
            f"{ranks_text(self.trainers, self.generators)} (engines {self.engines}, ranks an engine {self.engine})"
        )


def ranks_text(first: int, count: int) -> str:
    """A text that names `count` ranks from `first` on."""
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"


def part(split: RankSplit) -> int | None:
    """Make this process a trainer, or a rank of an engine. Returns the number of the engine, None for a trainer. Raises
    ValueError if the ranks cannot be divided so."""
    split.check()
    rank = launch_env()["rank"]
    if rank < split.trainers:
        say(split.text())
        become_part(0, split.trainers, min(split.local, split.trainers))
        return None
    engine = (rank - split.trainers) // split.engine
    become_part(split.trainers + engine * split.engine, split.engine, min(split.engine, split.local))
    return engine


def store() -> dist.Store:
    """The launcher's store, shared by trainers and generators; after `begin`, with only the keys of this start."""
    host, port, start = launcher_store()
    return dist.PrefixStore(f"mindspeed_rl/{start}", dist.TCPStore(host, port, None, False, wait_for_workers=False))


def begin() -> None:
    """If the launcher may restart its ranks, let them connect through a new store for this start: the launcher's
    store still has addresses of dead ranks. The store is at rank 0's address, not at MASTER_ADDR: that host may forward
    only MASTER_PORT (in Kubernetes). Raises TimeoutError if rank 0 does not start."""
    global _own_store
    if not may_restart() or launcher_store()[2]:
        return
    env, place = launch_env(), ""
    if env["rank"] == 0:
        from mindspeed_rl_plugin.dock.machines import reachable_address

        _own_store = dist.TCPStore(host := reachable_address(), 0, None, True, wait_for_workers=False)
        place = f"{host} {_own_store.port}"
    name, place = agree(store(), env["rank"], env["world_size"], place)
    begin_start(name, *place.split())


def agree(
    keys: dist.Store, rank: int, world: int, place: str, end: Callable[[int], object] = os._exit
) -> tuple[str, str]:
    """Agree on a name of this start and on `place` (host and port) of its rank 0; keys of earlier starts have no
    effect. (TORCHELASTIC_RESTART_COUNT cannot be the name, since agents count restarts separately.) From then on `end`
    is called when another rank was restarted: rank 0 watches all other ranks, and these watch rank 0."""
    if rank == 0:
        name = secrets.token_hex(8)
        keys.set(START_NAME, name)
        _thread(_answer, keys, name, place, world, end)
        return name, place
    question, until = secrets.token_hex(8), time.monotonic() + BEGIN_SECONDS
    keys.set(f"asks {rank}", question)
    while not keys.check([question]):
        if time.monotonic() > until:
            raise TimeoutError(f"rank 0 did not start within {BEGIN_SECONDS:g} s; look at the output of rank 0")
        time.sleep(KEY_LOOK_SECONDS)
    name, place = keys.get(question).decode().split(maxsplit=1)
    keys.set(f"{name} {rank}", "heard")
    _thread(_stay, keys, rank, {0: (START_NAME, name.encode())}, end)
    return name, place


def _thread(work: Callable[..., None], *arguments: object) -> None:
    """Start a thread. It is stopped before the interpreter ends, since it must not use the store then."""
    thread = threading.Thread(target=work, args=arguments, daemon=True, name="start")
    thread.start()
    atexit.register(lambda: (_over.set(), thread.join(WATCH_SECONDS)))


def _answer(keys: dist.Store, name: str, place: str, world: int, end: Callable[[int], object]) -> None:
    """Answer the other ranks until all know the name; then watch them."""
    left, told, until = set(range(1, world)), dict[int, bytes](), time.monotonic() + BEGIN_SECONDS
    with contextlib.suppress(dist.DistError):  # the launcher has ended
        while left and time.monotonic() < until and not _over.is_set():
            left = {rank for rank in left if not keys.check([f"{name} {rank}"])}
            for rank in left:
                if keys.check([key := f"asks {rank}"]) and (asked := keys.get(key)) != told.get(rank):
                    keys.set(asked.decode(), f"{name} {place}")
                    told[rank] = asked
            time.sleep(KEY_LOOK_SECONDS)
        _stay(keys, 0, {rank: (f"asks {rank}", asked) for rank, asked in told.items()}, end)


def _stay(keys: dist.Store, rank: int, others: Mapping[int, tuple[str, bytes]], end: Callable[[int], object]) -> None:
    """Watch the keys that other ranks have written; a changed value means that the rank was restarted."""
    with contextlib.suppress(dist.DistError):
        while others and not _over.wait(WATCH_SECONDS):
            now = keys.multi_get([key for key, _ in others.values()])
            for (other, (_, before)), after in zip(others.items(), now, strict=True):
                if after != before:
                    last_words(f"rank {rank} stops: rank {other} is gone (the launcher has started it again)", later=1)
                    return end(1)


def publish_address(address: str, secret_file: str) -> None:
    """Called by the first trainer, once the dock accepts connections."""
    store().set(KEY, f"{address} {Path(secret_file).read_text()}")


def publish_end() -> None:
    """Called by the first trainer, when the job has ended normally."""
    store().set(ENDED, "")


def has_ended() -> bool:
    """Whether the job has ended normally; it may end before an engine has joined."""
    try:
        return store().check([ENDED])
    except dist.DistError:
        return False  # the launcher has ended too


def wait_for_address(deadline: float) -> tuple[str, bytes]:
    """The dock's address, and the job's secret. Raises TimeoutError."""
    keys = store()
    try:
        keys.wait([KEY], datetime.timedelta(seconds=deadline))
    except dist.DistStoreError as error:
        raise TimeoutError(
            f"the trainers did not open their dock within {deadline:g} s (--rl-wait-timeout); look at the trainers' "
            "output"
        ) from error
    address, secret = keys.get(KEY).decode().split()
    return address, bytes.fromhex(secret)


def join_group(engine: int, deadline: float) -> None:
    """Make the default process group of the ranks of one engine, with the launcher's store."""
    init_group(dist.PrefixStore(f"engine{engine}", store()), datetime.timedelta(seconds=deadline))


def init_group(keys: dist.Store, limit: datetime.timedelta, kind: str | None = None) -> None:
    """Make the default process group of the WORLD_SIZE ranks. kind: of device, None for this process's device;
    with "cpu" no device is used."""
    env, kind = launch_env(), kind or get_device().kind
    if kind != "cpu":
        get_device().api.set_device(env["local_rank"])
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}[kind]
    dist.init_process_group(backend, store=keys, rank=env["rank"], world_size=env["world_size"], timeout=limit)
