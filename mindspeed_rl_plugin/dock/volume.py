"""How many bytes the sample flow of one rollout moves: the paper's equations, and this dock's own sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_rl_plugin.dock.api import ColumnSpec, StateSpec

GIB = 2**30
CELL = 20  # bytes that a record says about one cell: row, segment, offset, length


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
    """Bytes of one rollout in GiB. written, read: of cells; remote: of both, between machines; metadata: of records
    to controllers."""

    written: float
    read: float
    remote: float
    metadata: float


def packed_gib(
    load: Load,
    warehouses: int,
    columns: Sequence[ColumnSpec],
    states: Sequence[StateSpec],
    anywhere: Sequence[str] = (),
) -> Moved:
    """What this dock moves: every cell is written once and read once by each state that declares it, unpadded.

    anywhere: states whose readers are not where a row lies; all others read and write in their own machine's shared
    memory. What is known of a group comes from one producer.
    """
    size = {c.name: _row_bytes(c, load) for c in columns}
    rows = load.groups * load.members
    written = rows * sum(size.values())
    by_state = {s.name: rows * sum(size[c] for c in s.reads) for s in states}
    away = (warehouses - 1) / warehouses
    produced = rows * sum(size[c.name] for c in columns if c.level == "group")
    remote = away * (produced + sum(by_state[s] for s in anywhere))
    metadata = rows * CELL * sum(len(set(s.reads)) for s in states)
    return Moved(*(x / GIB for x in (written, sum(by_state.values()), remote, metadata)))


def _row_bytes(column: ColumnSpec, load: Load) -> float:
    """Mean bytes of one row of a column; a group's cell is shared by its members."""
    entry = column.dtype.itemsize * math.prod(column.trailing)
    if not column.ragged:
        return entry
    prompt, response = load.fill * load.prompt, load.fill * load.response
    return entry * (prompt / load.members if column.level == "group" else prompt + response)
