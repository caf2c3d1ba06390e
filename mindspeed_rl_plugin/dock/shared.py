"""One dock for the ranks of a process group: the leader holds it, the others reach it through gloo.

Single program, many ranks: every call is made by all ranks of the group, in the same order. Each rank sends its
request to the leader (group rank 0), which serves them in rank order and answers each with what it asked for. An
error of the leader's dock is raised on every rank. Nothing waits for ever: a rank that does not come ends the
call with a TimeoutError that names the rank, the call and its number.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from mindspeed_rl_plugin.dock.api import Lease
from mindspeed_rl_plugin.dock.link import Link, Message
from mindspeed_rl_plugin.dock.local import LocalDock
from mindspeed_rl_plugin.dock.report import listed
from mindspeed_rl_plugin.types import Rows, SampleId

FORWARDED = {"ValueError": ValueError, "TimeoutError": TimeoutError}


class SharedDock:
    """`Dock` as a collective over `group`. See `dock/api.py` for the semantics.

    local: the dock itself on group rank 0, None elsewhere. consumer: which of `consumers` takers of rows this
    rank belongs to; ranks of one consumer (tensor and pipeline peers) make equal requests and get the same rows
    under one lease. deadline: seconds to wait for the other ranks in each call.

    `put` and `commit` take rows on the ranks that have any and None on the others. `lease` without ids deals the
    ready rows out to the consumers in contiguous shares, as even as whole groups allow; `read` answers each rank
    for itself. `snapshot` returns the state on the leader and {} elsewhere; `restore` uses the leader's.
    """

    def __init__(
        self,
        local: LocalDock | None,
        group: dist.ProcessGroup,
        *,
        consumer: int,
        consumers: int,
        deadline: float,
    ) -> None:
        self._link = Link(group, deadline)
        if (local is not None) != (self._link.rank == 0):
            raise ValueError(f"group rank {self._link.rank}: the LocalDock belongs on group rank 0, and only there")
        if not 0 <= consumer < consumers:
            raise ValueError(f"consumer {consumer} is not one of 0..{consumers - 1}")
        self._local, self._consumer, self._consumers = local, consumer, consumers

    def open(self, epoch: int, groups: int, members: int) -> None:
        """Declare the ids of one rollout."""
        self._call("open", {"same": [epoch, groups, members]})

    def put(self, rows: Rows | None) -> None:
        """Commit cells of the ranks that pass rows; each rank's cells become visible at once, in rank order."""
        self._call("put", {}, rows)

    def lease(
        self,
        state: str,
        *,
        ids: Sequence[SampleId] | None = None,
        max_rows: int | None = None,
        min_rows: int = 1,
        deadline: float,
    ) -> Lease:
        """Rows for this rank's consumer. ids, max_rows: of the consumer; min_rows: of each consumer."""
        note = {
            "same": [state, min_rows, ids is None],
            "consumer": self._consumer,
            "ids": None if ids is None else [list(i) for i in ids],
            "max_rows": max_rows,
            "deadline": deadline,
        }
        answer, rows = self._call(f"lease {state!r}", note, patience=deadline)
        assert rows is not None
        return Lease(answer["token"], state, rows)

    def commit(self, lease: Lease, rows: Rows | None = None) -> None:
        """Write back the rows of the ranks that pass any, then acknowledge the lease of each consumer."""
        self._call(f"commit {lease.state!r}", _note(lease), rows)

    def release(self, lease: Lease) -> None:
        """Hand the rows back undone."""
        self._call(f"release {lease.state!r}", _note(lease))

    def remaining(self, state: str) -> int:
        """Rows of all consumers not yet acknowledged."""
        return self._call("remaining", {"same": [state]})[0]["remaining"]

    def read(self, ids: Sequence[SampleId], columns: Sequence[str]) -> Rows:
        """Cells that this rank asks for; a rank that needs none passes no ids."""
        rows = self._call("read", {"ids": [list(i) for i in ids], "columns": list(columns)})[1]
        assert rows is not None
        return rows

    def clear(self, epoch: int, groups: Iterable[int] | None = None) -> None:
        """Forget groups of an epoch, or all of it."""
        self._call("clear", {"same": [epoch, None if groups is None else list(groups)]})

    def snapshot(self) -> dict[str, Any]:
        """The leader's snapshot on the leader, {} elsewhere."""
        self._call("snapshot", {})
        return {} if self._local is None else self._local.snapshot()

    def restore(self, state: dict[str, Any]) -> None:
        """Become the leader's `state`; the other ranks may pass {}."""
        self._call("restore", {}, state=state)

    # one call

    def _call(
        self,
        name: str,
        note: dict[str, Any],
        rows: Rows | None = None,
        *,
        patience: float = 0.0,
        state: dict[str, Any] | None = None,
    ) -> Message:
        """Send the request; on the leader serve all of them. patience: seconds the leader itself may wait inside."""
        request = {"call": name, **note}
        if self._local is None:
            answer, got = self._link.ask(name, request, rows, patience)
        else:
            requests = self._link.gather(name, request, rows)
            answers = self._serve(requests, state)
            answer, got = self._link.answer(name, answers)
        if "error" in answer:
            raise FORWARDED[answer["error"]](answer["text"])
        return answer, got

    def _serve(self, requests: list[Message], state: dict[str, Any] | None) -> list[Message]:
        """An answer for each rank; the dock's own errors become every rank's answer."""
        try:
            self._check_same(requests)
            verb = requests[0][0]["call"].split(" ")[0]
            if verb == "restore":
                assert self._local is not None and state is not None
                self._local.restore(state)
                return [({}, None)] * len(requests)
            return getattr(self, f"_serve_{verb}")(requests)
        except (ValueError, TimeoutError) as error:
            kind = "TimeoutError" if isinstance(error, TimeoutError) else "ValueError"
            return [({"error": kind, "text": str(error)}, None)] * len(requests)

    def _check_same(self, requests: list[Message]) -> None:
        first = requests[0][0]
        for rank, (note, _) in enumerate(requests):
            if note["call"] != first["call"] or note.get("same") != first.get("same"):
                raise ValueError(
                    f"dock call {self._link.calls}: rank 0 calls {_words(first)}, rank {rank} calls {_words(note)}; "
                    "all ranks make the same calls in the same order"
                )

    def _serve_open(self, requests: list[Message]) -> list[Message]:
        self._local.open(*requests[0][0]["same"])
        return [({}, None)] * len(requests)

    def _serve_clear(self, requests: list[Message]) -> list[Message]:
        self._local.clear(*requests[0][0]["same"])
        return [({}, None)] * len(requests)

    def _serve_snapshot(self, requests: list[Message]) -> list[Message]:
        return [({}, None)] * len(requests)

    def _serve_put(self, requests: list[Message]) -> list[Message]:
        for _, rows in requests:
            self._local.put(rows)
        return [({}, None)] * len(requests)

    def _serve_remaining(self, requests: list[Message]) -> list[Message]:
        return [({"remaining": self._local.remaining(requests[0][0]["same"][0])}, None)] * len(requests)

    def _serve_read(self, requests: list[Message]) -> list[Message]:
        return [({}, self._local.read([SampleId(*i) for i in n["ids"]], n["columns"])) for n, _ in requests]

    def _serve_lease(self, requests: list[Message]) -> list[Message]:
        by_consumer = self._by_consumer([n for n, _ in requests])
        state, min_rows, any_ids = requests[0][0]["same"]
        end = time.monotonic() + requests[0][0]["deadline"]
        if any_ids:
            limits = [n["max_rows"] for n in by_consumer]
            most = None if None in limits else sum(limits)
            least = min_rows * len(by_consumer)
            picked = self._local.pick(state, max_rows=most, min_rows=least, deadline=end - time.monotonic())
            shares = self._deal(state, picked, limits)
        else:
            shares = [[SampleId(*i) for i in n["ids"]] for n in by_consumer]
        leases: list[Lease] = []
        try:
            for share in shares:
                leases.append(self._local.lease(state, ids=share, deadline=end - time.monotonic()))
        except (ValueError, TimeoutError):
            for lease in leases:
                self._local.release(lease)
            raise
        answers: list[Message] = [({"token": lease.token}, lease.rows) for lease in leases]
        return [answers[n["consumer"]] for n, _ in requests]

    def _serve_commit(self, requests: list[Message]) -> list[Message]:
        for note, rows in requests:
            self._local.write_back(_lease(note), rows)
        for note, _ in requests:
            self._local.commit(_lease(note))
        return [({}, None)] * len(requests)

    def _serve_release(self, requests: list[Message]) -> list[Message]:
        for note, _ in requests:
            self._local.release(_lease(note))
        return [({}, None)] * len(requests)

    # dealing out

    def _by_consumer(self, notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The request of each consumer. Raises ValueError where its ranks disagree or it has none."""
        found: dict[int, dict[str, Any]] = {}
        for rank, note in enumerate(notes):
            known = found.setdefault(note["consumer"], note)
            if known["ids"] != note["ids"] or known["max_rows"] != note["max_rows"]:
                raise ValueError(
                    f"dock call {self._link.calls}: rank {rank} asks other rows than its peers of "
                    f"consumer {note['consumer']}"
                )
        absent = [c for c in range(self._consumers) if c not in found]
        if absent:
            raise ValueError(f"no rank belongs to consumers {listed(absent)} of {self._consumers}")
        return [found[c] for c in range(self._consumers)]

    def _deal(self, state: str, ids: list[SampleId], limits: list[int | None]) -> list[list[SampleId]]:
        """Contiguous shares of whole units (groups where the state asks for them), none above its limit."""
        whole = self._local.states[state].whole_groups
        units: dict[object, list[SampleId]] = {}
        for sample in ids:
            units.setdefault(sample[:2] if whole else sample, []).append(sample)
        left = list(units.values())
        shares = []
        for i, limit in enumerate(limits):
            share: list[SampleId] = []
            for unit in left[: -(-len(left) // (len(limits) - i))]:
                if limit is not None and len(share) + len(unit) > limit:
                    break
                share += unit
                left = left[1:]
            shares.append(share)
        return shares


def _note(lease: Lease) -> dict[str, Any]:
    return {"token": lease.token, "state": lease.state, "ids": [list(i) for i in lease.rows.ids]}


def _lease(note: dict[str, Any]) -> Lease:
    return Lease(note["token"], note["state"], Rows(tuple(SampleId(*i) for i in note["ids"])))


def _words(note: dict[str, Any]) -> str:
    return f"{note['call']}{note.get('same', '')}"
