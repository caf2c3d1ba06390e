"""Which rows a consumer gets next: a pure function of what is asked and of the epochs as a controller sees them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mindspeed_rl_plugin.dock.messages import Ask
from mindspeed_rl_plugin.dock.places import DONE, FREE, EpochView

Picked = list[tuple[int, np.ndarray]]  # epoch -> row numbers, in delivery order


def pick(epochs: Mapping[int, EpochView], ask: Ask) -> Picked | None:
    """The rows to give out; [] where every row is acknowledged; None to wait for more.

    Raises ValueError for ids that are cleared, done, or a part of a group where groups are whole, and for bounds below
    one group.
    """
    if ask.ids is not None:
        asked = rows_of(epochs, ask.ids)
        for number, rows in asked:
            _check(epochs[number], number, rows)
        return asked if all(epochs[number].available()[rows].all() for number, rows in asked) else None
    unit = max((epoch.unit for epoch in epochs.values()), default=1)
    if ask.max_rows is not None and ask.max_rows < unit:
        name = next(iter(epochs.values())).spec.name
        raise ValueError(f"lease of state {name!r}: max_rows {ask.max_rows} is less than one group of {unit}")
    ready = _ready(epochs, ask.near)
    batch = _bounded(epochs, ready, ask)
    total, most = (sum(len(rows) for _, rows in part) for part in (batch, ready))
    if not total:  # wait while others hold rows that may come back
        return None if any(epoch.undone().any() for epoch in epochs.values()) else batch
    if total < most or (ask.max_rows is not None and total + unit > ask.max_rows):
        return batch
    if total >= ask.min_rows:
        return batch
    more = any((e.undone() & (e.status == FREE) & ~e.available()).any() for e in epochs.values())
    return None if more else batch


def rows_of(epochs: Mapping[int, EpochView], ids: np.ndarray) -> Picked:
    """Row numbers of ids `[B, 3]` in that order; those of other epochs are left out."""
    parts = np.split(ids, np.flatnonzero(np.diff(ids[:, 0])) + 1)
    known = [(int(part[0, 0]), part) for part in parts if len(part) and int(part[0, 0]) in epochs]
    return [(number, part[:, 1] * epochs[number].shape.members + part[:, 2]) for number, part in known]


def _ready(epochs: Mapping[int, EpochView], near: int | None) -> Picked:
    out: Picked = []
    for number, epoch in sorted(epochs.items()):
        rows = epoch.available().nonzero()[0]
        if near is not None and (epoch.owner != near).any():
            far = epoch.owner[rows // epoch.shape.members] != near
            rows = np.concatenate([rows[~far], rows[far]])
        if len(rows):
            out.append((number, rows))
    return out


def _bounded(epochs: Mapping[int, EpochView], ready: Picked, ask: Ask) -> Picked:
    """No more than the ask's bounds, but one unit at least."""
    taken, tokens = 0, 0
    out: Picked = []
    for number, rows in ready:
        epoch = epochs[number]
        units = rows.reshape(-1, epoch.unit)
        kept = len(units) if ask.max_rows is None else min((ask.max_rows - taken) // epoch.unit, len(units))
        if ask.max_tokens is not None:
            length = tokens + epoch.lengths(units).cumsum()
            kept = min(kept, int((length <= ask.max_tokens).sum()))  # no length is negative: those that fit come first
            tokens = int(length[-1])
        kept = kept or int(taken == 0)
        if kept:
            out.append((number, units[:kept].reshape(-1)))
            taken += kept * epoch.unit
        if kept < len(units):
            break
    return out


def _check(epoch: EpochView, number: int, rows: np.ndarray) -> None:
    """Raise ValueError for rows that will never be ready."""
    name, members = epoch.spec.name, epoch.shape.members
    group, member = np.divmod(rows, members)
    gone = ~(epoch.alive & ~epoch.retired)[group]
    if gone.any():
        raise ValueError(f"state {name!r}: {_first(epoch, number, rows[gone])} is cleared, its cells are gone")
    done = epoch.status[rows] == DONE
    if done.any():
        asked = _first(epoch, number, rows[done])
        raise ValueError(f"state {name!r}: already acknowledged: {asked}; each row is delivered once")
    count = np.bincount(group) if epoch.spec.whole_groups else group[:0]
    for part in ((count > 0) & (count < members)).nonzero()[0].tolist():
        lacking = sorted({*range(members)} - {*member[group == part].tolist()})
        raise ValueError(
            f"state {name!r} takes whole groups: group {part} of epoch {number} is asked without members {lacking}"
        )


def _first(epoch: EpochView, number: int, rows: np.ndarray) -> tuple[int, ...]:
    return tuple(epoch.ids(number, rows[:1])[0].tolist())
