"""What a dock refuses: declarations that do not fit together, and snapshots of another algorithm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mindspeed_rl_plugin.dock.api import ColumnSpec, Lease, StateSpec
from mindspeed_rl_plugin.dock.report import listed
from mindspeed_rl_plugin.rows import Rows, SampleId

FORMAT = 1  # of a snapshot
STREAM = ("max_tokens", "window", "linger", "newest", "max_staleness", "near", "balance")  # options of a lease


def check_declarations(columns: Sequence[ColumnSpec], states: Sequence[StateSpec]) -> None:
    """Raise ValueError for a name declared twice, and for a state with columns that nobody declared."""
    names = {c.name for c in columns}
    if len(names) != len(columns) or len({s.name for s in states}) != len(states):
        raise ValueError("a column or a state is declared twice: each name is declared once")
    for state in states:
        unknown = [c for c in (*state.reads, *state.writes) if c not in names]
        if unknown:
            known = listed(c.name for c in columns)
            raise ValueError(f"state {state.name!r} uses undeclared columns {unknown}; declared: {known}")


def check_snapshot(state: dict[str, Any], columns: Mapping[str, ColumnSpec]) -> None:
    """Raise ValueError unless a dock with these columns can take over a snapshot."""
    if state.get("format") != FORMAT:
        raise ValueError(f"dock snapshot has format {state.get('format')!r}, this dock reads format {FORMAT}")
    declared = {n: c.describe() for n, c in columns.items()}
    saved = state["columns"].items() if state["epochs"] else ()
    wrong = [f"column {n!r} ({d}, here {declared[n]})" for n, d in saved if declared.get(n, d) != d]
    if wrong:
        raise ValueError(
            f"dock snapshot was taken under another algorithm: {'; '.join(wrong)}; resume with the same flags, "
            "at least until the rollout in it is used up"
        )


def void(lease: Lease, undone: Sequence[SampleId]) -> ValueError:
    """The error for a commit of a lease that is not live any more, though some of its rows are not done."""
    return ValueError(
        f"commit: lease {lease.token} of state {lease.state!r} is void (released, or the dock was restored); "
        f"lease its undone rows again: {listed(undone)}"
    )


def named(ids: Sequence[SampleId] | Tensor) -> Sequence[SampleId]:
    """Ids as they are, or of plain triples or a `[B, 3]` tensor."""
    if isinstance(ids, Tensor):
        ids = ids.tolist()
    return ids if all(type(i) is SampleId for i in ids) else [SampleId(*i) for i in ids]


class Declared:
    """What every dock refuses of a call, by its declared columns and states, each by name."""

    columns: dict[str, ColumnSpec]
    states: dict[str, StateSpec]

    def _check_state(self, state: str) -> None:
        if state not in self.states:
            raise ValueError(f"state {state!r} is not declared; declared: {listed(self.states)}")

    def _check_known(self, call: str, columns: Iterable[str]) -> None:
        unknown = [c for c in columns if c not in self.columns]
        if unknown:
            raise ValueError(f"{call}: columns {unknown} are not declared; declared: {listed(self.columns)}")

    def _check_stream(self, state: str, stream: Mapping[str, Any], versioned: bool) -> None:
        """Of a stream's options: names that exist, and weight versions where the dock is told of them."""
        unknown = sorted(set(stream) - set(STREAM))
        if unknown:
            raise ValueError(f"lease of state {state!r}: no option {unknown}; known: {', '.join(STREAM)}")
        if not versioned and not {"newest", "max_staleness"}.isdisjoint(stream):
            raise ValueError(
                f"lease of state {state!r}: newest and max_staleness want the weight version of each row; name its "
                "column when the dock is made: Limits(version_column=...)"
            )

    def _read_by(self, state: str, columns: Sequence[str] | None) -> tuple[str, ...]:
        """What a lease fetches: `columns` of those that the state reads, all of them by default."""
        self._check_state(state)
        reads = self.states[state].reads
        foreign = [c for c in columns or () if c not in reads]
        if foreign:
            raise ValueError(f"lease: state {state!r} reads {list(reads)}, not {foreign}")
        return reads if columns is None else tuple(columns)

    def _check_writes(self, lease: Lease, rows: Rows) -> None:
        self._check_state(lease.state)
        writes = self.states[lease.state].writes
        foreign = [c for c in rows.columns if c not in writes]
        if foreign:
            raise ValueError(f"commit: state {lease.state!r} writes {list(writes)}, not {foreign}")
        strange = () if rows.ids is lease.rows.ids else set(rows.ids) - set(lease.rows.ids)
        if strange:
            raise ValueError(
                f"commit: lease {lease.token} of state {lease.state!r} does not hold {listed(sorted(strange))}"
            )
