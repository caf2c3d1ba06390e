"""What every dock offers: declared columns and states, leases, and the `Dock` Protocol.

A dock knows nothing about algorithms: who uses a column declares it, and a worker state is a name with the
columns it reads and writes. A row is *ready* for a state when all columns that the state reads are committed;
each ready row is delivered to the state exactly once: `lease`, then `commit` (write back and acknowledge) or
`release` (hand back undone, to be delivered again). The first commit of a cell wins; repeats change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mindspeed_rl_plugin.dock.traffic import Traffic
from mindspeed_rl_plugin.rows import Rows, SampleId

LEVELS = ("token", "sample", "group")


@dataclass(frozen=True)
class ColumnSpec:
    """One column: what its cells are.

    level: "token" (ragged, all token columns of one row have the same length), "sample" (one cell a sample) or
    "group" (one cell a group, repeated for each sample on read). ragged: cells are `[L_i, *trailing]`, packed;
    otherwise `[*trailing]`. longest: entries of the longest ragged cell, where it is not the longest sample.
    """

    name: str
    dtype: torch.dtype
    level: str
    ragged: bool
    trailing: tuple[int, ...] = ()
    longest: int | None = None

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"column {self.name!r}: level {self.level!r} is unknown; known: {', '.join(LEVELS)}")
        if self.level == "token" and not self.ragged:
            raise ValueError(f"column {self.name!r}: a token column has one entry a token; declare it ragged=True")

    def describe(self) -> str:
        """One line that two declarations share only if their cells are interchangeable."""
        form = "ragged" if self.ragged else "dense"
        return f"{self.level} {form} {str(self.dtype).removeprefix('torch.')} {list(self.trailing)}"


@dataclass(frozen=True)
class StateSpec:
    """One worker state: the columns it reads, those it writes back, and whether it takes only whole groups."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    whole_groups: bool = False


@dataclass(frozen=True)
class Lease:
    """Rows given to a state until `commit` or `release`. token 0 is the empty lease: nothing is left to do."""

    token: int
    state: str
    rows: Rows

    def __len__(self) -> int:
        return len(self.rows)


class Dock(Protocol):
    """The one interface of all media. Deadlines are seconds from the call.

    Whatever a user can cause raises ValueError with the names; a wait that ends raises TimeoutError that names
    the state, the missing columns and ids, and the state that should have written them.
    """

    columns: Mapping[str, ColumnSpec]
    states: Mapping[str, StateSpec]

    @property
    def traffic(self) -> Traffic:
        """Bytes of cells that this process moved so far."""

    @property
    def served(self) -> dict[str, Any]:
        """states: whose controllers this process holds; messages, bytes: what it did for all ranks' requests; refused:
        how many connections and messages it turned away, by reason."""

    def open(self, epoch: int, groups: int, members: int) -> None:
        """Declare the ids (epoch, 0..groups-1, 0..members-1) of one rollout. Epochs rise and are never reused."""

    def put(self, rows: Rows | None) -> None:
        """Commit cells as a producer. None writes nothing. The cells of a group become visible at once; those of groups
        on different machines one machine after the other, and of very many bytes one portion after the other.

        Cells already committed keep their value. A group column needs one row a group, of any member. Rows of
        cleared groups are ignored: a late repeat is harmless.
        """

    def lease(
        self,
        state: str,
        *,
        ids: Sequence[SampleId] | None = None,
        max_rows: int | None = None,
        min_rows: int = 1,
        deadline: float,
        columns: Sequence[str] | None = None,
        **stream: Any,
    ) -> Lease:
        """Wait for ready rows and take them; their rows hold the columns that the state reads, or those of them that
        are asked for.

        ids: exactly these, in this order; None: ready rows in the order of ids, at least `min_rows` (fewer where
        no more are left), at most `max_rows`. The empty lease says that every row is acknowledged.

        stream: for a consumer of a stream, which takes what is ready, rows of its own machine first. max_tokens: bound
        on the batch's tokens; window: rows looked at to fill it, longest first; linger: seconds to wait for a full
        batch once min_rows are there; newest, max_staleness: rows of weights more than max_staleness updates older
        than version `newest` are never given out any more, and nobody waits for them.
        """

    def commit(self, lease: Lease, rows: Rows | None = None) -> None:
        """Write `rows` back and acknowledge the lease. Afterwards all columns that the state writes must be there.

        A lease is live until it is committed or released by the process that took it. Of one that is not live nothing
        is written: where its rows are all done or cleared the commit is a harmless repeat, else it raises ValueError.
        A live lease that ran out, or was lost with its controller, still writes: the first commit of a cell wins.
        """

    def release(self, lease: Lease) -> None:
        """Hand the rows back undone; they are delivered again. Nothing happens for a lease that is not live."""

    def remaining(self, state: str) -> int:
        """Rows of all open epochs that the state has not acknowledged, leased ones included."""

    def lost(self) -> list[tuple[int, int]]:
        """(epoch, group) of groups whose machine is gone: who put their prompts must put them again, on another machine
        now; all states then do them anew."""

    def read(self, ids: Sequence[SampleId], columns: Sequence[str]) -> Rows:
        """Look at committed cells without a lease and without waiting."""

    def clear(self, epoch: int, groups: Iterable[int] | None = None) -> None:
        """Forget groups of an epoch, or all of it, and free their memory. Idempotent."""

    def snapshot(self) -> dict[str, Any]:
        """Everything committed and acknowledged as plain tensors, ints and strings; leased rows count as undone."""

    def restore(self, state: dict[str, Any]) -> None:
        """Become what `snapshot` saw; leases taken before are void."""

    def close(self) -> None:
        """Leave the dock and free what this process holds of it. Idempotent."""
