"""What a stage is: its declaration, and the same short way from a lease to a commit for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mindspeed_rl_plugin.dock import ColumnSpec, Dock, Lease, StateSpec
from mindspeed_rl_plugin.rows import Rows, SampleId

# What a stage occupies, and what it may take at once there.
UNITS = {"leader": ("row", "group"), "engine": ("row",), "cpu": ("row", "group"), "trainer": ("micro-batch", "step")}


@dataclass(frozen=True)
class StageSpec:
    """The declaration of a stage.

    name: of the stage, and of its worker state in the dock; reads: columns by name; writes: columns; resource: what it
    occupies, by which `loop.docks` knows which ranks share its leases; unit: what it takes at once, of the resource's
    `UNITS` ("group": rows are only leased as whole groups; the others only tell the reader); stored, stored_writes:
    names in the dock of columns that it reads and writes, where several stages write them (`resolved`). Raises
    ValueError for an unknown resource or unit.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[ColumnSpec, ...]
    unit: str
    resource: str
    stored: Mapping[str, str] = field(default_factory=dict)
    stored_writes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.resource not in UNITS:
            raise ValueError(f"stage {self.name}: resource {self.resource!r} is unknown; known: {', '.join(UNITS)}")
        if self.unit not in (units := UNITS[self.resource]):
            raise ValueError(
                f"stage {self.name}: unit {self.unit!r} is unknown on resource {self.resource!r}; "
                f"known: {', '.join(units)}"
            )

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the columns that it writes."""
        return tuple(column.name for column in self.writes)


def resolved(specs: Sequence[StageSpec]) -> list[StageSpec]:
    """The stages, in their order, with columns that several of them write kept apart in the dock.

    Each stage reads what the last one before it wrote; the last writer's column keeps its name, an earlier one is
    stored as `name@stage`.
    """
    last = {column.name: spec.name for spec in specs for column in spec.writes}
    latest: dict[str, str] = {}
    result = []
    for spec in specs:
        stored = {name: latest[name] for name in spec.reads if latest.get(name, name) != name}
        writes = {n: f"{n}@{spec.name}" for n in spec.written if last[n] != spec.name}
        latest |= {name: writes.get(name, name) for name in spec.written}
        result.append(replace(spec, stored=stored, stored_writes=writes))
    return result


def columns_of(specs: Sequence[StageSpec]) -> list[ColumnSpec]:
    """The dock's columns: whatever the stages write."""
    return [replace(c, name=spec.stored_writes.get(c.name, c.name)) for spec in specs for c in spec.writes]


def states_of(specs: Sequence[StageSpec]) -> list[StateSpec]:
    """The dock's worker states: the stages that read."""
    return [
        StateSpec(
            spec.name,
            tuple(spec.stored.get(name, name) for name in spec.reads),
            tuple(spec.stored_writes.get(name, name) for name in spec.written),
            whole_groups=spec.unit == "group",
        )
        for spec in specs
        if spec.reads
    ]


@dataclass(eq=False)
class Stage:
    """A stage at work on this rank. dock: as the ranks see it that share this stage's leases; deadline: seconds that
    it waits for its rows."""

    spec: StageSpec
    dock: Dock
    deadline: float

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


def _renamed(rows: Rows, names: Mapping[str, str]) -> Rows:
    return Rows(rows.ids, {names.get(name, name): column for name, column in rows.columns.items()}) if names else rows
