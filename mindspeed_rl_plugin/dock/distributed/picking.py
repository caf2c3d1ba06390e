"""Which rows a consumer gets next: pure functions of what is asked and of the epochs as a controller sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mindspeed_rl_plugin.dock.distributed.views import DONE, FREE, EpochView

Picked = list[tuple[int, np.ndarray]]  # epoch -> row numbers, in delivery order


@dataclass(frozen=True)
class Ask:
    """What a consumer wants.

    ids: `[B, 3]` exactly these, in this order. share (consumer, consumers): the next rows of a part of each epoch that
    depends on ids alone, and with `balance` on lengths, where a batch is of one epoch; waits until all of them are
    ready, so that a batch never depends on what came first. Neither: whatever is ready, in id order (streaming).

    max_rows, max_tokens: bounds on a batch, which holds one row (or group) at least; min_rows: wait for so many,
    unless no more are left; linger: seconds to wait for a full batch once min_rows are there; window: a batch under
    max_tokens is filled from the next `window` rows (min_rows at least), longest first; near: rows of this warehouse
    come first; newest, max_staleness: rows whose weights are more than max_staleness updates older than `newest` are
    never given out (these six concern streaming). join: name of one call, its number last: when it is repeated, and
    when the `peers` ranks of a consumer make the same, they get the same lease.
    """

    ids: np.ndarray | None = None
    share: tuple[int, int] | None = None
    balance: bool = False
    max_rows: int | None = None
    min_rows: int = 1
    max_tokens: int | None = None
    linger: float = 0.0
    window: int = 0
    near: int | None = None
    newest: int | None = None
    max_staleness: int | None = None
    join: tuple[int | str, ...] | None = None
    peers: int = 1


def pick_share(epochs: Mapping[int, EpochView], ask: Ask) -> Picked | None:
    """The next rows of a share, all of them ready; None to wait."""
    found: Picked = []
    waiting = False
    for number, epoch in sorted(epochs.items()):
        undone = epoch.undone()
        if not undone.any():
            continue
        if found and ask.balance:  # whether the lengths of this one are known must not matter for the one before
            break
        mine = epoch.share(ask.share, ask.balance)
        if mine is None:
            return None
        mine = mine[undone[mine]]
        free = mine[epoch.status[mine] == FREE]
        waiting |= len(free) < len(mine)
        if len(free):
            found.append((number, free))
    found = _cut(epochs, found, ask)
    if any(not epochs[n].available()[rows].all() for n, rows in found):
        return None
    return None if waiting and not found else found


def pick_ready(epochs: Mapping[int, EpochView], ask: Ask, waited: float) -> Picked | None:
    """What is ready, or None to wait for more; waited: seconds so far."""
    found: Picked = []
    for number, epoch in sorted(epochs.items()):
        if ask.newest is not None and ask.max_staleness is not None:
            epoch.retire((epoch.version >= 0) & (epoch.version < ask.newest - ask.max_staleness))
        rows = epoch.available().nonzero()[0]
        if ask.near is not None and (epoch.home != ask.near).any():
            far = epoch.home[rows // epoch.shape.members] != ask.near
            rows = np.concatenate([rows[~far], rows[far]])
        if len(rows):
            found.append((number, rows))
    batch = _cut(epochs, _filled(epochs, found, ask), ask)
    total, ready = (sum(len(rows) for _, rows in part) for part in (batch, found))
    if not total:  # wait while others hold rows that may come back
        return None if any(epoch.undone().any() for epoch in epochs.values()) else batch
    unit = max(epoch.unit for epoch in epochs.values())
    if total < ready or (ask.max_rows is not None and total + unit > ask.max_rows):
        return batch
    if total >= ask.min_rows and waited >= ask.linger:
        return batch
    more = any((e.undone() & (e.status == FREE) & ~e.available()).any() for e in epochs.values())
    return None if more else batch


def pick_ids(epochs: Mapping[int, EpochView], ids: np.ndarray) -> Picked | None:
    """Rows `ids` `[B, 3]` of open epochs in that order, once all of them are ready.

    Raises ValueError for ids that are not open, cleared, done, or a part of a group where groups are whole.
    """
    found: Picked = []
    ready = True
    cuts = np.flatnonzero(np.diff(ids[:, 0])) + 1
    for part in np.split(ids, cuts):
        epoch = epochs[int(part[0, 0])]
        rows = part[:, 1] * epoch.shape.members + part[:, 2]
        _check(epoch, part, rows)
        ready &= bool(epoch.available()[rows].all())
        found.append((int(part[0, 0]), rows))
    return found if ready else None


def _check(epoch: EpochView, ids: np.ndarray, rows: np.ndarray) -> None:
    name, (groups, members) = epoch.spec.name, epoch.shape
    outside = (ids[:, 1:] < 0).any(1) | (ids[:, 1] >= groups) | (ids[:, 2] >= members)
    if outside.any():
        raise ValueError(f"state {name!r}: {_words(ids, outside)} was not opened: {groups} groups of {members}")
    gone = ~(epoch.alive & ~epoch.closing)[ids[:, 1]]
    if gone.any():
        raise ValueError(f"state {name!r}: {_words(ids, gone)} is cleared, its cells are gone")
    done = epoch.status[rows] == DONE
    if done.any():
        raise ValueError(f"state {name!r}: already acknowledged: {_words(ids, done)}; each row is delivered once")
    if epoch.spec.whole_groups:
        count = np.bincount(ids[:, 1], minlength=groups)
        for group in ((count > 0) & (count < members)).nonzero()[0].tolist():
            lacking = np.setdiff1d(np.arange(members), ids[ids[:, 1] == group, 2]).tolist()
            raise ValueError(
                f"state {name!r} takes whole groups: group {group} of epoch {ids[0, 0]} is asked without members "
                f"{lacking}"
            )


def _words(ids: np.ndarray, mask: np.ndarray) -> str:
    return str(tuple(ids[mask.argmax()].tolist()))


def _filled(epochs: Mapping[int, EpochView], found: Picked, ask: Ask) -> Picked:
    """Under max_tokens: the rows of the window that fill one batch best, longest first. The window goes on over the
    borders of epochs."""
    if not (ask.window and ask.max_tokens and found):
        return found
    room = max(ask.window, ask.min_rows)
    window: list[tuple[int, np.ndarray]] = []  # epoch and rows of each unit
    lengths: list[int] = []
    for number, rows in found:
        epoch = epochs[number]
        units = epoch.units(rows)[: max(room // epoch.unit, 0 if window else 1)]
        window += [(number, unit) for unit in units]
        lengths += epoch.lengths(units).tolist()
        room -= units.size
    chosen: list[int] = []
    left = ask.max_tokens
    for i in np.argsort(-np.array(lengths), kind="stable").tolist():
        if lengths[i] <= left or not chosen:
            chosen.append(i)
            left -= lengths[i]
    parts: dict[int, list[np.ndarray]] = {}
    for number, unit in (window[i] for i in sorted(chosen)):
        parts.setdefault(number, []).append(unit)
    return [(number, np.concatenate(units)) for number, units in parts.items()]


def _cut(epochs: Mapping[int, EpochView], found: Picked, ask: Ask) -> Picked:
    """No more than the ask's bounds, but one unit at least."""
    taken, tokens = 0, 0
    out: Picked = []
    for number, rows in found:
        epoch = epochs[number]
        units = epoch.units(rows)
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
