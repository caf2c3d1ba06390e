"""Words for what a dock waits for, so that an error names state, columns, ids and who should have written them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mindspeed_rl_plugin.dock.api import StateSpec
from mindspeed_rl_plugin.rows import SampleId

SHOWN = 4


def listed(items: Iterable[object]) -> str:
    """The first few items and how many there are."""
    items = [tuple(i) if isinstance(i, SampleId) else i for i in items]
    if not items:
        return "none"
    shown = ", ".join(str(i) for i in items[:SHOWN])
    return shown if len(items) <= SHOWN else f"{shown}, ... ({len(items)} in all)"


def writers(states: Mapping[str, StateSpec], column: str) -> str:
    """Who should write a column."""
    names = [s.name for s in states.values() if column in s.writes]
    return f"state {' or '.join(map(repr, names))}" if names else "a producer's put"


def explain_wait(
    states: Mapping[str, StateSpec],
    state: str,
    asked: str,
    deadline: float,
    missing: Mapping[str, Sequence[SampleId]],
    held: Mapping[int, Sequence[SampleId]],
    ready: int,
) -> str:
    """Why `state` did not get what it asked within `deadline` seconds.

    missing: ids that lack a column, by column; held: ids in the hands of a live lease, by its token; ready: rows
    that the state could have taken.
    """
    reasons = [
        f"column {column!r} (written by {writers(states, column)}) is missing for {listed(ids)}"
        for column, ids in missing.items()
        if ids
    ]
    reasons += [f"lease {token} holds {listed(ids)}" for token, ids in held.items() if ids]
    whole = " (whole groups)" if states[state].whole_groups else ""
    why = "; ".join(reasons) or "no more rows are open"
    return f"state {state!r} waited {deadline:g} s for {asked}{whole}, {ready} are ready: {why}"
