"""`python -m mindspeed_rl_plugin plan --dock`: computes the bytes that a rollout's samples move, without a device.

The columns up to Eq. 4 are by the MindSpeed RL paper (arXiv 2507.19017), the others are for this plugin's dock.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_rl_plugin.algorithms import Algorithm, resolve
from mindspeed_rl_plugin.config import AlgorithmConfig, RLConfig
from mindspeed_rl_plugin.dock import ColumnSpec, StateSpec
from mindspeed_rl_plugin.dock.factory import controller_rank
from mindspeed_rl_plugin.loop.inputs import routes_of
from mindspeed_rl_plugin.stages.stage import columns_of, states_of
from mindspeed_rl_plugin.stages.table import stage_table
from mindspeed_rl_plugin.tools.text_table import aligned

GIB = 2**30
# Bytes in the record of a commit, which a warehouse (the dock's storage on a machine) sends. SLOT: index of a row whose
# columns are written together; CELL: offset and length of a cell; ACK: index of a row that a state has finished.
SLOT, CELL, ACK = 4, 8 + 4, 4
# Table 1 of the paper: G, N, PL, SL, n, M.
TABLE_1 = (
    (256, 8, 2048, 8192, 5, 3),
    (256, 16, 2048, 16384, 5, 3),
    (1024, 16, 2048, 16384, 5, 3),
    (1024, 32, 4096, 32768, 8, 5),
    (4096, 32, 4096, 32768, 8, 5),
    (8192, 64, 4096, 65536, 8, 5),
)
VOLUME_HEAD = ("G", "N", "PL", "n", "SL", "M", "Eq. 2 GiB", "100 MB/s", "1 GB/s")
VOLUME_HEAD += ("Eq. 4 GiB", "here GiB", "between GiB", "records GiB", "1 GB/s")
VOLUME_LEGEND = """\
Per rollout: G prompts, N responses of each, PL and SL tokens of the longest prompt and response. A sample has n items
of SL tokens and M single numbers. Equations and Table 1: MindSpeed RL (arXiv 2507.19017).
Eq. 2: all samples through one buffer. Eq. 4: through each of S warehouses. Both count padding, and each item 3 times.
here: this dock, with GRPO and a reference, without padding, all machines together. Every cell is written once and read
by each stage that needs it (more often than the 3 times of the equations), in the memory of the machine that samples
and trains the row.
between: bytes between machines: prompts, which one rank writes, and metrics, which one rank reads. There are more if a
pipeline has ranks on several machines, with --rl-max-tokens-per-microbatch, or with dynamic sampling.
records: messages to controllers on other machines about every cell and every finished row. The last column has the
seconds of between and records together. Not counted: headers of messages, and positions of cells in the answer to a
lease (28 bytes per row, 16 per cell)."""


@dataclass(frozen=True)
class Load:
    """One rollout, in the paper's letters."""

    groups: float  # G
    members: int  # N
    prompt: int  # PL, tokens of the longest prompt
    response: int  # SL, tokens of the longest response
    items: int = 5  # n, number of items of SL tokens per sample
    scalars: int = 3  # M, single numbers per sample
    fill: float = 1.0  # mean length / longest length

    @property
    def rows(self) -> int:
        return self.groups * self.members


def padded_gib(load: Load, warehouses: int = 1, controllers: int = 0) -> float:
    """GiB by Eq. 2: volume of a central replay buffer, padded, 4 bytes per entry. If warehouses and controllers are
    given, by Eq. 4: volume of each of S warehouses, and metadata for C controllers."""
    metadata = 8 * (controllers + 1) * load.scalars
    return load.rows * 4 * (2 * load.prompt + 3 * load.items * load.response + metadata) / warehouses / GIB


def packed_gib(
    load: Load, warehouses: int, columns: Sequence[ColumnSpec], states: Sequence[StateSpec], anywhere: str = "measure"
) -> tuple[float, float, float]:
    """GiB that this dock moves on all machines together: written, read, and the part of these between machines. Every
    cell is written once and read once by each state (of a stage) that declares it, without padding.

    anywhere: the state whose reader may be on another machine than the row; other states read the shared memory of
    their machine. One process writes the columns of groups. Columns that no state reads or writes do not count.
    """
    used = {name for s in states for name in (*s.reads, *s.writes)}
    size = {c.name: load.rows * _row_bytes(c, load) / GIB for c in columns if c.name in used}
    by_state = {s.name: sum(size[c] for c in s.reads) for s in states}
    produced = sum(size[c.name] for c in columns if c.level == "group" and c.name in used)
    remote = (warehouses - 1) / warehouses * (produced + by_state.get(anywhere, 0))
    return sum(size.values()), sum(by_state.values()), remote


