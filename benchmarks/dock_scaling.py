"""An EMULATION, on one machine, of how the dock's sample flow grows with the number of nodes.

    python benchmarks/dock_scaling.py [--nodes 1,2,4,8,16] [--mbit 200] [--groups 16] [--json OUT.json]

Each node is a process in a network namespace; a token bucket (tc tbf) limits its link in both directions. All nodes
share this machine's cores and memory, so CPU seconds and waiting are worse than on real nodes, and latency is better:
only bytes on the wire carry over. The work grows with the nodes (weak scaling, as in the paper's Fig. 9): each puts
`--groups` groups of 8 responses, and reads an equal contiguous share of every state. Arms, all of them the real dock:

    central padded   one warehouse and all controllers on node 0, columns padded to the longest row
    hash padded      a warehouse a node, groups placed by hash, padded: the paper's transfer dock
    local packed     a warehouse a node, packed, rows placed where they are read: this project's default

Needs root and iproute2; nothing of the machine's own network is touched.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ARMS = ("central padded", "hash padded", "local packed")
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


class Nodes:
    """The processes, one in each namespace."""

    def __init__(self, names: list[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
        script = str(HERE / "transfer" / "node.py")
        self._all = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, script, str(i), f"10.83.0.{i + 1}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for i, name in enumerate(names)
        ]
        self._replies(len(names))

    def flow(self, arm: str, nodes: int, groups: int) -> list[dict[str, Any]]:
        """The first `nodes` of them move one iteration's rows."""
        self._send(nodes, {"arm": arm, "nodes": nodes, "groups_a_node": groups})
        return self._replies(nodes)

    def close(self) -> None:
        """End all of them."""
        for process in self._all:
            process.stdin.close()
        for process in self._all:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()

    def _send(self, nodes: int, message: dict[str, Any]) -> None:
        for process in self._all[:nodes]:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()

    def _replies(self, nodes: int) -> list[dict[str, Any]]:
        while True:
            lines = [process.stdout.readline() for process in self._all[:nodes]]
            if not all(lines):
                raise RuntimeError("a node ended; see its message above")
            found = [json.loads(line) for line in lines]
            if "exchange" not in found[0]:
                return found
            self._send(nodes, {"gathered": [f["exchange"] for f in found]})


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


def main() -> None:
    """Run all arms for all sizes, print T(S) and linearity."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", default="1,2,4,8,16", help="emulated nodes, default %(default)s")
    parser.add_argument("--mbit", type=int, default=200, help="of each link and direction, default %(default)s")
    parser.add_argument("--groups", type=int, default=16, help="groups of 8 responses a node, default %(default)s")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    sizes = [int(n) for n in args.nodes.split(",")]
    found: dict[str, dict[int, dict[str, float]]] = {arm: {} for arm in ARMS}
    print(f"EMULATION on {os.cpu_count()} cores, links of {args.mbit} Mbit/s, {args.groups} groups of 8 a node, "
          f"load {os.getloadavg()[0]:.1f}, {datetime.datetime.now():%Y-%m-%d %H:%M}")  # fmt: skip
    print(f"{'arm':16s} {'S':>3s} {'T(S) s':>8s} {'wire':>7s} {'CPU':>7s} {'wait':>7s} {'MB between nodes':>17s}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or the namespaces would stay
    with network(max(sizes), args.mbit) as names:
        nodes = Nodes(names)
        try:
            for size in sizes:
                for arm in ARMS:
                    one = found[arm][size] = split(nodes.flow(arm, size, args.groups), args.mbit)
                    print(f"{arm:16s} {size:3d} {one['seconds']:8.2f} {one['wire']:7.2f} {one['cpu']:7.2f} "
                          f"{one['wait']:7.2f} {one['remote_mb']:17.1f}", flush=True)  # fmt: skip
        finally:
            nodes.close()
    first, last = min(sizes), max(sizes)
    base, most = found[ARMS[0]][first]["seconds"], found[ARMS[0]][last]["seconds"]
    compute = max((PAPER * most - base) / (1 - PAPER), 0.0)
    print(f"\nLinearity as in Fig. 9, (C + T({first})) / (C + T(S)). The emulation does no training:")
    print(f"C = {compute:.1f} s is the work between; with it the central arm has the paper's {PAPER:.1%} at S={last}.")
    print(f"{'arm':16s} " + " ".join(f"S={s:<5d}" for s in sizes))
    for arm in ARMS:
        line = [(compute + found[arm][first]["seconds"]) / (compute + found[arm][s]["seconds"]) for s in sizes]
        print(f"{arm:16s} " + " ".join(f"{x:<7.1%}" for x in line))
    if args.json:
        args.json.write_text(json.dumps({"mbit": args.mbit, "groups": args.groups, "arms": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
