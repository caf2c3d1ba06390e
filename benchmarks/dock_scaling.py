"""An EMULATION, on one machine, of how the dock's sample flow grows with the number of nodes.

    python benchmarks/dock_scaling.py [--nodes 1,2,4,8,16] [--mbit 50] [--groups 8] [--json OUT.json]

Each node is a process with a link of limited rate in both directions: in a network namespace of its own under a token
bucket of the kernel (tc tbf), or, where that is not allowed, under a token bucket in the dock's transport
(transfer/limiter.py). All nodes share this machine's cores and memory, so CPU seconds and waiting are worse than on
real nodes, and latency is better: only bytes on the wire carry over. Links are slow and the work of a node is small so
that the wire, not the shared cores, decides. The work grows with the nodes (weak scaling, as in the paper's Fig. 9):
each puts `--groups` groups of 8 responses, and reads an equal contiguous share of every state. Arms, all of them the
real dock:

    central-padded   all rows in the warehouse of node 0, columns padded to the longest row: the paper's Eq. 2
    hash-padded      a warehouse a node, groups placed by hash, padded: the paper's transfer dock, Eq. 4
    local-packed     a warehouse a node, packed, rows placed where they are read: this project's default

Namespaces need root and iproute2; nothing of the machine's own network is touched.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ARMS = ("central-padded", "hash-padded", "local-packed")
UNITS = {"seconds": "s", "wire": "s", "cpu": "s", "wait": "s", "remote_mb": "MB"}
PAPER = 0.619  # linearity of MindSpeed RL with a central replay buffer on 24 nodes, Fig. 9 of the paper


def sh(*words: str, check: bool = True) -> None:
    """Run a command of iproute2."""
    subprocess.run(words, check=check, capture_output=not check)


@contextmanager
def network(nodes: int, mbit: int) -> Iterator[list[str]]:
    """Namespaces joined by a switch in one of their own; gives their names."""
    stem = f"dock{os.getpid()}"
    switch, names = f"{stem}-sw", [f"{stem}-{i}" for i in range(nodes)]
    bucket = ("rate", f"{mbit}mbit", "burst", "256kb", "latency", "200ms")
    try:
        sh("ip", "netns", "add", switch)
        sh("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        sh("ip", "-n", switch, "link", "set", "br0", "up")
        for i, name in enumerate(names):
            sh("ip", "netns", "add", name)
            sh("ip", "-n", switch, "link", "add", f"p{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            sh("ip", "-n", switch, "link", "set", f"p{i}", "master", "br0", "up")
            sh("ip", "-n", name, "addr", "add", f"10.83.0.{i + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                sh("ip", "-n", name, "link", "set", device, "up")
            sh("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *bucket)
            sh("tc", "-n", switch, "qdisc", "add", "dev", f"p{i}", "root", "tbf", *bucket)
        yield names
    finally:
        for name in (switch, *names):
            sh("ip", "netns", "del", name, check=False)


@contextmanager
def links(limiter: str, nodes: int, mbit: int) -> Iterator[tuple[str, list[str]]]:
    """The limiter in use, and the namespace of each node, "" for none. limiter: "auto" takes namespaces if it can."""
    with contextlib.ExitStack() as stack:
        names = [""] * nodes
        if limiter != "bucket":
            try:
                names = stack.enter_context(network(nodes, mbit))
                limiter = "netns"
            except (OSError, subprocess.CalledProcessError) as error:
                if limiter == "netns":
                    raise RuntimeError(f"no network namespaces here: {error}; take --limiter bucket") from error
                limiter = "bucket"
        yield limiter, names


class Nodes:
    """The processes of all nodes. names: network namespace of each, "" for a bucket of `mbit` in its transport."""

    def __init__(self, names: Sequence[str], mbit: int) -> None:
        specs, given = [], []
        self._to, self._from = [], []
        for rank, name in enumerate(names):
            (read, to), (back, write) = os.pipe(), os.pipe()
            address = f"10.83.0.{rank + 1}" if name else "127.0.0.1"
            specs.append({"rank": rank, "address": address, "namespace": name, "mbit": mbit})
            specs[-1] |= {"input": read, "output": write}
            given += [read, write]
            self._to.append(os.fdopen(to, "w"))
            self._from.append(os.fdopen(back))
        self._stem = subprocess.Popen(
            [sys.executable, str(HERE / "transfer" / "node.py"), json.dumps(specs)],
            pass_fds=given,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)},
        )
        for handle in given:
            os.close(handle)
        self._replies(len(names))

    def flow(self, arm: str, nodes: int, groups: int) -> list[dict[str, Any]]:
        """The first `nodes` of them move one iteration's rows."""
        self._send(nodes, {"arm": arm, "nodes": nodes, "groups_a_node": groups})
        return self._replies(nodes)

    def close(self) -> None:
        """End all of them."""
        for file in self._to:
            with contextlib.suppress(BrokenPipeError):  # a node that has ended
                file.close()
        try:
            self._stem.wait(30)
        except subprocess.TimeoutExpired:
            self._stem.kill()
            self._stem.wait()

    def _send(self, nodes: int, message: dict[str, Any]) -> None:
        for file in self._to[:nodes]:
            file.write(json.dumps(message) + "\n")
            file.flush()

    def _replies(self, nodes: int) -> list[dict[str, Any]]:
        while True:
            lines = [file.readline() for file in self._from[:nodes]]
            if not all(lines):
                raise RuntimeError("a node ended; see its message above")
            answers = [json.loads(line) for line in lines]
            if "exchange" not in answers[0]:
                return answers
            self._send(nodes, {"gathered": [f["exchange"] for f in answers]})


