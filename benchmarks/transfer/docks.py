"""The arms of this project: the dock of one machine, over shared memory, and that of two machines, over TCP."""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable
from typing import Any

import torch
import work

from mindspeed_rl_plugin.dock import ColumnSpec, Lease, Ragged, Rows, SampleId, StateSpec, cells, rpc
from mindspeed_rl_plugin.dock.factory import Member
from mindspeed_rl_plugin.dock.peers import Peers

SECONDS = 120.0


def lease_into(buffers: work.Buffers, dock: Any, state: str, **asked: Any) -> Lease:
    """`dock.lease` that reads into the memory of the one who asks, as the other arms do."""
    with unittest.mock.patch.object(cells, "fresh", buffers.take):
        return dock.lease(state, **asked)


class Messages:
    """Bytes of all messages that this process sends, its server's answers included."""

    def __init__(self) -> None:
        self.nbytes, self._frame = 0, rpc.frame
        rpc.frame = self._sent

    def _sent(self, message: Any, bulk: Any = ()) -> list[Any]:
        buffers = self._frame(message, bulk)
        self.nbytes += sum(len(b) for b in buffers)
        return buffers


class Ranks(Peers):
    """The ranks of an arm, over the driver's pipes."""

    def __init__(self, rank: int, size: int, exchange: Callable[[Any], list[Any]]) -> None:
        self.rank, self.size, self.gather = rank, size, exchange


class Dock:
    """`dock-shm`: both ranks on one machine; `dock-tcp`: each rank on a machine of its own."""

    def __init__(self, name: str, rank: int, world: int, exchange: Callable[[Any], list[Any]]) -> None:
        self._exchange, self._messages = exchange, Messages()
        columns = [ColumnSpec(c, _dtype(t), "token", True) for c, t in work.RAGGED.items()]
        columns += [ColumnSpec(c, _dtype(t), "sample", False) for c, t in work.DENSE.items()]
        columns += [ColumnSpec(c, torch.float32, "token", True) for c in work.STATES.values()]
        states = [StateSpec(s, tuple(work.COLUMNS), (c,)) for s, c in work.STATES.items()]
        states += [StateSpec("probe", work.PROBE, ())]
        near = {} if name == "dock-shm" else {"node": f"node-{rank}", "host": "127.0.0.1"}
        states += [StateSpec("far", tuple(work.COLUMNS), ())] if near else []
        self._member = Member(columns, states, Ranks(rank, world, exchange), **near)
        self._dock = self._member.dock(deadline=SECONDS)
        self._buffers = work.Buffers()
        self._epoch, self._local = -1, 0

    def begin(self, epoch: int, samples: int) -> None:
        """Open an epoch."""
        self._epoch = epoch
        self._dock.open(epoch, samples // work.MEMBERS, work.MEMBERS)

    def pack(self, begin: int, packed: work.Packed) -> Rows:
        """A batch in the dock's own container."""
        columns = {c: _column(c, *packed[c]) for c in packed}
        return Rows(self._ids(begin, begin + len(packed["row"][0])), columns)

    def put(self, begin: int, rows: Rows) -> None:
        """Commit a batch."""
        self._dock.put(rows)

    def get(self, state: str, batch: int) -> Lease | None:
        """The next rows of a state, in this process's own memory."""
        lease = lease_into(self._buffers, self._dock, state, max_rows=batch, deadline=SECONDS)
        return lease if len(lease) else None

    def own(self, lease: Lease) -> tuple[Lease, work.Packed]:
        """What was read, as packed columns."""
        return lease, _packed(lease.rows)

    def write_back(self, lease: Lease, state: str, values: torch.Tensor, offsets: torch.Tensor) -> None:
        """Commit the state's column and acknowledge."""
        self._dock.commit(lease, Rows(lease.rows.ids, {work.STATES[state]: Ragged(values, offsets)}))

    def get_far(self, begin: int, end: int) -> work.Packed:
        """Exactly these rows."""
        self._lease = lease_into(self._buffers, self._dock, "far", ids=self._ids(begin, end), deadline=SECONDS)
        return _packed(self._lease.rows)

    def done_far(self) -> None:
        """Acknowledge them."""
        self._dock.commit(self._lease)

    def get_one(self) -> work.Packed:
        """One row."""
        self._lease = self._dock.lease("probe", max_rows=1, deadline=SECONDS)
        return _packed(self._lease.rows)

    def done_one(self) -> None:
        """Acknowledge it."""
        self._dock.commit(self._lease)

    def end(self, epoch: int) -> None:
        """Clear the epoch everywhere."""
        self._exchange(None)
        self._dock.clear(epoch)
        self._exchange(None)

    def moved(self) -> int:
        """Bytes that left this process, and those it copied through shared memory."""
        self._local += sum(moved.nbytes for moved in self._dock.traffic.take() if moved.where == "local")
        return self._messages.nbytes + self._local

    def close(self) -> None:
        """Leave; the last one takes the memory along."""
        self._exchange(None)
        self._dock.close()

    def _ids(self, begin: int, end: int) -> tuple[SampleId, ...]:
        return tuple(SampleId(self._epoch, *divmod(i, work.MEMBERS)) for i in range(begin, end))


def _dtype(kind: Any) -> torch.dtype:
    return torch.from_numpy(work.np.empty(0, kind)).dtype


def _column(name: str, values: Any, offsets: Any) -> Ragged | torch.Tensor:
    packed = torch.from_numpy(values)
    return Ragged(packed, torch.from_numpy(offsets)) if name in work.RAGGED else packed


def _packed(rows: Rows) -> work.Packed:
    return {
        c: (v.values.numpy(), v.offsets.numpy()) if isinstance(v, Ragged) else (v.numpy(), work.np.arange(len(v) + 1))
        for c, v in rows.columns.items()
    }