def rollout_bytes(args: argparse.Namespace, config: RLConfig, algorithm: Algorithm) -> float:
    """Bytes of one rollout in the dock, with every sample at its maximum length; 0 for pairs, which are not counted."""
    rollout, members = config.rollout, config.rollout.samples_per_prompt
    groups = rollout.rollout_prompts or (args.global_batch_size or 0) / members
    if algorithm.from_pairs:
        return 0
    load = Load(groups, members, config.data.max_prompt_length, rollout.max_response_length)
    table = stage_table(algorithm, 1, routes=routes_of(args, config))
    return GIB * packed_gib(load, 1, columns_of(table), states_of(table))[0]


def record_bytes(load: Load, columns: Sequence[ColumnSpec], states: Sequence[StateSpec]) -> int:
    """Bytes of the records that each process with controllers gets in a rollout, without message headers. The record of
    a put has the columns that no state writes; that of a commit has its state's columns and the finished rows."""
    level = {c.name: c.level for c in columns}
    put = {name for s in states for name in s.reads}.difference(*(s.writes for s in states))
    total = load.rows * ACK * len(states)
    for names in (put, *(s.writes for s in states)):
        by_group = sum(level[name] == "group" for name in names)
        for count, cells in ((load.groups, by_group), (load.rows, len(names) - by_group)):
            total += count * (SLOT + CELL * cells) if cells else 0
    return total


def listeners_elsewhere(states: int, nodes: Sequence[int]) -> float:
    """Number of processes on other machines that get a machine's records, mean over machines. nodes: node per rank."""
    holders = {controller_rank(i, states, len(nodes)) for i in range(states)}
    machines = set(nodes)
    return sum(nodes[rank] != machine for machine in machines for rank in holders) / len(machines)


def _row_bytes(column: ColumnSpec, load: Load) -> float:
    """Mean bytes of one row of a column; a group's cell is shared by its members."""
    entry = column.dtype.itemsize * math.prod(column.trailing)
    if not column.ragged or column.level == "sample":
        return entry  # ragged columns of samples, such as `segments`, have mostly one entry
    prompt, response = load.fill * load.prompt, load.fill * load.response
    return entry * (prompt / load.members if column.level == "group" else prompt + response)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m mindspeed_rl_plugin plan", description=__doc__)
    numbers = "G N PL SL, and n M if they differ from 5 3; without numbers: the rows of the paper's Table 1"
    parser.add_argument("--dock", nargs="*", type=int, metavar="N", required=True, help=numbers)
    parser.add_argument("--nodes", type=int, default=16, help="machines S, one warehouse each (default 16)")
    parser.add_argument("--ranks", type=int, default=8, help="ranks per machine (default 8)")
    parser.add_argument("--controllers", type=int, default=6, help="controllers C of Eq. 4 (default 6)")
    parser.add_argument("--fill", type=float, default=1.0, help="mean length / longest length (default 1: no padding)")
    args = parser.parse_args(argv)
    if args.dock and (len(args.dock) not in (4, 6) or min(args.dock) < 1):
        parser.error(f"--dock {' '.join(map(str, args.dock))}: give G N PL SL [n M], each at least 1")
    if min(args.nodes, args.ranks) < 1 or not 0 < args.fill <= 1:
        got = f"{args.nodes}, {args.ranks} and {args.fill}"
        parser.error(f"--nodes and --ranks must be at least 1, and --fill in (0, 1]; got {got}")
    loads = [Load(*numbers, fill=args.fill) for numbers in ([args.dock] if args.dock else TABLE_1)]
    print(f"S = {args.nodes} machines, C = {args.controllers} controllers; MB/s, GB/s: seconds at this rate of a link")
    print("\n".join(aligned([VOLUME_HEAD, *(_row(load, args.nodes, args.ranks, args.controllers) for load in loads)])))
    print(VOLUME_LEGEND)
    return 0


def _row(load: Load, nodes: int, ranks: int, controllers: int) -> tuple[str, ...]:
    table = stage_table(resolve(AlgorithmConfig(algorithm="grpo")), 1)
    columns, states = columns_of(table), states_of(table)
    written, read, between = packed_gib(load, nodes, columns, states)
    central = padded_gib(load)
    listeners = listeners_elsewhere(len(states), [rank // ranks for rank in range(nodes * ranks)])
    records = listeners * record_bytes(load, columns, states) / GIB
    sizes = (load.groups, load.members, load.prompt, load.items, load.response, load.scalars)
    return (
        *(f"{n // 1024}K" if n >= 1024 and n % 1024 == 0 else str(n) for n in sizes),
        *(f"{central:.2f}", f"{central * 1024 / 100:.1f}", f"{central:.2f}"),
        f"{padded_gib(load, nodes, controllers):.3f}",
        f"{written + read:.2f}",
        *(f"{gib:.4f}" for gib in (between, records, between + records)),
    )
