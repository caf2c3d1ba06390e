"""The types of a dock's interface: columns, worker states, leases, counts of moved bytes, and TensorDicts.

A dock knows nothing about algorithms: its users declare columns and worker states. A worker state is a name with the
columns that it reads and writes. A row is *ready* for a state when all columns that the state reads are committed. The
state takes ready rows by `lease`. It acknowledges (finishes) each row exactly once, by `commit`, which also writes
columns; `release` gives rows back, to be leased again. The first commit of a cell wins; repeats change nothing.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mindspeed_rl_plugin.rows import Column, Ragged, Rows, SampleId

if TYPE_CHECKING:
    from tensordict import TensorDict  # takes seconds to import

LEVELS = ("token", "sample", "group")
LISTED_ITEMS = 4  # largest number of items that a message shows of a list
IDS = "ids"  # name of the ids in a TensorDict


class VersionBound(NamedTuple):
    """Versions of the weights that may sample the rows of an epoch (rollout or evaluation): `oldest` to `newest`."""

    oldest: int = -1  # -1: no limit
    newest: int = -1  # -1: no limit

    @property
    def pinned(self) -> bool:
        """Whether `newest` is a limit, as with --rl-async-order strict or in an evaluation."""
        return self.newest >= 0

    def allows(self, version: int) -> bool:
        return self.oldest <= version and (not self.pinned or version <= self.newest)


ANY_VERSION = VersionBound()


@dataclass(frozen=True)
class ColumnSpec:
    """The declaration of a column."""

    name: str
    dtype: torch.dtype
    # "token" (ragged; all token columns of a row have the same length), "sample" (one cell per sample) or "group" (one
    # cell per group, repeated for each of its samples when it is read)
    level: str
    ragged: bool  # True: cells are `[L_i, *trailing]`, packed; False: `[*trailing]`
    trailing: tuple[int, ...] = ()
    longest: int | None = None  # largest length of a ragged cell; None: memory is reserved for `DockLimits.max_tokens`

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"column {self.name!r}: level {self.level!r} is unknown; known: {', '.join(LEVELS)}")
        if self.level == "token" and not self.ragged:
            raise ValueError(f"column {self.name!r}: a token column has one entry per token; declare it ragged=True")

    def describe(self) -> str:
        """One line; if the lines of two declarations are equal, their cells are interchangeable."""
        form = "ragged" if self.ragged else "dense"
        return f"{self.level} {form} {str(self.dtype).removeprefix('torch.')} {list(self.trailing)}"

    def check(self, column: Column) -> None:
        """Raise ValueError unless `column` is a well-formed column of this declaration."""
        if isinstance(column, Ragged) != self.ragged:
            wants, got = ("Ragged", "a tensor") if self.ragged else ("a tensor", "Ragged")
            raise ValueError(f"column {self.name!r} is declared {self.describe()}: pass {wants}, not {got}")
        values = column.values if self.ragged else column
        if values.dtype != self.dtype:
            raise ValueError(f"column {self.name!r} is declared {self.dtype}, got {values.dtype}; convert it first")
        if tuple(values.shape[1:]) != self.trailing:
            raise ValueError(
                f"column {self.name!r} has trailing shape {list(self.trailing)}, got {list(values.shape[1:])}"
            )
        if self.ragged:
            offsets = column.offsets.cpu().numpy()
            if offsets[0] != 0 or offsets[-1] != values.shape[0] or (offsets[1:] < offsets[:-1]).any():
                raise ValueError(
                    f"column {self.name!r}: offsets must rise from 0 to the {values.shape[0]} packed entries, "
                    f"got {offsets[:4].tolist()} .. {offsets[-1]}"
                )


@dataclass(frozen=True)
class StateSpec:
    """The declaration of a worker state."""

    name: str
    reads: tuple[str, ...]  # columns
    writes: tuple[str, ...]  # columns
    whole_groups: bool = False  # whether its leases have only complete groups


@dataclass(frozen=True)
class Lease:
    """Rows given to a state until `commit` or `release`."""

    token: int  # 0: the empty lease
    state: str
    rows: Rows
    needs: VersionBound | None = None  # bound of the next rows, if it does not allow the asker's version

    def __len__(self) -> int:
        return len(self.rows)


class Moved(NamedTuple):
    """How many bytes of cells a process read or wrote."""

    way: str  # "read" or "written"
    state: str  # worker state, "put" for a producer, "read" for a read without a lease
    column: str
    where: str  # "local": the cell is stored on this machine, "remote": on another one
    nbytes: int


class Gone(ValueError):
    """Newer weights have overwritten a published version. newest: version on the rank that reports this."""

    def __init__(self, version: int, newest: int) -> None:
        super().__init__(f"version {version} of the weights was overwritten; the newest is {newest}")
        self.version, self.newest = version, newest


class Traffic(collections.Counter[tuple[str, str, str, str]]):
    """Bytes by (way, state, column, where) since the last `take`, of all threads of a process."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def add(self, way: str, state: str, column: str, where: str, nbytes: int) -> None:
        with self._lock:
            self[way, state, column, where] += nbytes

    def take(self) -> list[Moved]:
        """Counts since the last call, or since the start."""
        with self._lock:
            return [Moved(*key, nbytes) for key in sorted(self) if (nbytes := self.pop(key))]


