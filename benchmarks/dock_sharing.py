"""How the ranks of one tensor-parallel group get the same rows: all map the memory, or one reads and shares.

    python benchmarks/dock_sharing.py [--json OUT] [--ranks 2] [--repeats 5] [--scale 1]

Arms `all-map` (every rank leases the batch and copies the cells out of shared memory; what the loop does) and
`read-and-share` (the first rank does, and broadcasts what it read by gloo). A batch is done when every byte lies in
tensors of its own on every rank; arms take turns in one run. On a device the broadcast could go over its own links
instead, where every rank's copy from the host is saved; that has not been measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parent / "transfer"))

import docks
import work

from mindspeed_rl_plugin.dock import ColumnSpec, StateSpec, make_docks
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

ARMS = ("all-map", "read-and-share")
BATCHES = (64, 512)


def main() -> None:
    """Print a table, and write rows {arm, case, metric, value, unit}."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the 4096 samples")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples = max(int(work.SAMPLES * args.scale) // work.MEMBERS, 1) * work.MEMBERS
        work.make(Path(folder, "rows"), samples, work.FACTORS["short"])
        multiprocessing.spawn(rank_of_the_group, (folder, args.ranks, args.repeats), nprocs=args.ranks)
        rows = json.loads(Path(folder, "times.json").read_text())
    for row in rows:
        print(f"{row['case']:10} {row['arm']:15} {row['metric']:9} {row['value']:10.1f} {row['unit']}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def rank_of_the_group(rank: int, folder: str, world: int, repeats: int) -> None:
    """One rank: a pass of each arm over all rows in turn."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    data = work.load(Path(folder, "rows"))
    columns = [ColumnSpec(c, docks._dtype(t), "token", True) for c, t in work.RAGGED.items()]
    columns += [ColumnSpec(c, docks._dtype(t), "sample", False) for c, t in work.DENSE.items()]
    states = [StateSpec(arm, tuple(work.COLUMNS), ()) for arm in ARMS]
    # For the first arm all ranks are one consumer, for the second each is one of its own.
    together, alone = make_docks(columns, states, [(0, 1), (rank, world)], group=dist.group.WORLD)
    times: dict[tuple[str, int], list[float]] = {}
    epoch = 0
    for batch in BATCHES:
        for repeat in range(repeats + 1):
            epoch += 1
            fill(together, data, epoch, batch, rank)
            for arm in ARMS:
                read = mapped(together) if arm == "all-map" else shared(alone, rank)
                seconds = passed(read, arm, data, epoch, batch)
                if repeat:  # the first warms up
                    times.setdefault((arm, batch), []).append(seconds)
            together.clear(epoch)
            dist.barrier()
    together.close()
    if rank == 0:
        nbytes = sum(v.nbytes for v in data.values.values())
        rows = []
        for (arm, batch), seconds in times.items():
            rate = nbytes / statistics.median(seconds) / 1e6
            rows.append(dict(arm=arm, case=f"short/{batch}", metric="get_mb_s", value=rate, unit="MB/s a rank"))
        for batch in BATCHES:
            ratios = [b / a for a, b in zip(times[ARMS[0], batch], times[ARMS[1], batch], strict=True)]
            ratio = statistics.median(ratios)
            rows.append(dict(arm=ARMS[0], case=f"short/{batch}", metric="faster", value=ratio, unit="times"))
        Path(folder, "times.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def fill(dock, data: work.Work, epoch: int, batch: int, rank: int) -> None:
    """The first rank puts all rows."""
    dock.open(epoch, data.samples // work.MEMBERS, work.MEMBERS)
    for begin in range(0, data.samples if rank == 0 else 0, batch):
        part = data.part(begin, min(begin + batch, data.samples))
        columns = {name: docks._column(name, *packed) for name, packed in part.items()}
        dock.put(Rows(names(epoch, begin, len(part["row"][0])), columns))
    dist.barrier()


def names(epoch: int, begin: int, count: int) -> tuple[SampleId, ...]:
    """Ids of consecutive rows."""
    return tuple(SampleId(epoch, *divmod(i, work.MEMBERS)) for i in range(begin, begin + count))


def passed(read: Callable, arm: str, data: work.Work, epoch: int, batch: int) -> float:
    """Seconds in which this rank has read all rows; the checksums are not timed."""
    total = 0.0
    for begin in range(0, data.samples, batch):
        ids = names(epoch, begin, min(batch, data.samples - begin))
        dist.barrier()
        start = time.perf_counter()
        got, done = read(arm, ids)
        total += time.perf_counter() - start
        if wrong := data.wrong(got):
            raise ValueError(f"{arm}: columns {wrong} are not what was put")
        done()
    return total


def mapped(dock) -> Callable:
    """Every rank copies out of the node's memory."""
    into = work.Buffers()

    def read(arm: str, ids: tuple[SampleId, ...]) -> tuple[work.Packed, Callable]:
        lease = docks.lease_into(into, dock, arm, ids=ids, deadline=60)
        return docks._packed(lease.rows), lambda: dock.commit(lease)

    return read


def shared(dock, rank: int) -> Callable:
    """The first rank reads; lengths and then every column go to the others."""
    into = work.Buffers()

    def read(arm: str, ids: tuple[SampleId, ...]) -> tuple[work.Packed, Callable]:
        lease = docks.lease_into(into, dock, arm, ids=ids, deadline=60) if rank == 0 else None
        offsets = lease.rows["tokens"].offsets.clone() if lease else torch.empty(len(ids) + 1, dtype=torch.int64)
        dist.broadcast(offsets, 0)
        got: work.Packed = {}
        for name, kind in work.COLUMNS.items():
            ragged = name in work.RAGGED
            count = int(offsets[-1]) if ragged else len(ids)
            if lease:
                column = lease.rows[name]
                values = column.values if isinstance(column, Ragged) else column
            else:
                values = torch.from_numpy(into.take(name, count * work.np.dtype(kind).itemsize)).view(
                    docks._dtype(kind)
                )
            dist.broadcast(values, 0)
            got[name] = values.numpy(), offsets.numpy() if ragged else work.np.arange(count + 1)
        return got, (lambda: dock.commit(lease)) if lease else (lambda: None)

    return read


if __name__ == "__main__":
    main()
