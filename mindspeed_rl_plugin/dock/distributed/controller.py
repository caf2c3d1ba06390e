"""The controller of one worker state: what is ready, who holds it, what is done. Metadata only, no sockets, no clock.

It learns of cells from the records of the warehouses, in any order and any number of times. Rows are given out
under a lease; a lease ends when its holders say so, when its rows are acknowledged, or when its time runs out, and
then the rows that are not acknowledged are given out again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mindspeed_rl_plugin.dock.api import ColumnSpec, StateSpec
from mindspeed_rl_plugin.dock.distributed.picking import Ask, Picked, pick_ids, pick_ready, pick_share
from mindspeed_rl_plugin.dock.distributed.records import EpochSet, Record, Shape, slots_of_groups
from mindspeed_rl_plugin.dock.distributed.views import DONE, FREE, LEASED, EpochView
from mindspeed_rl_plugin.dock.report import explain_wait, listed
from mindspeed_rl_plugin.rows import SampleId


@dataclass
class Grant:
    """A live lease. rows: epoch -> row numbers in delivery order; holders: who has it -> is through with it; undone:
    a holder has handed it back; last: its last holder acknowledges the rows; ids: that were asked for."""

    token: int
    rows: Picked
    holders: dict[Hashable, bool] = field(default_factory=dict)
    peers: int = 1
    expires: float = float("inf")
    join: Hashable | None = None
    undone: bool = False
    last: bool = False
    ids: np.ndarray | None = None

    def __len__(self) -> int:
        return sum(len(rows) for _, rows in self.rows)


class Controller:
    """`spec`: the state; columns, states: all that are declared."""

    def __init__(self, spec: StateSpec, columns: Mapping[str, ColumnSpec], states: Mapping[str, StateSpec]) -> None:
        self.spec, self.columns, self.states = spec, columns, states
        self.applied: dict[int, int] = {}  # warehouse -> all its records up to this one are here
        self.duplicates = 0
        self.assigned: Callable[[int, int], np.ndarray] | None = None  # (epoch, groups) -> home of each group at first
        self.strayed = False  # whether a group lies somewhere else
        self._epochs: dict[int, EpochView] = {}
        self._gone = EpochSet()
        self._ahead: dict[int, set[int]] = {}
        self._tellers: set[int] = set()  # warehouses that have told of cells
        self._leases: dict[int, Grant] = {}
        self._joined: dict[Hashable, Grant] = {}
        self._broken: dict[Hashable, Grant] = {}  # of several peers, ended because a machine was lost
        # Of its own: a lease of a former controller of this state, or of another dock, is not one of these.
        self._next_token = 1 + (secrets.randbits(30) << 20)

    # learning

    def open(self, epoch: int, shape: Shape) -> None:
        """Know the ids of an epoch; repeats change nothing. Raises ValueError for another shape."""
        known = self._epochs.get(epoch)
        if known is not None and known.shape != shape:
            raise ValueError(f"epoch {epoch} is open with {tuple(known.shape)}, not {tuple(shape)} groups x members")
        if known is None and epoch not in self._gone:
            self._epochs[epoch] = EpochView(shape, self.spec, self.columns)

    def apply(self, record: Record) -> bool:
        """Take one record in. Returns False when records of that warehouse before it are missing."""
        ahead = self._ahead.setdefault(record.warehouse, set())
        below = self.applied.get(record.warehouse, 0)
        if record.seq == below + 1 and not ahead:
            self._enter(record)
            self.applied[record.warehouse] = record.seq
            return True
        if record.seq <= below or record.seq in ahead:
            self.duplicates += 1
            return not ahead
        self._enter(record)
        ahead.add(record.seq)
        self._advance(record.warehouse, below)
        return not self._ahead[record.warehouse]

    def has_gap(self, warehouse: int) -> bool:
        """Whether records of a warehouse came out of order and those between have not come."""
        return bool(self._ahead.get(warehouse))

    def rebuild(self, warehouse: int, seq: int, gone: EpochSet, records: Sequence[Record]) -> None:
        """Catch up from a warehouse's manifest: it stands for all its records up to `seq`, and `gone` for the epochs
        of which it has cleared everything."""
        for number, epoch in [(n, e) for n, e in self._epochs.items() if n in gone]:
            self._forget(number, epoch, np.arange(epoch.shape.groups))
        self._gone.update(gone)
        for record in records:
            self._enter(record)
        self._advance(warehouse, max(seq, self.applied.get(warehouse, 0)))

    def lose(self, epoch: int, groups: np.ndarray) -> None:
        """The home of groups is gone: what lay there is not ready, and what was done with it is undone."""
        view = self._epochs.get(epoch)
        if view is None:
            return
        slots = view.lose(groups)
        for grant in [g for g in self._leases.values() if _holds(g, epoch, slots)]:
            self._end(grant)
            if grant.peers > 1:
                self._broken[grant.join] = grant

    def lose_home(self, warehouse: int) -> None:
        """A warehouse is gone for good, and all groups that lay there with it."""
        for number, view in self._epochs.items():
            self.lose(number, (view.home == warehouse).nonzero()[0])

    def lost(self, dead: Collection[int], homes: Callable[[int, int], np.ndarray]) -> np.ndarray:
        """`[n, 2]` int64 (epoch, group) of groups to be put again: their home is gone and nothing was written anew, or
        it is one of the `dead` and nothing was ever heard of them. homes: (epoch, groups) -> home of each group."""
        found = []
        for number, view in sorted(self._epochs.items()):
            silent = (view.home < 0) & np.isin(homes(number, view.shape.groups), list(dead))
            found += [(number, g) for g in ((view.lost | silent) & view.alive).nonzero()[0].tolist()]
        return np.array(found, np.int64).reshape(-1, 2)

    def moved(self) -> np.ndarray:
        """`[n, 3]` int64 (epoch, group, home) of groups that lie somewhere else than at first."""
        found = [np.empty((0, 3), np.int64)]
        for number, view in sorted(self._epochs.items()) if self.strayed else ():
            groups = ((view.home >= 0) & (view.home != self._assigned(number, view))).nonzero()[0]
            found.append(np.stack([np.full(len(groups), number), groups, view.home[groups]], 1))
        return np.concatenate(found)

    # giving out

    def take(self, ask: Ask, holder: Hashable, now: float, seconds: float, waited: float = 0.0) -> Grant | None:
        """Rows under a lease for `seconds`; None: not ready. An empty grant (token 0): all rows are acknowledged.

        waited: seconds that this ask has waited so far, for its linger. A repeated ask, because its answer was lost or
        by a peer, gets the same grant.
        Raises ValueError for ids that cannot be had, or that are not those which a peer asked for in the same call.
        """
        if ask.join is not None and ask.join in self._joined:
            return self._join(ask, holder)
        picked = self._pick(ask, waited)
        if picked is None:
            return None
        grant = Grant(0, picked, {holder: False}, ask.peers, now + seconds, ask.join, ids=ask.ids)
        if len(grant):
            grant.token = self._next_token
            self._next_token += 1
            self._take_up(grant)
            self._leases[grant.token] = grant
            for epoch, rows in picked:
                self._epochs[epoch].status[rows] = LEASED
        if ask.join is not None and (grant.token or ask.peers > 1):
            self._joined[ask.join] = grant
        return grant

    def finish(self, token: int, holder: Hashable, done: bool = False) -> bool:
        """A holder is through; with the last one the lease ends, and rows that are not acknowledged are free again.

        done: it has written all that it writes. True: it is the last of several, and all are done; the lease stays
        until it has acknowledged the rows for all of them and finishes again.
        """
        grant = self._leases.get(token)
        if grant is None:
            self._finish_broken(token, holder, done)
            return False
        grant.undone |= not done and not grant.last
        others = [through for h, through in grant.holders.items() if h != holder]
        if done and not grant.undone and len(others) == grant.peers - 1 and all(others):
            grant.last = True
            return True
        grant.holders[holder] = True
        if len(grant.holders) >= grant.peers and all(grant.holders.values()):
            self._end(grant)
        return False

    def drop_holder(self, holder: Hashable) -> bool:
        """A process is gone: its leases are given out again. True when there were any."""
        mine = [g for g in self._leases.values() if g.holders.get(holder) is False]
        for grant in mine:
            self._end(grant)
        return bool(mine)

    def expire(self, now: float) -> int:
        """End the leases whose time is over; returns how many."""
        late = [g for g in self._leases.values() if g.expires <= now]
        for grant in late:
            self._end(grant)
        return len(late)

    def close(self, epoch: int, groups: np.ndarray | None) -> list[str]:
        """Phase one of clearing: give groups out no more. Returns who still holds any of them under a live lease."""
        view = self._epochs.get(epoch)
        if view is None:
            return []
        groups = np.arange(view.shape.groups) if groups is None else groups
        view.closing[groups] = True
        slots = slots_of_groups(groups, view.shape.members)
        grants = [g for g in self._leases.values() if _holds(g, epoch, slots)]
        names = {str(h) for g in grants for h, through in g.holders.items() if not through}
        return sorted(names) or ["a peer that has not asked yet"] * bool(grants)

    # looking

    def remaining(self) -> int:
        """Rows not acknowledged, leased ones included."""
        return sum(int(e.undone().sum()) for e in self._epochs.values())

    def undone(self, ids: np.ndarray) -> np.ndarray:
        """Those of `ids` `[B, 3]` that are not acknowledged; cleared ones are left out."""
        kept = np.zeros(len(ids), bool)
        for number in np.unique(ids[:, 0]).tolist():
            if number in self._epochs:
                view, mine = self._epochs[number], ids[:, 0] == number
                kept[mine] = view.undone()[ids[mine, 1] * view.shape.members + ids[mine, 2]]
        return ids[kept]

    def homes(self, grant: Grant) -> np.ndarray:
        """`[B]` warehouse of each row of a grant."""
        parts = [self._epochs[n].home[rows // self._epochs[n].shape.members] for n, rows in grant.rows]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def locations(self, grant: Grant, columns: Sequence[str]) -> list[np.ndarray]:
        """Segment, offset and length of the grant's cells, `[C, B]` each."""
        parts = [self._epochs[number].locations(rows, columns) for number, rows in grant.rows]
        if len(parts) == 1:
            return parts[0]
        empty = [np.empty((len(columns), 0), t) for t in (np.int32, np.int64, np.int32)]
        return [np.concatenate(x, 1) for x in zip(empty, *parts, strict=True)]

    def ids(self, rows: Picked) -> np.ndarray:
        """`[B, 3]` int64 sample ids."""
        parts = [np.empty((len(slots), 3), np.int64) for _, slots in rows]
        for part, (number, slots) in zip(parts, rows, strict=True):
            part[:, 0] = number
            np.divmod(slots, self._epochs[number].shape.members, out=(part[:, 1], part[:, 2]))
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty((0, 3), np.int64)

    def cleared(self) -> tuple[EpochSet, dict[int, tuple[Shape, list[int]]]]:
        """Epochs that are over, and of the others their shape and the groups that are."""
        partly = {n: e for n, e in self._epochs.items() if not e.alive.all()}
        return self._gone, {n: (e.shape, (~e.alive).nonzero()[0].tolist()) for n, e in partly.items()}

    def explain(self, ask: Ask, seconds: float) -> str:
        """Why an ask was not served within `seconds`."""
        if ask.ids is not None:
            wanted, asked = ask.ids, f"{len(ask.ids)} rows asked by id"
        else:
            wanted = self.ids([(n, e.wanted(ask.share, ask.balance)) for n, e in sorted(self._epochs.items())])
            asked = f"at least {ask.min_rows} rows{' dealt by their lengths' * ask.balance}"
        samples = [SampleId(*i) for i in wanted.tolist()]
        missing = {name: [i for i in samples if not self._has(name, i)] for name in self.spec.reads}
        among = set(samples)
        held = {
            g.token: [i for i in (SampleId(*x) for x in self.ids(g.rows).tolist()) if i in among]
            for g in self._leases.values()
        }
        ready = sum(int(e.available().sum()) for e in self._epochs.values())
        return explain_wait(self.states, self.spec.name, asked, seconds, missing, held, ready)

    # inside

    def _join(self, ask: Ask, holder: Hashable) -> Grant:
        grant = self._joined[ask.join]
        if not np.array_equal(*(np.empty((0, 3)) if ids is None else ids for ids in (grant.ids, ask.ids))):
            theirs, wanted = (None if x is None else listed(map(tuple, x.tolist())) for x in (grant.ids, ask.ids))
            raise ValueError(
                f"lease of state {self.spec.name!r}: call {ask.join[-1]} of this rank asks for ids {wanted}, the "
                f"same call of a peer asked for {theirs}; ranks of one consumer must lease alike"
            )
        grant.holders.setdefault(holder, False)
        if not grant.token and len(grant.holders) == grant.peers:
            del self._joined[ask.join]  # empty: nothing will end it
        return grant

    def _take_up(self, grant: Grant) -> None:
        """Peers that had read all of a lease before it was broken are not told: it goes on under the old number."""
        old = None if grant.join is None else self._broken.pop(grant.join, None)
        if old is not None:
            grant.token, grant.undone = old.token, old.undone
            grant.holders = {**old.holders, **grant.holders}

    def _finish_broken(self, token: int, holder: Hashable, done: bool) -> None:
        for grant in self._broken.values():
            if grant.token == token:
                grant.undone |= not done
                grant.holders[holder] = True

    def _advance(self, warehouse: int, below: int) -> None:
        """All records up to `below` are here, and those that follow it without a gap."""
        ahead = {n for n in self._ahead.get(warehouse, ()) if n > below}
        while below + 1 in ahead:
            below += 1
            ahead.remove(below)
        self._ahead[warehouse], self.applied[warehouse] = ahead, below

    def _pick(self, ask: Ask, waited: float) -> Picked | None:
        if ask.ids is None:
            for epoch in self._epochs.values():
                if ask.max_rows is not None and ask.max_rows < epoch.unit:
                    call = f"lease of state {self.spec.name!r}"
                    raise ValueError(f"{call}: max_rows {ask.max_rows} is less than one group of {epoch.unit}")
            return pick_ready(self._epochs, ask, waited) if ask.share is None else pick_share(self._epochs, ask)
        if not len(ask.ids):
            return []
        numbers = np.unique(ask.ids[:, 0]).tolist()
        gone = [n for n in numbers if n in self._gone]
        if gone:
            raise ValueError(f"state {self.spec.name!r}: epoch {gone[0]} is cleared, its cells are gone")
        # An epoch of which nothing was heard yet: its first record is on the way.
        return pick_ids(self._epochs, ask.ids) if all(n in self._epochs for n in numbers) else None

    def _enter(self, record: Record) -> None:
        if not record.shape.groups or record.only_acknowledges(but=self.spec.name):
            return
        self.open(record.epoch, record.shape)
        view = self._epochs.get(record.epoch)
        if view is None:  # cleared everywhere
            return
        self._tellers.add(record.warehouse)
        # Of one warehouse there is nothing to tell apart.
        refused = self._judge(record, view) if len(self._tellers) > 1 and view.comes_from_elsewhere(record) else None
        view.enter(record, refused)
        if self.spec.name in record.acks:
            self._end_done()
        if record.cleared is not None:
            self._forget(record.epoch, view, record.cleared)

    def _judge(self, record: Record, view: EpochView) -> np.ndarray | None:
        """A group that was put anew, because its machine gave no sign of life, lies where it was put last: what its
        first home still tells of it is too old. None, or `[groups]` bool: of which groups nothing is heard."""
        assigned = self._assigned(record.epoch, view)
        touched = view.touched(record)
        foreign = touched & (view.home >= 0) & (view.home != record.warehouse)
        self.strayed |= bool(foreign.any() or (touched & (assigned != record.warehouse)).any())
        moves = foreign & (assigned != record.warehouse)
        if moves.any():
            self.lose(record.epoch, moves.nonzero()[0])
        refused = foreign & (assigned == record.warehouse)
        return refused if refused.any() else None

    def _assigned(self, number: int, view: EpochView) -> np.ndarray:
        if view.assigned is None:
            homes = self.assigned
            view.assigned = view.home.copy() if homes is None else np.asarray(homes(number, view.shape.groups))
        return view.assigned

    def _end_done(self) -> None:
        """Leases of a single holder end by themselves when all their rows are acknowledged or cleared."""
        for grant in [g for g in self._leases.values() if g.peers == 1]:
            if all(n not in self._epochs or _settled(self._epochs[n], rows).all() for n, rows in grant.rows):
                self._drop(grant)

    def _forget(self, number: int, view: EpochView, groups: np.ndarray) -> None:
        view.forget(groups)
        if not view.alive.any():
            del self._epochs[number]
            self._gone.add(number)
            for grant in [g for g in self._leases.values() if any(n == number for n, _ in g.rows)]:
                self._end(grant)
            self._broken = {j: g for j, g in self._broken.items() if all(n in self._epochs for n, _ in g.rows)}

    def _has(self, name: str, sample: SampleId) -> bool:
        view = self._epochs.get(sample.epoch)
        if view is None:
            return False
        at = sample.group if name in view.grouped else sample.group * view.shape.members + sample.member
        return at < len(view.segment[name]) and bool(view.segment[name][at] >= 0)

    def _end(self, grant: Grant) -> None:
        for number, rows in grant.rows:
            view = self._epochs.get(number)
            if view is not None:
                view.status[rows[view.status[rows] == LEASED]] = FREE
        self._drop(grant)

    def _drop(self, grant: Grant) -> None:
        self._leases.pop(grant.token, None)
        if grant.join is not None:
            self._joined.pop(grant.join, None)


def _settled(view: EpochView, rows: np.ndarray) -> np.ndarray:
    """`[B]` bool: nothing is left to be done with them."""
    return (view.status[rows] == DONE) | ~view.alive[rows // view.shape.members]


def _holds(grant: Grant, epoch: int, slots: np.ndarray) -> bool:
    return any(n == epoch and np.isin(rows, slots).any() for n, rows in grant.rows)
