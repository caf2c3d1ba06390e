"""One of the processes that put and get in an arm: obeys the driver, one JSON line per command, one per reply.

    python worker.py ARM RANK WORLD [SETTINGS]

SETTINGS: JSON for the arm, where it takes some.

Whatever an arm's libraries print goes to stderr, where it does not disturb the replies.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import work

PROBES = 200


class Pipe:
    """Lines to and from the driver, which also gathers values over the ranks."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def receive(self) -> dict[str, Any]:
        """The next command; {} at the end."""
        line = sys.stdin.readline()
        return json.loads(line) if line else {}

    def send(self, message: dict[str, Any]) -> None:
        """One reply."""
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        self.send({"exchange": value})
        return self.receive()["gathered"]


class Worker:
    """Commands by name; each returns what the driver adds up or takes medians of."""

    def __init__(self, arm: Any, rank: int, world: int) -> None:
        self.arm, self.rank, self.world = arm, rank, world
        self.epoch = -1
        self.loaded: dict[str, work.Work] = {}

    def load(self, directory: str) -> dict[str, Any]:
        """Use the rows of a case; brings this rank's part into memory."""
        if directory not in self.loaded:
            self.loaded[directory] = work.load(Path(directory))
        self.work = self.loaded[directory]
        begin, end = (self.work.samples * r // self.world for r in (self.rank, self.rank + 1))
        self.begin, self.end, self.probes = begin, end, min(PROBES, end - begin)
        work.checksums(*self.work.part(begin, end)["tokens"])
        return {}

    def put(self, batch: int) -> dict[str, Any]:
        """Put this rank's rows in batches of `batch`."""
        self.batch, self.epoch = batch, self.epoch + 1
        self.arm.begin(self.epoch, self.work.samples)
        spans = [(at, min(at + batch, self.end)) for at in range(self.begin, self.end, batch)]
        packed = [(a, self.arm.pack(a, self.work.part(a, b))) for a, b in spans]
        moved, begin = self.arm.moved(), time.perf_counter()
        for at, rows in packed:
            self.arm.put(at, rows)
        seconds = time.perf_counter() - begin
        if hasattr(self.arm, "begin_probe"):
            rows = [self.work.part(i, i + 1) for i in range(self.begin, self.begin + self.probes)]
            self.arm.begin_probe([{c: row[c] for c in work.PROBE} for row in rows])
        return {
            "seconds": seconds,
            "bytes": work.nbytes(self.work.part(self.begin, self.end)),
            "moved": self.arm.moved() - moved,
        }

    def state(self, name: str, check: bool = True) -> dict[str, Any]:
        """Read batches of one state until none is left, check each, and write one column back."""
        got_bytes, written, get_seconds, view_seconds, write_seconds, check_cpu = 0, 0, 0.0, 0.0, 0.0, 0.0
        rows, moved = 0, self.arm.moved()
        while True:
            begin = time.perf_counter()
            batch = self.arm.get(name, self.batch)
            if batch is None:
                break
            view = time.perf_counter()
            handle, got = self.arm.own(batch)
            end = time.perf_counter()
            get_seconds, view_seconds = get_seconds + end - begin, view_seconds + view - begin
            cpu = time.thread_time()
            if check and (wrong := self.work.wrong(got)):
                raise ValueError(f"{name}: columns {wrong} of row {got['row'][0][0]} and on are not what was put")
            got_bytes, rows = got_bytes + work.nbytes(got), rows + len(got["row"][0])
            offsets = torch.from_numpy(got["tokens"][1].copy())
            values = torch.full((int(offsets[-1]),), 0.5)
            check_cpu += time.thread_time() - cpu
            begin = time.perf_counter()
            self.arm.write_back(handle, name, values, offsets)
            write_seconds += time.perf_counter() - begin
            written += values.nbytes
        return {
            "rows": rows,
            "bytes": got_bytes,
            "seconds": get_seconds,
            "view_seconds": view_seconds,
            "written": written,
            "write_seconds": write_seconds,
            "check_cpu": check_cpu,
            "moved": self.arm.moved() - moved,
        }

    def far(self) -> dict[str, Any]:
        """Read what the other rank put, where an arm tells near from far."""
        seconds, total = 0.0, 0
        other = (self.rank + 1) % self.world
        begin, end = (self.work.samples * r // self.world for r in (other, other + 1))
        for at in range(begin, end, self.batch):
            start = time.perf_counter()
            got = self.arm.get_far(at, min(at + self.batch, end))
            seconds += time.perf_counter() - start
            self.arm.done_far()
            total += work.nbytes(got)
            if wrong := self.work.wrong(got):
                raise ValueError(f"far: columns {wrong} of rows {at}... are not what was put")
        return {"seconds": seconds, "bytes": total}

    def probe(self, turn: int | None) -> dict[str, Any]:
        """Milliseconds of reads of one row, each into tensors of the caller's own. turn: the one rank that reads, None:
        all at once."""
        times = []
        for _ in range(self.probes // 2 if turn in (None, self.rank) else 0):
            begin = time.perf_counter()
            got = self.arm.get_one()
            times.append((time.perf_counter() - begin) * 1e3)
            self.arm.done_one()
            if wrong := self.work.wrong(got):
                raise ValueError(f"probe: columns {wrong} of row {got['row'][0].tolist()} are not what was put")
        return {"times": times}

    def clear(self) -> dict[str, Any]:
        """Forget the rows."""
        self.arm.end(self.epoch)
        return {}

    def close(self) -> dict[str, Any]:
        """Leave the arm."""
        self.arm.close()
        return {}


def make_arm(name: str, rank: int, world: int, pipe: Pipe, settings: dict[str, Any]) -> Any:
    """The arm `name`; each lives in a file that imports no other arm's packages."""
    if name in ("dock-shm", "dock-tcp"):
        import docks

        return docks.Dock(name, rank, world, pipe.exchange)
    import peers

    return peers.ARMS[name](rank, world, pipe.exchange, **settings)


def main() -> None:
    """Serve the driver until it closes the pipe."""
    torch.set_num_threads(1)
    name, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pipe = Pipe()
    settings = {"settings": json.loads(sys.argv[4])} if len(sys.argv) > 4 else {}
    arm = make_arm(name, rank, world, pipe, settings)
    worker = Worker(arm, rank, world)
    pipe.send({"ready": True})
    while command := pipe.receive():
        pipe.send(getattr(worker, command.pop("do"))(**command))


if __name__ == "__main__":
    main()
