"""How many bytes the sample flow of one rollout moves: the paper's equations, and this dock's own sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_rl_plugin.dock.api import ColumnSpec, StateSpec
from mindspeed_rl_plugin.dock.distributed.fleet import controller_rank

GIB = 2**30
# Bytes that a record says (`distributed.records`): the number of a row once for all columns written together; segment,
# offset and length of each cell; the number of an acknowledged row; a weight version.
SLOT, CELL, ACK, VERSION = 4, 4 + 8 + 4, 4, 8


@dataclass(frozen=True)
class Load:
    """One rollout, in the paper's letters.

    groups G, members N, prompt PL and response SL tokens (the longest), items n of a response's length, scalars M;
    fill: mean length over longest, what packing saves.
    """

    groups: int
    members: int
    prompt: int
    response: int
    items: int = 5
    scalars: int = 3
    fill: float = 1.0


def central_gib(load: Load) -> float:
    """Eq. (2): total volume of a replay buffer in one place, padded, 4 bytes an entry."""
    row = 2 * load.prompt + 3 * load.items * load.response + 8 * load.scalars
    return load.groups * load.members * 4 * row / GIB


def warehouse_gib(load: Load, warehouses: int, controllers: int) -> float:
    """Eq. (4): volume of each of S warehouses, padded, metadata sent to C controllers."""
    row = 2 * load.prompt + 3 * load.items * load.response + 8 * (controllers + 1) * load.scalars
    return load.groups * load.members * 4 * row / warehouses / GIB


@dataclass(frozen=True)
class Moved:
    """Bytes of one rollout in GiB, over all machines. written, read: of cells; remote: of both, between machines;
    records: that tell controllers on other machines where cells lie and what is done, without the heads of messages."""

    written: float
    read: float
    remote: float
    records: float


def packed_gib(
    load: Load,
    warehouses: int,
    columns: Sequence[ColumnSpec],
    states: Sequence[StateSpec],
    anywhere: Sequence[str] = (),
    version_column: str | None = None,
    told: float = 0.0,
) -> Moved:
    """What this dock moves: every cell is written once and read once by each state that declares it, unpadded.

    anywhere: states whose readers are not where a row lies; all others read and write in their own machine's shared
    memory. What is known of a group comes from one producer. version_column: column with the weight version of a row;
    told: processes on other machines that hear of a commit, see `told_elsewhere`. A column that no state reads or
    writes is not there.
    """
    used = {name for s in states for name in (*s.reads, *s.writes)}
    columns = [c for c in columns if c.name in used]
    size = {c.name: _row_bytes(c, load) for c in columns}
    rows = load.groups * load.members
    written = rows * sum(size.values())
    by_state = {s.name: rows * sum(size[c] for c in s.reads) for s in states}
    away = (warehouses - 1) / warehouses
    produced = rows * sum(size[c.name] for c in columns if c.level == "group")
    remote = away * (produced + sum(by_state[s] for s in anywhere))
    records = told * record_bytes(load, columns, states, version_column)
    return Moved(*(x / GIB for x in (written, sum(by_state.values()), remote, records)))


def record_bytes(
    load: Load, columns: Sequence[ColumnSpec], states: Sequence[StateSpec], version_column: str | None = None
) -> int:
    """Bytes of the records of one rollout as each process that holds controllers hears them, without their heads.

    A put tells of what no state writes, a commit of what its state writes and of the rows that it is done with.
    """
    level = {c.name: c.level for c in columns}
    read, back = {name for s in states for name in s.reads}, {name for s in states for name in s.writes}
    writes = [tuple(name for name in level if name in read - back), *(s.writes for s in states)]
    rows = load.groups * load.members
    total = rows * ACK * len(states) + (rows * VERSION if version_column in level else 0)
    for names in writes:
        by_group = sum(level[name] == "group" for name in names)
        for count, cells in ((load.groups, by_group), (rows, len(names) - by_group)):
            total += count * (SLOT + CELL * cells) if cells else 0
    return total


def told_elsewhere(states: int, nodes: Sequence[int]) -> float:
    """Processes on other machines that hear of a commit, mean over machines. nodes: machine of each rank."""
    holders = {controller_rank(i, states, len(nodes)) for i in range(states)}
    machines = set(nodes)
    return sum(nodes[rank] != machine for machine in machines for rank in holders) / len(machines)


def _row_bytes(column: ColumnSpec, load: Load) -> float:
    """Mean bytes of one row of a column; a group's cell is shared by its members."""
    entry = column.dtype.itemsize * math.prod(column.trailing)
    if not column.ragged:
        return entry
    prompt, response = load.fill * load.prompt, load.fill * load.response
    return entry * (prompt / load.members if column.level == "group" else prompt + response)
