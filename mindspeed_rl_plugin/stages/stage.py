"""What a stage is: its declaration, and the same short way from a lease to a commit for all of them."""

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
    resource: str  # leader, engine, cpu or trainer: what it occupies, so which ranks share its leases (`loop.docks`)
    whole_groups: bool = False  # whether rows are only leased as whole groups
    if_written: tuple[str, ...] = ()  # columns that it reads too where a stage before it writes them
    leases: bool = True  # False: it only looks at rows (`Stage.look`), so that it is no worker state of the dock
    flags: tuple[str, ...] = ()  # that decide whether it writes its columns, for who resumes under others
    # makes it on this rank, of its declaration as `resolved` gives it
    build: Build | None = field(default=None, compare=False, repr=False)
    # names in the dock of columns that it reads, and writes, where several stages write them
    stored: Mapping[str, str] = field(default_factory=dict)
    stored_writes: Mapping[str, str] = field(default_factory=dict)

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the columns that it writes."""
        return tuple(column.name for column in self.writes)


def resolved(specs: Sequence[StageSpec]) -> list[StageSpec]:
    """The stages, in their order, each with all that it reads, and with columns that several of them write under
    several names in the dock.

    Each stage reads what the last one before it wrote; the last writer's column keeps its name, an earlier one is
    stored as `name@stage`.
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
    """The dock's columns: whatever the stages write."""
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
    """What a rank has to do with a rollout, or with a round of one."""

    share: Sequence[SampleId]  # rows of whole groups that this rank grades and compares, maybe none
    # micro-batches of its data parallel rank in one pass over the rollout
    batches: Sequence[Sequence[SampleId]] = ()
    steps: Sequence[Step] = ()  # all optimizer steps of that pass


class Stage:
    """A stage at work on this rank. A schedule walks the table and calls `work` of one stage after the other."""

    timed_as: ClassVar[str | None] = None  # the stage under whose name its seconds count, where that is not its own

    def __init__(self, spec: StageSpec, context: RankContext) -> None:
        self.spec, self.context = spec, context
        self.dock = context.dock_of(spec.resource)  # as the ranks see it that share this stage's leases
        self.deadline = context.ranks.deadline  # seconds that it waits for its rows

    def work(self, work: Work) -> Any:
        """Its part in a rollout: of this rank's share."""
        return self.run(work.share)

    def compute(self, rows: Rows, *more: Any) -> Rows | None:
        """What the stage writes for these rows; None: this rank writes nothing."""
        raise NotImplementedError

    def run(self, ids: Sequence[SampleId], *more: Any) -> Rows:
        """Wait for exactly these rows, compute, with `more` that this stage's `compute` takes, write back and
        acknowledge. Returns what was read and written."""
        lease = self.lease(ids)
        written = self.compute(lease.rows, *more)
        self.commit(lease, written)
        return lease.rows if written is None else lease.rows.with_columns(**written.columns)

    def look(self, ids: Sequence[SampleId]) -> Rows:
        """What the stage reads of rows that have it, without a lease."""
        stored = {self.spec.stored.get(name, name): name for name in self.spec.reads}
        return _renamed(self.dock.read(ids, list(stored)), stored)

    def lease(
        self, ids: Sequence[SampleId] | None, columns: Sequence[str] | None = None, **bounds: float | None
    ) -> Lease:
        """These rows, or what is ready within bounds of `Dock.lease`, with `columns` of what the stage reads, all by
        default. Raises TimeoutError."""
        stored = self.spec.stored
        wanted = None if columns is None else [stored.get(name, name) for name in columns]
        lease = self.dock.lease(self.spec.name, ids=ids, columns=wanted, **{"deadline": self.deadline, **bounds})
        return replace(lease, rows=_renamed(lease.rows, {v: k for k, v in stored.items()}))

    def commit(self, lease: Lease, rows: Rows | None = None) -> None:
        """Write back and acknowledge."""
        self.dock.commit(lease, rows if rows is None else _renamed(rows, self.spec.stored_writes))


class Stages(dict[str, Any]):
    """The stages at work on this rank by name, in the table's order; those that other processes run are not among
    them."""

    @classmethod
    def of(cls, table: Sequence[StageSpec], context: RankContext) -> Stages:
        """Each stage of the table builds itself; engines may be elsewhere."""
        here = [spec for spec in table if spec.resource != "engine" or context.engine is not None]
        return cls({spec.name: spec.build(spec, context) for spec in here})

    def between(self, after: str, before: str) -> list[Any]:
        """Those behind one stage and before another."""
        names = list(self)
        return [self[name] for name in names[names.index(after) + 1 : names.index(before)]]


def _renamed(rows: Rows, names: Mapping[str, str]) -> Rows:
    return Rows(rows.ids, {names.get(name, name): column for name, column in rows.columns.items()}) if names else rows
