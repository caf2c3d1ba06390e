"""What a stage is: its declaration, and the same short way from a lease to a commit for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from mindspeed_rl_plugin.dock import ColumnSpec, Dock, Lease, StateSpec
from mindspeed_rl_plugin.forward import Step
from mindspeed_rl_plugin.rows import Rows, SampleId
from mindspeed_rl_plugin.stages.context import RankContext

Build = Callable[["StageSpec", RankContext], Any]
RESOURCES = ("leader", "engine", "cpu", "trainer")  # what a stage occupies


@dataclass(frozen=True)
class StageSpec:
    """The declaration of a stage.

    name: of the stage, and of its worker state in the dock.
    reads: columns by name.
    writes: columns.
    resource: what it occupies, by which `loop.docks` knows which ranks share its leases.
    whole_groups: whether rows are only leased as whole groups.
    if_written: columns that it reads too, where a stage before it writes them; `resolved` adds these to `reads`.
    leases: False where it only looks at rows (`Stage.look`), so that it is no worker state of the dock.
    flags: that decide whether it writes its columns, for who resumes under others.
    build: makes it on this rank, of its declaration as `resolved` gives it; None where other processes run it.
    stored, stored_writes: names in the dock of columns that it reads and writes, where several stages write them.
    Raises ValueError for an unknown resource.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[ColumnSpec, ...]
    resource: str
    whole_groups: bool = False
    if_written: tuple[str, ...] = ()
    leases: bool = True
    flags: tuple[str, ...] = ()
    build: Build | None = field(default=None, compare=False, repr=False)
    stored: Mapping[str, str] = field(default_factory=dict)
    stored_writes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.resource not in RESOURCES:
            known = ", ".join(RESOURCES)
            raise ValueError(f"stage {self.name}: resource {self.resource!r} is unknown; known: {known}")

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the columns that it writes."""
        return tuple(column.name for column in self.writes)

    def on(self, context: RankContext) -> tuple[StageSpec, Dock, float]:
        """The fields of `Stage`, on this rank."""
        return self, context.dock_of(self.resource), context.ranks.deadline


def resolved(specs: Sequence[StageSpec]) -> list[StageSpec]:
    """The stages, in their order, each with all that it reads, and with columns that several of them write kept apart
    in the dock.

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
    """What a rank has to do with a rollout, or with a round of one.

    share: rows of whole groups that this rank grades and compares, maybe none.
    batches: micro-batches of its data parallel rank in one pass over the rollout.
    steps: all optimizer steps of that pass.
    """

    share: Sequence[SampleId]
    batches: Sequence[Sequence[SampleId]] = ()
    steps: Sequence[Step] = ()


@dataclass(eq=False)
class Stage:
    """A stage at work on this rank. A schedule walks the table and calls `work` of one stage after the other.

    dock: as the ranks see it that share this stage's leases.
    deadline: seconds that it waits for its rows.
    timed_as: the stage under whose name its seconds count, where that is not its own.
    """

    spec: StageSpec
    dock: Dock
    deadline: float
    timed_as: ClassVar[str | None] = None

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
        bounds = {"deadline": self.deadline, **bounds}
        lease = self.dock.lease(self.spec.name, ids=ids, columns=wanted, **bounds)
        return replace(lease, rows=_renamed(lease.rows, {v: k for k, v in stored.items()})) if stored else lease

    def commit(self, lease: Lease, rows: Rows | None = None) -> None:
        """Write back and acknowledge."""
        self.dock.commit(lease, rows if rows is None else _renamed(rows, self.spec.stored_writes))


class Stages:
    """The stages at work on this rank, in the table's order; those that other processes run are not among them."""

    def __init__(self, stages: Mapping[str, Any]) -> None:
        self._stages = dict(stages)

    @classmethod
    def of(cls, table: Sequence[StageSpec], context: RankContext) -> Stages:
        """Each stage of the table builds itself."""
        built = {spec.name: spec.build(spec, context) for spec in table}
        return cls({name: stage for name, stage in built.items() if stage is not None})

    def __getitem__(self, name: str) -> Any:
        return self._stages[name]

    def between(self, after: str, before: str) -> list[Any]:
        """Those behind one stage and before another."""
        names = list(self._stages)
        return [self._stages[name] for name in names[names.index(after) + 1 : names.index(before)]]


def _renamed(rows: Rows, names: Mapping[str, str]) -> Rows:
    return Rows(rows.ids, {names.get(name, name): column for name, column in rows.columns.items()}) if names else rows
