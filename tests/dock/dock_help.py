"""Docks of every layout, made inside one process: the ranks of a job are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from mindspeed_rl_plugin.dock import ColumnSpec, Dock, DockLimits, Ragged, Rows, SampleId, StateSpec
from mindspeed_rl_plugin.dock.factory import Member
from mindspeed_rl_plugin.dock.peers import Peers

COLUMNS = [
    ColumnSpec("prompt", torch.int32, "group", ragged=True),
    ColumnSpec("tokens", torch.int32, "token", ragged=True),
    ColumnSpec("logp", torch.float32, "token", ragged=True),
    ColumnSpec("reward", torch.float32, "sample", ragged=False),
    ColumnSpec("parts", torch.float32, "sample", ragged=False, trailing=(2,)),
]
STATES = [
    StateSpec("generate", ("prompt",), ("tokens",)),
    StateSpec("logp", ("tokens",), ("logp",)),
    StateSpec("reward", ("tokens", "prompt"), ("reward",)),
    StateSpec("update", ("tokens", "logp", "reward"), (), whole_groups=True),
]
# Machine of each rank; the view is that of the last one, which in the job of two machines owns half of the groups.
LAYOUTS = {"one process": ["a"], "one machine": ["a", "a"], "two machines": ["a", "b"]}


def sid(group: int, member: int, epoch: int = 0) -> SampleId:
    return SampleId(epoch, group, member)


def ids(groups: int, members: int, epoch: int = 0) -> tuple[SampleId, ...]:
    return tuple(SampleId(epoch, g, m) for g in range(groups) for m in range(members))


def ragged(*lengths: int, dtype: torch.dtype = torch.int32, start: int = 0) -> Ragged:
    return Ragged.from_rows([torch.arange(start, start + n).to(dtype) for n in lengths], dtype=dtype)


def plain(value: object) -> object:
    """A snapshot with lists in the place of tensors, to compare every number."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else getattr(value, "tolist", lambda: value)()


def prompts(groups: int, epoch: int = 0) -> Rows:
    """Prompt g has g + 1 tokens."""
    return Rows(tuple(sid(g, 0, epoch) for g in range(groups)), {"prompt": ragged(*(g + 1 for g in range(groups)))})


def tokens(rows: Sequence[SampleId], *lengths: int, start: int = 0) -> Rows:
    return Rows(tuple(rows), {"tokens": ragged(*(lengths or [2] * len(rows)), start=start)})


SMALL = DockLimits(segment_bytes=1 << 20)  # making large segments takes time


class Exchange:
    """All-gather between threads."""

    def __init__(self, world: int) -> None:
        self.values, self.barrier = [None] * world, threading.Barrier(world)

    def of(self, rank: int, value: object) -> list:
        self.values[rank] = value
        self.barrier.wait(20)
        values = list(self.values)
        self.barrier.wait(20)
        return values


class Gathered(Peers):
    """Ranks of one consumer, or of a job. exchange: value -> that of every rank."""

    def __init__(self, rank: int, size: int, exchange: Callable[[object], list]) -> None:
        self.rank, self.size, self._exchange = rank, size, exchange

    def share(self, value: object) -> object:
        return self._exchange(value)[0]

    def gather(self, value: object) -> list:
        return self._exchange(value)


def threads(size: int) -> list[Peers]:
    """Ranks that are threads."""
    exchange = Exchange(size)
    return [Gathered(rank, size, partial(exchange.of, rank)) for rank in range(size)]


def together(count: int, work: Callable[[int], object]) -> list:
    """`work(rank)` of every rank, each in a thread of its own."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def make_members(columns, states, nodes: Sequence[str], **more) -> list[Member]:
    """One member for each rank; `nodes`: machine of each."""
    peers = threads(len(nodes))
    how = {"host": "127.0.0.1", "end": lambda status: None, **more}
    return together(len(nodes), lambda rank: Member(columns, states, peers[rank], node=nodes[rank], **how))


class Maker:
    """Makes docks of one layout and ends them."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.nodes, self.members = nodes, list[Member]()

    def __call__(self, columns=COLUMNS, states=STATES, *, limits: DockLimits = SMALL, deadline: float = 0.5) -> Dock:
        made = make_members(columns, states, self.nodes, limits=limits)
        self.members += made
        return Dock(made[-1].declared, made[-1].calls, deadline=deadline)

    def filled(self, groups: int, members: int) -> Dock:
        """With an epoch 0 of which all prompts are there."""
        dock = self()
        dock.open(0, groups, members)
        dock.put(prompts(groups))
        return dock

    @property
    def houses(self) -> list:
        return [m.core.warehouse for m in self.members if m.core.warehouse is not None]

    def end(self) -> None:
        for member in self.members:
            member.close()
