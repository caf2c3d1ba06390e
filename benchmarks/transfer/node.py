"""The emulated nodes of `dock_scaling.py`: processes forked from this one, each driven by JSON lines.

    python node.py '[{"rank", "address", "namespace", "mbit", "input", "output"}, ...]'

namespace: network namespace of the node, "" for none; then a token bucket of `mbit` Mbit/s is put into its transport.
input, output: open file descriptors. One import serves all nodes, so that sixteen of them fit a small machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import work
from docks import Ranks, lease_into
from limiter import Link
from worker import Pipe

from mindspeed_rl_plugin.dock import ColumnSpec, DockLimits, Ragged, Rows, SampleId, StateSpec
from mindspeed_rl_plugin.dock.factory import Member

SECONDS = 300.0
BATCH = 64
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
LIMITS = DockLimits(segment_bytes=8 << 20)  # small, for many nodes share one machine's memory
DTYPES = {name: torch.from_numpy(np.empty(0, kind)).dtype for name, kind in work.RAGGED.items()}


def owners(arm: str, nodes: int) -> Any:
    """(epoch, groups) -> node of each group: the first one, or by a hash, which is even over the nodes regardless of
    who writes or reads; None for the dock's own choice."""
    if arm == "central-padded":
        return lambda epoch, groups: np.zeros(groups, np.int64)
    hashed = lambda epoch, groups: (np.arange(groups) * 2654435761 % 2**32 >> 7) % nodes  # noqa: E731
    return hashed if arm == "hash-padded" else None


def lengths_of(groups: int) -> np.ndarray:
    """`[groups * members]` tokens, the same on every node."""
    rng = np.random.default_rng(7)
    prompts = np.repeat(rng.integers(64, 513, groups), work.MEMBERS)
    return prompts + np.clip(rng.lognormal(np.log(650), 0.75, len(prompts)), 16, 2048).astype(np.int64)


def link_bytes() -> int:
    """Bytes over this node's link so far, the larger direction."""
    with open("/proc/net/dev", encoding="ascii") as file:
        fields = next(line for line in file if line.strip().startswith("eth0:")).split(":")[1].split()
    return max(int(fields[0]), int(fields[8]))


def flow(
    arm: str, nodes: int, groups_a_node: int, *, rank: int, address: str, exchange: Any, link: Callable[[], int]
) -> dict[str, float]:
    """One iteration's sample flow seen from this node: put its rows, then four states read their share and write.

    link: bytes over this node's link so far.
    """
    columns = [ColumnSpec(c, t, "token", True) for c, t in DTYPES.items()]
    columns += [ColumnSpec(c, torch.float32, "token", True) for c in work.STATES.values()]
    states = [StateSpec(s, tuple(work.RAGGED), (c,)) for s, c in work.STATES.items()]
    member = Member(
        columns,
        states,
        Ranks(rank, nodes, exchange),
        node=f"node-{rank}",
        host=address,
        limits=LIMITS,
        owners=owners(arm, nodes),
        heartbeat=SECONDS,
    )
    dock = member.dock(deadline=SECONDS)
    groups, buffers = groups_a_node * nodes, work.Buffers()
    lengths = lengths_of(groups)
    if arm != "local-packed":
        lengths[:] = lengths.max()
    dock.open(0, groups, work.MEMBERS)
    mine = range(rank * groups_a_node * work.MEMBERS, (rank + 1) * groups_a_node * work.MEMBERS)
    batches = []
    for begin in range(mine.start, mine.stop, BATCH):
        part = range(begin, min(begin + BATCH, mine.stop))
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths[part.start : part.stop])]))
        ids = tuple(SampleId(0, *divmod(i, work.MEMBERS)) for i in part)
        filled = {c: Ragged(torch.full((int(offsets[-1]),), rank + 1, dtype=t), offsets) for c, t in DTYPES.items()}
        batches.append(Rows(ids, filled))
    exchange(None)
    begin, cpu, wire = time.perf_counter(), time.process_time(), link()
    for rows in batches:
        dock.put(rows)
    rows_read = 0
    for state, column in work.STATES.items():
        for batch in batches:
            lease = lease_into(buffers, dock, state, ids=batch.ids, deadline=SECONDS)
            tokens = lease.rows["tokens"]
            for i, sample in enumerate(lease.rows.ids):  # whoever put it filled it with its rank
                if int(tokens.row(i)[-1]) != sample.group // groups_a_node + 1:
                    raise ValueError(f"{state}: row {sample} is not what was put")
            rows_read += len(lease)
            dock.commit(lease, Rows(lease.rows.ids, {column: Ragged(tokens.values.float(), tokens.offsets)}))
    end = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}
    exchange(None)  # others may still read from here
    end["wire"] = link() - wire
    remote = sum(moved.nbytes for moved in dock.traffic.take() if moved.where == "remote")
    dock.close()
    return {**end, "rows": rows_read, "remote": remote}


def serve(rank: int, address: str, namespace: str, mbit: int) -> None:
    """Be one node until the driver closes its end; a node that takes no part in a run gets no command for it."""
    link = link_bytes
    if namespace:
        with open(f"/var/run/netns/{namespace}", encoding="ascii") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")
    else:
        bucket = Link(mbit)
        bucket.install()
        link = lambda: bucket.nbytes  # noqa: E731
    pipe = Pipe()
    pipe.send({"ready": True})
    while command := pipe.receive():
        pipe.send(flow(rank=rank, address=address, exchange=pipe.exchange, link=link, **command))


def main() -> None:
    """Fork the nodes and wait for their end."""
    torch.set_num_threads(1)
    nodes = json.loads(sys.argv[1])
    for node in nodes:
        if os.fork():
            continue
        os.dup2(node.pop("input"), 0)
        os.dup2(node.pop("output"), 1)
        os.closerange(3, 1024)  # the other nodes' too: the end of a node must show at its driver
        serve(**node)
        return
    os.closerange(3, 1024)
    for _ in nodes:
        os.wait()


if __name__ == "__main__":
    main()
