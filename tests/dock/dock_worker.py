"""Ranks of a distributed dock as processes, each driven line by line: a JSON command in, a JSON answer out.

This process imports everything once and forks a rank for each line it gets: the names of the two FIFOs of that rank.
The first line of a rank is {"rank", "world", "nodes", "store": folder where the ranks exchange values, ...}.
"""

import json
import os
import signal
import sys
import time

import numpy as np
import torch

from mindspeed_rl_plugin.dock import ColumnSpec, DistributedDock, StateSpec
from mindspeed_rl_plugin.dock.distributed.fleet import Limits, Member
from mindspeed_rl_plugin.dock.distributed.frames import Message
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

COLUMNS = [
    ColumnSpec("prompt", torch.int32, "group", ragged=True),
    ColumnSpec("tokens", torch.int32, "token", ragged=True),
    ColumnSpec("logp", torch.float32, "token", ragged=True),
    ColumnSpec("reward", torch.float32, "sample", ragged=False),
]
STATES = [
    StateSpec("generate", ("prompt",), ("tokens",)),
    StateSpec("logp", ("tokens",), ("logp",)),
    StateSpec("reward", ("tokens", "prompt"), ("reward",)),
    StateSpec("update", ("tokens", "logp", "reward"), (), whole_groups=True),
]
LENGTH = 20_000  # tokens: such puts go through reserved memory


def exchange_in(folder: str, rank: int, world: int):
    """All-gather through files; each call takes the next number."""
    calls = iter(range(1 << 30))

    def exchange(value):
        call, found = next(calls), []
        path = os.path.join(folder, f"{call}.{rank}")
        with open(f"{path}.new", "w") as file:
            json.dump(value, file)
        os.rename(f"{path}.new", path)
        end = time.monotonic() + 30
        for other in range(world):
            path = os.path.join(folder, f"{call}.{other}")
            while not os.path.exists(path):
                if time.monotonic() > end:
                    raise TimeoutError(f"rank {other} did not come to exchange {call}")
                time.sleep(0.005)
            with open(path) as file:
                found.append(json.load(file))
        return found

    return exchange


def tokens_of(sample: SampleId, length: int = LENGTH) -> torch.Tensor:
    """What every rank knows that a sample's tokens are."""
    return torch.arange(length, dtype=torch.int32) + 1000 * sample.group + sample.member


def rows_of(column: str, ids) -> Rows:
    """Rows of one column with those values."""
    if column == "reward":
        return Rows(tuple(ids), {column: torch.tensor([float(i.group + i.member) for i in ids])})
    dtype = torch.float32 if column == "logp" else torch.int32
    values = [tokens_of(i, 3 if column == "prompt" else LENGTH).to(dtype) for i in ids]
    return Rows(tuple(ids), {column: Ragged.from_rows(values, dtype=dtype)})


