"""Which rows a consumer gets next: a pure function of what is asked and of the epochs as a controller sees them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mindspeed_rl_plugin.dock.messages import Ask
from mindspeed_rl_plugin.dock.views import DONE, FREE, EpochView

Picked = list[tuple[int, np.ndarray]]  # epoch -> row numbers, in delivery order


def pick(epochs: Mapping[int, EpochView], ask: Ask, waited: float) -> Picked | None:
    """The rows to give out; [] where every row is acknowledged; None to wait for more. waited: seconds so far.

    Raises ValueError for ids that are not open, cleared, done, or a part of a group where groups are whole, and for
    bounds below one group.
    """
    if ask.ids is not None:
        return _those(epochs, ask.ids)
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
    if total >= ask.min_rows and waited >= ask.linger:
        return batch
    more = any((e.undone() & (e.status == FREE) & ~e.available()).any() for e in epochs.values())
    return None if more else batch


def _those(epochs: Mapping[int, EpochView], ids: np.ndarray) -> Picked | None:
    """Rows `ids` in that order, once all of them are ready."""
    out: Picked = []
    ready = True
    for part in np.split(ids, np.flatnonzero(np.diff(ids[:, 0])) + 1):
        if not len(part):
            continue
        epoch = epochs[int(part[0, 0])]
        rows = part[:, 1] * epoch.shape.members + part[:, 2]
        _check(epoch, part, rows)
        ready &= bool(epoch.available()[rows].all())
        out.append((int(part[0, 0]), rows))
    return out if ready else None


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


def _check(epoch: EpochView, ids: np.ndarray, rows: np.ndarray) -> None:
    name, (groups, members) = epoch.spec.name, epoch.shape
    outside = (ids[:, 1:] < 0).any(1) | (ids[:, 1] >= groups) | (ids[:, 2] >= members)
    if outside.any():
        raise ValueError(f"state {name!r}: {_first(ids, outside)} was not opened: {groups} groups of {members}")
    gone = ~(epoch.alive & ~epoch.retired)[ids[:, 1]]
    if gone.any():
        raise ValueError(f"state {name!r}: {_first(ids, gone)} is cleared, its cells are gone")
    done = epoch.status[rows] == DONE
    if done.any():
        raise ValueError(f"state {name!r}: already acknowledged: {_first(ids, done)}; each row is delivered once")
    if epoch.spec.whole_groups:
        count = np.bincount(ids[:, 1], minlength=groups)
        for group in ((count > 0) & (count < members)).nonzero()[0].tolist():
            lacking = np.setdiff1d(np.arange(members), ids[ids[:, 1] == group, 2]).tolist()
            raise ValueError(
                f"state {name!r} takes whole groups: group {group} of epoch {ids[0, 0]} is asked without members "
                f"{lacking}"
            )


def _first(ids: np.ndarray, mask: np.ndarray) -> str:
    return str(tuple(ids[mask.argmax()].tolist()))