class Declared:
    """Columns and states by name; refuses calls with other names."""

    def __init__(self, columns: Sequence[ColumnSpec], states: Sequence[StateSpec]) -> None:
        self.columns, self.states = {c.name: c for c in columns}, {s.name: s for s in states}
        if len(self.columns) != len(columns) or len(self.states) != len(states):
            raise ValueError("a column or a state is declared twice; declare each name once")
        for state in states:
            refuse(f"state {state.name!r} uses undeclared columns", (*state.reads, *state.writes), self.columns)

    def reads(self, state: str, columns: Sequence[str] | None) -> tuple[str, ...]:
        """The columns that a lease reads: `columns`, or all that the state reads."""
        refuse("undeclared state", [state], self.states)
        reads = self.states[state].reads
        refuse(f"lease: state {state!r} does not read", columns or (), reads)
        return reads if columns is None else tuple(columns)

    def check_writes(self, lease: Lease, rows: Rows | None) -> None:
        """Raise ValueError if a commit has columns that the state does not write, or rows that the lease lacks."""
        refuse("undeclared state", [lease.state], self.states)
        if rows is None:
            return
        refuse(f"commit: state {lease.state!r} does not write", rows.columns, self.states[lease.state].writes)
        strange = () if rows.ids is lease.rows.ids else set(rows.ids) - set(lease.rows.ids)
        if strange:
            raise ValueError(
                f"commit: lease {lease.token} of state {lease.state!r} does not hold {listed(sorted(strange))}"
            )

    def check_rows(self, call: str, rows: Rows) -> None:
        """Raise ValueError for columns that differ from their declaration, and for an id that occurs twice."""
        refuse(f"{call}: undeclared columns", rows.columns, self.columns)
        for name, column in rows.columns.items():
            self.columns[name].check(column)
        if len(set(rows.ids)) != len(rows.ids):
            raise ValueError(f"{call}: an id occurs twice among {listed(rows.ids)}")


def to_tensordict(rows: Rows) -> TensorDict:
    """A TensorDict of batch size `[B]`: "ids" is `[B, 3]` int64, ragged columns are jagged nested tensors.

    The tensors share memory with `rows`. Raises ValueError for a column named "ids".
    """
    from tensordict import TensorDict

    if IDS in rows.columns:
        raise ValueError(f"a column named {IDS!r} collides with the ids of the rows; rename it")
    entries = {IDS: torch.tensor(rows.ids, dtype=torch.int64).reshape(-1, 3)}
    for name, column in rows.columns.items():
        ragged = isinstance(column, Ragged)
        entries[name] = torch.nested.nested_tensor_from_jagged(column.values, column.offsets) if ragged else column
    return TensorDict(entries, batch_size=[len(rows)])


def from_tensordict(td: TensorDict) -> Rows:
    """Inverse of `to_tensordict`. Raises ValueError if "ids" are not `[B, 3]` integers, or if a column is not a tensor
    or is a nested tensor with the strided layout."""
    if IDS not in (names := sorted(td.keys())):
        raise ValueError(f"the TensorDict has no {IDS!r} of shape [B, 3]; it holds {names}")
    columns: dict[str, Column] = {}
    for name, value in td.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"column {name!r} is a {type(value).__name__}; give a tensor, or a jagged nested one")
        if value.is_nested and value.layout != torch.jagged:
            raise ValueError(f"column {name!r} is a strided nested tensor; make it with layout=torch.jagged")
        columns[name] = _pack(value) if value.is_nested else value
    ids = columns.pop(IDS)
    if isinstance(ids, Ragged) or ids.shape[1:] != (3,) or numbers(ids) != "integers":
        shape = "of rows that differ in length" if isinstance(ids, Ragged) else f"{list(ids.shape)}, {ids.dtype}"
        raise ValueError(f"{IDS!r} is {shape}; give [B, 3] integers: rollout, group and member of each row")
    return Rows(tuple(SampleId(*i) for i in ids.tolist()), columns)


def numbers(values: torch.Tensor) -> str:
    """Kind of the values: "integers" (booleans too), "floats" or "others"."""
    if values.is_floating_point():
        return "floats"
    return "others" if values.is_complex() else "integers"


def _pack(value: torch.Tensor) -> Ragged:
    if value.lengths() is None:
        return Ragged(value.values(), value.offsets())
    return Ragged.from_rows(list(value.unbind()), dtype=value.dtype)  # a view with holes between its rows


def refuse(what: str, names: Iterable[str], declared: Iterable[str]) -> None:
    """Raise ValueError for names that are not declared. what: first words of the message."""
    if foreign := [name for name in names if name not in declared]:
        raise ValueError(f"{what} {foreign}; declared: {listed(declared)}")


def listed(items: Iterable[object]) -> str:
    """A text with the first items, or rows of an array, and with the number of all if some are not shown."""
    items = items if isinstance(items, np.ndarray) else list(items)
    if not len(items):
        return "none"
    shown = items[:LISTED_ITEMS].tolist() if isinstance(items, np.ndarray) else items[:LISTED_ITEMS]
    text = ", ".join(str(tuple(i) if isinstance(i, (list, SampleId)) else i) for i in shown)
    return text if len(items) <= LISTED_ITEMS else f"{text}, ... ({len(items)} in all)"