class Worker:
    """Each method is one command."""

    def __init__(self, rank, world, nodes, store, root=None, capacity=None, consumers=None, peers=1) -> None:
        limits = Limits(capacity, LENGTH if capacity else None, segment_bytes=1 << 20)
        many = len(set(nodes)) > 1
        self.member = Member(
            COLUMNS,
            STATES,
            rank=rank,
            world=world,
            exchange=exchange_in(store, rank, world),
            node=nodes[rank],
            host="127.0.0.1" if many else "",
            limits=limits,
            patience=10,
            heartbeat=3.0,
        )
        self.net = self.member.connections
        self.dock = DistributedDock(
            COLUMNS,
            STATES,
            self.net,
            consumer=None if consumers is None else rank // peers,
            consumers=consumers or 1,
            peer=rank % peers,
            peers=peers,
            leader=rank == 0,
            deadline=10,
        )
        self.leases = {}

    def ready(self):
        where = self.net.directory
        service = self.member.service
        return {
            "directory": self.net.settings.directory,
            "secret": self.net.settings.secret.hex(),
            "warehouses": [vars(a) for a in where.warehouses.values()],
            "controllers": sorted(self.member.host.controllers),
            "holds": self.member.host.warehouse is not None,
            "serves": service is not None,
        }

    def open(self, epoch, groups, members):
        self.dock.open(epoch, groups, members)

    def put(self, column, ids):
        self.dock.put(rows_of(column, [SampleId(*i) for i in ids]))

    def reserve_and_hang(self, ids):
        """Reserve, copy half, and never come back."""
        ids = [SampleId(*i) for i in ids]
        slots = np.array([i.group * self.net.shapes[i.epoch].members + i.member for i in ids], np.int32)
        note = {"epoch": ids[0].epoch, "shape": list(self.net.shapes[ids[0].epoch]), "columns": ["tokens"]}
        note |= {"producer": True, "deadline": 5, "forms": [0], "sizes": [4 * LENGTH * len(ids)]}
        answer = self.net.warehouse(self.net.settings.warehouse, Message("reserve", note, {"slots.0": slots}))
        segment, offset, nbytes = answer.note["extents"][0]
        self.net.segments.view(segment, offset, nbytes)[: nbytes // 2] = 7
        return True

    def lease(self, state, deadline=10.0, tag="", **more):
        begin = time.monotonic()
        lease = self.dock.lease(state, deadline=deadline, **more)
        self.leases[state + tag] = lease
        for column in ("tokens", "prompt"):
            if column in lease.rows.columns:
                for i, row in zip(lease.rows.ids, lease.rows[column].rows(), strict=True):
                    first = i if column == "tokens" else i._replace(member=0)
                    assert torch.equal(row, tokens_of(first, len(row))), (column, i)
        return {"ids": lease.rows.ids, "token": lease.token, "seconds": time.monotonic() - begin}

    def commit(self, state, tag="", write=True):
        lease = self.leases.pop(state + tag)
        column = {"generate": "tokens"}.get(state, state)
        self.dock.commit(lease, rows_of(column, lease.rows.ids) if write and state != "update" else None)

    def remaining(self, state):
        return self.dock.remaining(state)

    def read(self, ids, columns):
        rows = self.dock.read([SampleId(*i) for i in ids], columns)
        return {n: c.lengths.tolist() if isinstance(c, Ragged) else c.tolist() for n, c in rows.columns.items()}

    def clear(self, epoch, groups=None):
        self.dock.clear(epoch, groups)

    def traffic(self):
        host = self.member.host
        refused = self.member.service.refused if self.member.service else None
        return {"host": host.traffic, "read": self.kinds(self.net.traffic.read), "refused": refused}

    @staticmethod
    def kinds(counter):
        found = {"local": 0, "remote": 0}
        for (_, _, kind), nbytes in counter.items():
            found[kind] += nbytes
        return found

    def lost(self, state="generate"):
        return self.net.health(state).tolist()

    def controllers(self):
        """What this process controls now, and how many of them it took over."""
        host = self.member.host
        return {"states": sorted(host.controllers), "taken": host.successions}

    def used(self):
        house = self.member.host.warehouse
        return None if house is None else [house.used, len(house.reservations)]

    def close(self):
        self.dock.close()

    def fail(self):
        raise RuntimeError("a bug in the user's script")


def serve(incoming, outgoing) -> None:
    worker = None
    for line in incoming:
        call = json.loads(line)
        name = call.pop("call", None)
        if name == "fail":
            worker.fail()
        try:
            if worker is None:
                worker, answer = Worker(**call), None
            else:
                answer = getattr(worker, name)(**call)
            print(json.dumps({"answer": answer}), file=outgoing, flush=True)
        except (ValueError, OSError) as error:
            print(json.dumps({"error": type(error).__name__, "text": str(error)}), file=outgoing, flush=True)


def nursery() -> bool:
    """Fork ranks until the input ends. True in a rank, which has served then."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        names = json.loads(line)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            os.close(1)
            sys.stdout = sys.stderr  # the answers take this number; what a rank prints is none
            with open(names[0]) as incoming, open(names[1], "w") as outgoing:
                serve(incoming, outgoing)
            return True
        print(child, flush=True)
    return False


if __name__ == "__main__":
    torch.set_num_threads(1)
    nursery()
