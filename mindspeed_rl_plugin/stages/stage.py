"""The base of all stages: their declaration, and the steps from a lease to a commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from mindspeed_rl_plugin.dock import ColumnSpec, Lease, StateSpec
from mindspeed_rl_plugin.forward import Step
from mindspeed_rl_plugin.rows import Rows, SampleId
from mindspeed_rl_plugin.stages.context import RankContext

Build = Callable[["StageSpec", RankContext], Any]


@dataclass(frozen=True)
class StageSpec:
    """The declaration of a stage."""

    name: str  # of the stage, and of its worker state in the dock
    reads: tuple[str, ...]  # columns by name
    writes: tuple[ColumnSpec, ...]
    resource: str  # leader, engine, cpu or trainer; decides which ranks share its leases (`loop.docks`)
    whole_groups: bool = False  # whether it leases only complete groups
    if_written: tuple[str, ...] = ()  # columns that it also reads if a stage before it writes them
    leases: bool = True  # False: it only looks at rows (`Stage.look`), and is no worker state of the dock
    # flags that decide whether it writes its columns; for messages at a resume with other flags
    flags: tuple[str, ...] = ()
    # makes the stage on this rank, from the declaration that `resolved` returned
    build: Build | None = field(default=None, compare=False, repr=False)
    # column that several stages write -> its name in the dock, for reading and for writing
    stored: Mapping[str, str] = field(default_factory=dict)
    stored_writes: Mapping[str, str] = field(default_factory=dict)

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the columns that it writes."""
        return tuple(column.name for column in self.writes)


def resolved(specs: Sequence[StageSpec]) -> list[StageSpec]:
    """The stages, in order, each with all columns that it reads. A column that several stages write gets several names
    in the dock.

    Each stage reads what the nearest writer before it wrote. The last writer's column keeps its name; the column of an
    earlier writer is stored as `name@stage`.
    """
    last = {column.name: spec.name for spec in specs for column in spec.writes}
    latest: dict[str, str] = {}
    result = []
    for spec in specs:
        reads = (*spec.reads, *(name for name in spec.if_written if name in latest))
        stored = {name: latest[name] for name in reads if latest.get(name, name) != name}
        writes = {n: f"{n}@{spec.name}" for n in spec.written if last[n] != spec.name}
        latest |= {name: writes.get(name, name) for name in spec.written}
        result.append(replace(spec, reads=reads, if_written=(), stored=stored, stored_writes=writes))
    return result


def columns_of(specs: Sequence[StageSpec]) -> list[ColumnSpec]:
    """The dock's columns: all that the stages write."""
    return [replace(c, name=spec.stored_writes.get(c.name, c.name)) for spec in specs for c in spec.writes]


def states_of(specs: Sequence[StageSpec]) -> list[StateSpec]:
    """The dock's worker states: the stages that lease what they read."""
    return [
        StateSpec(
            spec.name,
            tuple(spec.stored.get(name, name) for name in spec.reads),
            tuple(spec.stored_writes.get(name, name) for name in spec.written),
            whole_groups=spec.whole_groups,
        )
        for spec in specs
        if spec.reads and spec.leases
    ]


@dataclass(frozen=True)
class Work:
    """A rank's part of a rollout, or of a round."""

    share: Sequence[SampleId]  # rows of complete groups that this rank grades and compares, maybe none
    # micro-batches of its data parallel rank in one pass over the rollout
    batches: Sequence[Sequence[SampleId]] = ()
    steps: Sequence[Step] = ()  # all optimizer steps of that pass


class Stage:
    """A stage on this rank. A schedule goes through the table and calls `work` of one stage after the other."""

    timed_as: ClassVar[str | None] = None  # the stage to which its seconds are counted; None: itself

    def __init__(self, spec: StageSpec, context: RankContext) -> None:
        self.spec, self.context = spec, context
        self.dock = context.dock_of(spec.resource)  # the view for the ranks that share this stage's leases
        self.deadline = context.ranks.deadline  # seconds that it waits for its rows

    def work(self, work: Work) -> Any:
        """Do this stage's part of the work."""
        return self.run(*self.part(work))

    def part(self, work: Work) -> tuple[Any, ...]:
        """Rows of the work for this stage, by default this rank's share, and more arguments of its `compute`."""
        return (work.share,)

    def compute(self, rows: Rows, *more: Any) -> Rows | None:
        """The columns that the stage writes for these rows; None: this rank writes nothing."""
        raise NotImplementedError

    def run(self, ids: Sequence[SampleId], *more: Any) -> Rows:
        """Wait for exactly these rows, compute, write back and acknowledge. more: arguments of this stage's `compute`.
        Returns the columns that were read and written."""
        lease = self.lease(ids)
        written = self.compute(lease.rows, *more)
        self.commit(lease, written)
        return lease.rows if written is None else lease.rows.with_columns(**written.columns)

    def look(self, ids: Sequence[SampleId]) -> Rows:
        """The columns that the stage reads, without a lease; all of them must be committed already."""
        stored = {self.spec.stored.get(name, name): name for name in self.spec.reads}
        return _renamed(self.dock.read(ids, list(stored)), stored)

    def lease(
        self, ids: Sequence[SampleId] | None, columns: Sequence[str] | None = None, **bounds: float | None
    ) -> Lease:
        """Lease these rows; None: rows that are ready. columns: some of those that the stage reads, by default all;
        bounds: arguments of `Dock.lease`. Raises TimeoutError."""
        stored = self.spec.stored
        wanted = None if columns is None else [stored.get(name, name) for name in columns]
        lease = self.dock.lease(self.spec.name, ids=ids, columns=wanted, **{"deadline": self.deadline, **bounds})
        return replace(lease, rows=_renamed(lease.rows, {v: k for k, v in stored.items()}))

    def commit(self, lease: Lease, rows: Rows | None = None) -> None:
        """Write the stage's columns, and acknowledge the rows."""
        self.dock.commit(lease, rows if rows is None else _renamed(rows, self.spec.stored_writes))


class Stages(dict[str, Any]):
    """The stages of this rank by name, in the table's order, without those that other processes run."""

    @classmethod
    def of(cls, table: Sequence[StageSpec], context: RankContext) -> Stages:
        """Build the stages of the table; a stage of the engine only if the engine is in this process."""
        here = [spec for spec in table if spec.resource != "engine" or context.engine is not None]
        return cls({spec.name: spec.build(spec, context) for spec in here})

    def between(self, after: str, before: str) -> list[Any]:
        """The stages after one stage and before another."""
        names = list(self)
        return [self[name] for name in names[names.index(after) + 1 : names.index(before)]]


def _renamed(rows: Rows, names: Mapping[str, str]) -> Rows:
    return Rows(rows.ids, {names.get(name, name): column for name, column in rows.columns.items()}) if names else rows
