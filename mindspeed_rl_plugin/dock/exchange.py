"""What the job and processes outside of it exchange beside rows: invitations, news, records, counts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mindspeed_rl_plugin.dock import messages as m
from mindspeed_rl_plugin.dock.calls import Calls
from mindspeed_rl_plugin.dock.core import Offers
from mindspeed_rl_plugin.dock.gate import Gate, Opening, called
from mindspeed_rl_plugin.dock.places import ids_tuple
from mindspeed_rl_plugin.dock.rpc import REPLY_TIMEOUT
from mindspeed_rl_plugin.rows import SampleId


class Exchange:
    """`Dock.exchange`. calls, member, leader: those of the dock's view."""

    def __init__(self, calls: Calls, member: Any, leader: bool) -> None:
        self._calls, self._member, self._leader = calls, member, leader

    # on ranks of the job

    def invite(self, secret_file: str | os.PathLike[str], host: str = "", about: str = "") -> str:
        """Let processes outside of the job join: writes its secret into a file of mode 600, and returns the address for
        `Dock.join`. Collective. host: of a network interface, for processes of other machines; about: what they
        read."""
        return self._of_job("invite others to its dock").invite(secret_file, host, about)

    def expect(self, ranks: Iterable[int]) -> None:
        """Other ranks of the launcher, which are to be `joining.linked` within a heartbeat; on the leader."""
        self._of_job("expect other ranks").watch.expect(ranks)

    def announce(self, version: int) -> None:
        """Say, on the leader, that weights of `version` can be had."""
        if self._leader:
            self._calls.core.announce(version)

    def guard(self, open: Mapping[str, Opening]) -> None:
        """From now on processes outside of the job lease and commit rows of these states alone, as each allows. On
        every rank, which checks what comes to it."""
        self._calls.core.gate = Gate(open)

    def record(self, line: str) -> None:
        """Keep a record of the job, on the leader: JSON."""
        if self._leader:
            self._calls.core.record(line)

    def take_offers(self, add: Offers) -> None:
        """From now on processes outside of the job may offer rows, on the leader. add: called by other threads."""
        if self._leader:
            self._calls.core.offers = add

    def reports(self) -> dict[str, dict[str, float]]:
        """On the leader: what processes outside of the job have counted since they joined, by their names."""
        return dict(self._calls.core.reports) if self._leader else {}

    def reclaim(self, state: str, name: str) -> None:
        """Give out again what a process outside of the job has leased of a state; what it still commits is harmless.
        name: as in `reports`."""
        self._calls.query(m.Reclaim, state, name)

    def take_spans(self) -> list[tuple[str, str, float, float]]:
        """On the leader: what processes outside of the job did since this was called last: name, what, and from when to
        when, seconds since 1970 by the clock of their machine."""
        spans = self._calls.core.take_spans() if self._leader else []
        return [(called(name), *span) for name, *span in spans]

    # in processes outside of the job

    @property
    def about(self) -> str:
        """What the job says of itself."""
        return self._calls.directory.about

    def finished(self, state: str) -> list[SampleId]:
        """Rows that a state has acknowledged and that are not cleared."""
        grant = self._calls.query(m.Finished, state)
        self._calls.epochs.learn(grant)
        return list(ids_tuple(grant.ids))

    def records(self, after: int, deadline: float) -> m.Told:
        """The job's records behind the first `after`; waits for one, at most `deadline` seconds."""
        return self._calls.ask_rank(self._calls.directory.ranks[0], m.Follow(after, deadline), REPLY_TIMEOUT)

    def offer_rows(self, rows: Sequence[str], deadline: float) -> list[int]:
        """Give rows, as JSON, to the job, which has room for them within `deadline` seconds. Their numbers."""
        offer = m.Offer(list(rows), deadline)
        return self._calls.ask_rank(self._calls.directory.ranks[0], offer, REPLY_TIMEOUT).numbers

    def report(self, counts: Mapping[str, float], spans: Sequence[tuple[str, float, float]] = ()) -> m.Announced:
        """For the leader: what this process has counted since it joined, and what it did since its last report, see
        `take_spans`. What the leader announced last."""
        return self._calls.ask_rank(self._calls.directory.ranks[0], m.Report(dict(counts), list(spans)), REPLY_TIMEOUT)

    def news(self, after: int, deadline: float, patience: float = REPLY_TIMEOUT) -> m.Announced:
        """What the leader announced last; waits until its number is above `after`, at most `deadline` seconds, and so
        many more for its answer."""
        return self._calls.ask_rank(self._calls.directory.ranks[0], m.News(after, deadline), patience)

    # inside

    def _of_job(self, what: str) -> Any:
        if self._member is None:
            raise ValueError(f"only a rank of the job can {what}")
        return self._member
