"""Agreements between ranks (such as: rank 0 decides, and all ranks get the result or the error), and collectives."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl_plugin.environment import flush_output, last_words
from mindspeed_rl_plugin.status.status_file import doing
from mindspeed_rl_plugin.status.story import at_deadline


def on_rank_0(function: Callable[[], Any]) -> Any:
    """Result of `function`, which only rank 0 calls. If it raises ValueError or OSError, all ranks raise ValueError; if
    there is only one rank, it raises the original error."""
    if not _many():
        return function()
    world, box = _world(), [None, None]
    if world.rank == 0:
        try:
            box[0] = function()
        except (ValueError, OSError) as error:
            box[1] = str(error)
    result, problem = world.broadcast(box)
    if problem is not None:
        raise ValueError(problem)
    return result


def on_all_ranks(function: Callable[[], Any]) -> list[Any]:
    """Each rank's result of `function`, in rank order, on every rank. The first ValueError is raised on every rank."""
    try:
        own = function(), None
    except ValueError as error:
        own = None, str(error)
    every = gather_all(own)
    for _, problem in every:
        if problem is not None:
            raise ValueError(problem)
    return [result for result, _ in every]


def rank_of_job() -> int:
    """This process's rank; 0 before process groups are initialised."""
    return dist.get_rank() if _many() else 0


def is_rank_0() -> bool:
    """Whether this process is the first of the job."""
    return rank_of_job() == 0


def gather_all(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank."""
    return _world().gather(value) if _many() else [value]


def wait_at_most(seconds: float) -> None:
    """Set the limit of all waits in this module's functions. Every rank must set the same limit."""
    _limit[0] = seconds


def weights_digest(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over the parameters of all ranks, in rank order: names, shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in parameters:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        # A copy: after .numpy() a storage cannot be resized any more, but offloading resizes the parameters' storages.
        copy = tensor.detach().to("cpu", copy=True).contiguous()
        digest.update(copy.view(-1).view(torch.uint8).numpy())
    return combine_hashes({f"{rank:06d}": h for rank, h in enumerate(gather_all(digest.hexdigest()))})


def combine_hashes(hashes: Mapping[str, str]) -> str:
    """One SHA-256 over digests by name, independent of their order."""
    lines = [f"{digest}  {path}" for path, digest in sorted(hashes.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class Stall:
    """Detects that a wait makes no progress. seconds: how long a state may stay the same."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._last, self._since = seconds, None, 0.0

    def seen(self, what: object) -> bool:
        """Whether the state `what`, for example how much remains, has been the same for too long."""
        now = time.monotonic()
        if what != self._last:
            self._last, self._since = what, now
        return now - self._since > self._seconds


class Collectives:
    """Collectives of all ranks over gloo, with our own deadline. Collectives of nccl and hccl are ended by their
    watchdogs after Megatron's --distributed-timeout-minutes.

    group: all ranks; deadline: most seconds of each wait; a longer wait raises TimeoutError.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._limit = datetime.timedelta(seconds=deadline)
        self.group = dist.new_group(backend="gloo", timeout=self._limit)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        box = [None] * self.world
        with self._waiting("the other ranks"):
            dist.all_gather_object(box, value, group=self.group)
        return box

    def broadcast(self, value: Any) -> Any:
        """The first rank's value, on every rank."""
        box = [value]
        with self._waiting("rank 0"):
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    @contextlib.contextmanager
    def _waiting(self, whom: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            with doing("a collective of the job", whom):
                yield
        except RuntimeError as error:
            # gloo raises the same type for a peer that closed its connection and for one that is late.
            if time.monotonic() - began < 0.99 * self.deadline:
                raise
            raise TimeoutError(
                f"rank {self.rank} waited {self.deadline:g} s (--rl-wait-timeout) for {whom}: "
                f"{str(error).splitlines()[0][:300]}"
            ) from error

    def barrier(self, what: str) -> None:
        """Wait for all ranks before `what`, since later collectives wait with Megatron's own, shorter limit.

        Raises TimeoutError; on rank 0 it names the first missing rank.
        """
        if self.world == 1:
            return
        try:
            with doing(f"the barrier before {what}", "ranks"):
                dist.monitored_barrier(self.group, timeout=self._limit)
        except RuntimeError as error:
            raise TimeoutError(
                f"rank {self.rank} waited for the other ranks before {what}, at most {self.deadline:g} s "
                f"(--rl-wait-timeout): {str(error).splitlines()[0][:300]}"
            ) from error


class HardDeadline:
    """Ends this process if a wait inside a library, which our code cannot interrupt, takes too long.

    seconds: limit of a wait; end: ends the process. Waits must not be nested.
    """

    def __init__(self, seconds: float, end: Callable[[int], object] = os._exit) -> None:
        self.seconds, self._end = seconds, end
        self._now: list[str] | None = None  # a new object for each wait
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @contextlib.contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Limit the wait within the context. what: end of the message "rank N waited 9 s (--rl-wait-timeout) in"."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()
        self._now = [what]
        try:
            with doing(what, "ranks"):
                yield
        finally:
            self._now = None

    def close(self) -> None:
        """End the thread; no more waits follow."""
        self._closed.set()

    def _look(self) -> None:
        # Time is counted in iterations of this loop: a clock would continue while the job is suspended.
        pause, seen, waited = min(1.0, self.seconds / 10), None, 0.0
        while waited <= self.seconds:
            if self._closed.wait(pause):
                return
            now = self._now
            waited = waited + pause if now is seen and now is not None else 0.0
            seen = now
        who = f"rank {rank_of_job()}"
        story = at_deadline()
        last_words(f"{who} stops: {who} waited {self.seconds:g} s (--rl-wait-timeout) in {seen[0]}\n{story}".strip())
        flush_output()
        self._end(1)


_limit = [1800.0]


def _world() -> Collectives:
    return _collectives(dist.group.WORLD, _limit[0])


@functools.lru_cache(maxsize=1)
def _collectives(world: Any, seconds: float) -> Collectives:
    """The collectives of a world. All ranks must make the first call, because it creates a process group."""
    return Collectives(seconds)


def _many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