def split(replies: list[dict[str, Any]], mbit: int) -> dict[str, float]:
    """T(S) of the slowest node: on the busiest link's wire, its own CPU, and the rest, which is waiting."""
    slowest = max(replies, key=lambda r: r["seconds"])
    wire = max(r["wire"] for r in replies) * 8 / (mbit * 1e6)
    cpu = min(slowest["cpu"], max(slowest["seconds"] - wire, 0.0))
    return {
        "seconds": slowest["seconds"],
        "wire": wire,
        "cpu": cpu,
        "wait": max(slowest["seconds"] - wire - cpu, 0.0),
        "remote_mb": sum(r["remote"] for r in replies) / 1e6,
    }


def linearity(measured: Mapping[str, Mapping[int, Mapping[str, float]]]) -> tuple[float, dict[str, dict[int, float]]]:
    """C, and (C + T(S of the first)) / (C + T(S)) by arm and S.

    C: seconds of work between the transfers that gives the central arm the paper's linearity at the largest S.
    """
    sizes = sorted(measured[ARMS[0]])
    base, most = (measured[ARMS[0]][s]["seconds"] for s in (sizes[0], sizes[-1]))
    work = max((PAPER * most - base) / (1 - PAPER), 0.0)
    seconds = {arm: {s: work + measured[arm][s]["seconds"] for s in sizes} for arm in ARMS}
    return work, {arm: {s: t[sizes[0]] / t[s] for s in sizes} for arm, t in seconds.items()}


def rows_of(measured: Mapping[str, Mapping[int, Mapping[str, float]]]) -> list[dict[str, Any]]:
    """The figures as rows {arm, case, metric, value, unit}."""
    rows = []
    for arm, by_size in measured.items():
        for size, one in by_size.items():
            rows += [(arm, f"S={size}", metric, value, UNITS[metric]) for metric, value in one.items()]
    for arm, by_size in linearity(measured)[1].items():
        rows += [(arm, f"S={size}", "linearity", value, "of 1") for size, value in by_size.items()]
    return [dict(zip(("arm", "case", "metric", "value", "unit"), row, strict=True)) for row in rows]


def report(measured: Mapping[str, Mapping[int, Mapping[str, float]]]) -> None:
    """Print the linearity of all arms."""
    work, lines = linearity(measured)
    sizes = sorted(measured[ARMS[0]])
    print(f"\nLinearity as in Fig. 9, (C + T({sizes[0]})) / (C + T(S)). The emulation does no training:")
    print(f"C = {work:.1f} s is the work between: it gives the central arm the paper's {PAPER:.1%} at S={sizes[-1]}.")
    print("(The paper, 24 nodes of 8 NPUs: central replay buffer 61.9%, its transfer dock 81.1%, VeRL 40.4%.)")
    print(f"{'arm':16s} " + " ".join(f"S={s:<5d}" for s in sizes))
    for arm, line in lines.items():
        print(f"{arm:16s} " + " ".join(f"{line[s]:<7.1%}" for s in sizes))


def main() -> None:
    """Run all arms for all sizes, print T(S) and linearity."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", default="1,2,4,8,16", help="emulated nodes, default %(default)s")
    parser.add_argument("--mbit", type=int, default=50, help="of each link and direction, default %(default)s")
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 responses per node, default %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="of each arm and size, for medians; default %(default)s")
    help_ = "of the links: the kernel's, or one in the transport; default: the first where that is allowed"
    parser.add_argument("--limiter", choices=("auto", "netns", "bucket"), default="auto", help=help_)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    sizes = [int(n) for n in args.nodes.split(",")]
    measured: dict[str, dict[int, dict[str, float]]] = {arm: {} for arm in ARMS}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or the namespaces would stay
    with links(args.limiter, max(sizes), args.mbit) as (limiter, names):
        now, load = datetime.datetime.now(), os.getloadavg()[0]
        print(f"EMULATION on {os.cpu_count()} cores, links of {args.mbit} Mbit/s ({limiter})")
        print(f"{args.groups} groups of 8 per node, medians of {args.repeats}, load {load:.1f}, {now:%Y-%m-%d %H:%M}")
        print(f"{'arm':16s} {'S':>3s} {'T(S) s':>8s} {'wire':>7s} {'CPU':>7s} {'wait':>7s} {'MB between nodes':>17s}")
        nodes = Nodes(names, args.mbit)
        try:
            for size in sizes:
                many = [[split(nodes.flow(a, size, args.groups), args.mbit) for a in ARMS] for _ in range(args.repeats)]
                for arm, repeats in zip(ARMS, zip(*many, strict=True), strict=True):
                    one = {m: statistics.median(each[m] for each in repeats) for m in UNITS}
                    measured[arm][size] = one
                    print(f"{arm:16s} {size:3d} {one['seconds']:8.2f} {one['wire']:7.2f} {one['cpu']:7.2f} "
                          f"{one['wait']:7.2f} {one['remote_mb']:17.1f}", flush=True)  # fmt: skip
        finally:
            nodes.close()
    report(measured)
    if args.json:
        args.json.write_text(json.dumps(rows_of(measured), indent=1) + "\n")


if __name__ == "__main__":
    main()
