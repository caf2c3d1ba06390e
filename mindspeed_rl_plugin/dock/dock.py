"""`Dock` for one rank: gets metadata from the controllers, and cells directly from the warehouses.

The reader itself copies cells of this machine's warehouse out of shared memory; cells of another machine come in one
reply. The first rank of a consumer (tensor and pipeline peers) leases and shares the grant; each rank reads the cells
itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from mindspeed_rl_plugin.dock import cells, snapshot
from mindspeed_rl_plugin.dock import messages as m
from mindspeed_rl_plugin.dock.api import ANY_VERSION, Declared, Lease, VersionBound, listed, refuse
from mindspeed_rl_plugin.dock.calls import Calls
from mindspeed_rl_plugin.dock.cells import Writer
from mindspeed_rl_plugin.dock.peers import Peers
from mindspeed_rl_plugin.dock.places import ids_array, ids_tuple
from mindspeed_rl_plugin.rows import Rows, SampleId


class Dock:
    """One rank's view of the dock. Deadlines are seconds from the call.

    A wrong call raises ValueError, which names the columns, states or ids. A wait that is too long raises TimeoutError
    with the state, the missing columns and ids, and the state that should have written them.

    member: the process (`factory.Member`) that this view belongs to; None outside of the job and for `for_thread`.
    peers: the ranks of this view's consumer, which make the same calls of `lease`, `commit` and `release`.
    leader: whether this rank acts for the job in `clear`, `snapshot` and `restore`.
    deadline: seconds to wait for other processes.
    """

    piece_bytes: int | None = None  # largest number of bytes of cells in a message of `commit_part`; None: no limit

    def __init__(
        self,
        declared: Declared,
        calls: Calls,
        *,
        member: Any = None,
        peers: Peers | None = None,
        leader: bool = True,
        deadline: float = 600.0,
    ) -> None:
        self.columns, self.states = declared.columns, declared.states
        self._declared, self.calls, self.member, self.peers = declared, calls, member, peers or Peers()
        self.leader, self._deadline = leader, deadline
        self.traffic = calls.traffic  # of all views of the dock in this process
        self._writer = Writer(declared, calls, deadline)

    @property
    def served(self) -> dict[str, Any]:
        """states: names of the states whose controllers are in this process; messages, bytes, refused: see `Core`."""
        if (core := self.calls.core) is None:
            return {"states": []}
        return {"states": sorted(core.controllers), **core.served, "refused": dict(core.refused)}

    # ids

    def open(self, epoch: int, groups: int, members: int, version_bound: VersionBound = ANY_VERSION) -> None:
        """Declare the ids (epoch, 0..groups-1, 0..members-1) of a rollout or evaluation; every rank calls it. Epochs of
        rollouts are >= 0 and rise, those of evaluations are < 0 and fall; none is reused. Processes outside of the job
        learn an epoch when they first lease or list (`finished`) its rows. A repeat changes nothing."""
        if groups < 1 or members < 1:
            raise ValueError(f"open({epoch=}, {groups=}, {members=}): groups and members must be at least 1")
        epochs, shape = self.calls.epochs, m.Shape(groups, members, version_bound)
        if epoch in epochs.known and epochs.known[epoch].shape == shape:
            return
        if epochs.first <= epoch <= epochs.last:
            raise ValueError(f"epoch {epoch}: {epochs.first} to {epochs.last} are used, and ids are never reused")
        epochs.add(epoch, shape)

    def clear(self, epoch: int, groups: Iterable[int] | None = None) -> bool:
        """Forget groups of an epoch (None: all) and free their memory. Idempotent. Returns whether no group remains.
        The leader first stops new leases of the groups and waits until the running leases end, then frees the cells;
        the other ranks do not wait."""
        calls = self.calls
        if (known := calls.epochs.opened("clear", epoch)) is None:
            return True
        shape = known.shape
        chosen = np.arange(shape.groups) if groups is None else np.array(list(groups), np.int64)
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= shape.groups):
            raise ValueError(f"clear: epoch {epoch} has groups 0..{shape.groups - 1}, not {chosen.tolist()[:4]}")
        if self.leader and len(chosen):
            for state in self.states:
                calls.query(m.Retire, state, epoch, chosen, self._deadline)
            for warehouse in range(len(calls.directory.warehouses)):  # all must know when an epoch is cleared
                calls.ask_warehouse(warehouse, m.Clear(epoch, shape, chosen))
        return calls.epochs.forget(epoch, chosen)

    # cells

    def put(self, rows: Rows | None) -> None:
        """Commit cells as a producer; waits while the dock is full. rows: None if this rank writes nothing. The cells
        of an epoch on one machine become visible together; the machines are written one after the other.

        Cells already committed keep their value. A group column needs one row per group, of any member. Rows of
        cleared groups are ignored: a late repeat is harmless.
        """
        if rows is not None and len(rows):
            self._writer.write(rows, None)

    def read(self, ids: Sequence[SampleId], columns: Sequence[str]) -> Rows:
        """Read committed cells without a lease and without waiting. No rank may clear these rows meanwhile. Raises
        ValueError with the columns and ids that are missing."""
        refuse("read: undeclared columns", columns, self.columns)
        calls, columns, wanted = self.calls, tuple(columns), ids_array(ids)
        cleared = calls.epochs.cleared("read", wanted)
        if cleared.any():
            raise ValueError(f"read: these rows are cleared, their cells no longer exist: {listed(wanted[cleared])}")
        owner, places = cells.locate(calls, columns, wanted)
        missing = [
            f"column {name!r} of {listed(wanted[segment < 0])}"
            for name, segment in zip(columns, places[0], strict=True)
            if (segment < 0).any()
        ]
        if missing:
            raise ValueError(f"read: not committed: {'; '.join(missing)}")
        return Rows(ids_tuple(wanted), cells.gather(calls, self.columns, "read", columns, owner, places))

    def peek(self, ids: Sequence[SampleId], columns: Sequence[str]) -> Rows:
        """Read the rows that have all these columns. Other ranks may clear rows meanwhile; these are left out."""
        refuse("read: undeclared columns", columns, self.columns)
        calls, columns = self.calls, tuple(columns)
        wanted, there = ids_array(ids), None
        while there is None or not there.all():
            owner, places = cells.locate(calls, columns, wanted)
            there = (places[0] >= 0).all(0)
            wanted, owner, places = wanted[there], owner[there], [table[:, there] for table in places]
            try:
                got = cells.gather(calls, self.columns, "read", columns, owner, places)
            except ValueError:  # the memory of a row may have been freed
                got = None
            there = (cells.locate(calls, columns, wanted)[1][0] >= 0).all(0)  # if all are still there, `got` is right
            if got is None and there.all():
                raise ValueError(f"read: columns {list(columns)} of {listed(wanted)} cannot be read")
        return Rows(ids_tuple(wanted), got)

    # work

    def lease(
        self,
        state: str,
        *,
        ids: Sequence[SampleId] | None = None,
        max_rows: int | None = None,
        deadline: float,
        columns: Sequence[str] | None = None,
        share: tuple[int, int] | None = None,
        version: int | None = None,
    ) -> Lease:
        """Wait for ready rows and lease them, with all columns that the state reads, or with those in `columns`.

        ids: exactly these rows, in this order, once all are ready (plain triples or a `[B, 3]` tensor are allowed).
        None: the rows that are ready, at most `max_rows`, by rising epoch and id, in each epoch those of this machine
        first; only complete groups if the state needs them. An empty lease means that every row is acknowledged; with
        deadline 0 (no wait) it can also mean that no row is ready.

        share: (i, n): the rows in part i (0..n-1) of n equal parts of an epoch, once all of them that are not
        acknowledged are ready.
        version: of the asker's weights. Rows are leased in order, up to the first epoch whose `version_bound` does not
        allow this version. If this is the epoch of the first row, the lease is empty and has the bound in `needs`.
        """
        names, calls = self._declared.reads(state, columns), self.calls
        wanted = None
        if ids is not None:
            wanted = ids_array(ids)
            calls.epochs.cleared(f"lease of state {state!r}", wanted)
            if len(set(ids_tuple(wanted))) != len(wanted):
                raise ValueError(f"lease of state {state!r}: an id occurs twice among {listed(wanted)}")
        bounds = (max_rows, calls.warehouse, share, version)
        grant = self._granted(state, wanted, deadline, calls.lease_seconds, *bounds)
        rows = self._rows_of(grant, state, names)
        if grant.token:
            calls.held[state, grant.token] = grant.ids
        return Lease(grant.token, state, rows, grant.needs)

    def version_bound(self, epoch: int) -> VersionBound:
        """Bound of an open epoch. A process outside of the job must have learned the epoch, see `open`."""
        return self.calls.epochs.shape(epoch).bound

    def commit(self, lease: Lease, rows: Rows | None = None) -> None:
        """Write `rows` back, and acknowledge the lease once all peers have written. By then all columns that the state
        writes must be committed, else it raises ValueError.

        A lease is live until the process that took it commits or releases it. A commit of a lease that is not live
        writes nothing: it is a harmless repeat if all rows are acknowledged or cleared, else it raises ValueError. A
        live lease whose time is over still writes: the first commit of a cell wins.
        """
        if not len(lease):
            return
        held = self.calls.held.get((lease.state, lease.token))
        if held is None:
            return self._check_done(lease, rows)
        calls, peers = self.calls, self.peers
        failed = self._write_back(lease, rows, None) if peers.rank and rows is not None and len(rows) else None
        for after, error in peers.gather((calls.after, failed)):
            calls.hear(after)
            failed = failed or error
        if failed is None:  # all ranks have written
            failed = None if peers.rank else self._write_back(lease, rows, held)
            after, failed = peers.share((calls.after, failed))
            calls.hear(after)
        if failed is not None:
            raise failed
        calls.held.pop((lease.state, lease.token), None)
        return None

    def commit_part(self, lease: Lease, rows: Rows) -> None:
        """Write some rows of a live lease back and acknowledge them, each row once. The other rows stay leased; the
        lease ends with its last row.

        The consumer's first rank writes, without waiting for the other ranks, which call this with the same ids. For a
        lease that is not live, see `commit`.
        """
        calls, key, part = self.calls, (lease.state, lease.token), ids_array(rows.ids)
        held = calls.held.get(key)
        if held is None:
            return self._check_done(replace(lease, rows=rows), rows)
        for piece in () if self.peers.rank else cells.pieces(rows, self.piece_bytes):
            if (failed := self._write_back(lease, piece, ids_array(piece.ids))) is not None:
                raise failed
        calls.held[key] = left = held[~(held[:, None] == part).all(2).any(1)]
        if not len(left):
            del calls.held[key]
        return None

    def release(self, lease: Lease) -> None:
        """Give the rows back; they are delivered again. Nothing happens for a lease that is not live."""
        if (lease.state, lease.token) in self.calls.held:
            self.peers.gather(None)  # all peers have read
            if not self.peers.rank:
                self.calls.query(m.Release, lease.state, lease.token)
            self.calls.held.pop((lease.state, lease.token), None)

    def remaining(self, state: str, ids: Sequence[SampleId] | Tensor | None = None) -> int:
        """Number of rows (of all open epochs, or of `ids`) that the state has not acknowledged; leased ones count."""
        refuse("undeclared state", [state], self.states)
        return len(self._undone(state, None if ids is None else ids_array(ids)))

    # the complete dock

    def snapshot(self) -> dict[str, Any]:
        """Committed cells and acknowledgements of all open epochs >= 0, as plain tensors, ints and strings. On the
        leader; {} on other ranks."""
        return snapshot.collect(self.calls, self._declared) if self.leader else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a snapshot in a new dock. All ranks call it; only the leader writes, so the other ranks may pass the
        snapshot without cells."""
        snapshot.check(state, self.columns)
        epochs = self.calls.epochs
        if epochs.last >= 0:
            raise ValueError(f"restore into a dock that has opened epoch {epochs.last}; start a new one")
        bounds = [snapshot.bound_of(saved) for saved in state["epochs"]] if self.leader else []
        bounds = bounds if self.member is None else self.member.peers.share(bounds)
        for saved, bound in zip(state["epochs"], bounds, strict=True):
            self.open(saved["number"], saved["groups"], saved["members"], bound)
            if self.leader:
                self.clear(saved["number"], snapshot.cleared(saved))
                snapshot.write(saved, self._declared, self._writer)
        epochs.last = state["last_epoch"]
        if self.leader:
            for name in self.states:  # waits until the controller knows all that was written here
                self.remaining(name)
        if self.member is not None:
            self.member.peers.gather(None)

    def for_thread(self) -> Dock:
        """A view of the dock for another thread of this rank, with independent leases, writes and reads. Only the
        original view opens and clears epochs, and closes the dock for both."""
        return Dock(self._declared, self.calls, leader=False, deadline=self._deadline)

    def close(self) -> None:
        """Leave the dock and free this process's part of it. Idempotent. The lowest rank of a machine holds the memory
        there, so no rank of a job may leave before the last call of every rank."""
        (self.member or self.calls).close()

    # inside

    def _granted(self, state: str, wanted: np.ndarray | None, *more: Any) -> m.Grant:
        """The controller's answer to the consumer's first rank, returned on all its ranks. more: fields of `Ask`."""
        answer: m.Grant | Exception | None = None
        if not self.peers.rank:
            try:
                answer = self.calls.query(m.Ask, state, wanted, *more)
            except (ValueError, TimeoutError) as error:
                answer = error
        answer = self.peers.share(answer)
        if isinstance(answer, Exception):
            raise answer
        if wanted is not None and not np.array_equal(wanted, answer.ids):
            mine, theirs = (listed(x) for x in (wanted, answer.ids))
            raise ValueError(
                f"lease of state {state!r}: this rank asks for ids {mine}, but the first rank of its consumer for "
                f"{theirs}; all ranks of a consumer must ask for the same ids"
            )
        if self.calls.epochs.owners is None:
            self.calls.epochs.learn(answer)
        return answer

    def _rows_of(self, grant: m.Grant, state: str, names: Sequence[str]) -> Rows:
        """Read the columns `names` of a grant; pipeline stages share a grant and read different columns. If the read
        fails, the grant is given back."""
        reads = self.states[state].reads
        mine = [reads.index(name) for name in names]
        places = [place[mine] for place in (grant.segment, grant.offset, grant.length)]
        try:
            got = cells.gather(self.calls, self.columns, state, names, grant.owner, places)
        except BaseException:
            with contextlib.suppress(ValueError, OSError):
                if grant.token and not self.peers.rank:
                    self.calls.query(m.Release, state, grant.token)
            raise
        return Rows(ids_tuple(grant.ids), got)

    def _write_back(self, lease: Lease, rows: Rows | None, held: np.ndarray | None) -> Exception | None:
        """Write rows, and acknowledge `held` (`[n, 3]` ids, None: nothing). Returns the error; None: it worked."""
        try:
            self._declared.check_writes(lease, rows)
            self._writer.write(rows, lease.state, held)
        except (ValueError, TimeoutError) as error:
            return error
        return None

    def _check_done(self, lease: Lease, rows: Rows | None) -> None:
        """Raise ValueError for a commit of a lease that is not live, unless its rows are acknowledged or cleared."""
        self._declared.check_writes(lease, rows)
        undone = self._undone(lease.state, ids_array(lease.rows.ids))
        if len(undone):
            raise ValueError(
                f"commit: lease {lease.token} of state {lease.state!r} is void (released, or the dock was restored); "
                f"lease again the rows that are not acknowledged: {listed(undone)}"
            )

    def _undone(self, state: str, ids: np.ndarray | None) -> np.ndarray:
        """`[n, 3]` rows of all open epochs, or of `ids`, that are not acknowledged."""
        return self.calls.query(m.Look, state, ids, False).ids
