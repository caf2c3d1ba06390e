"""The job's side of the exchange with processes outside of the job, except for rows: invitations, news, records,
prompts and reports."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from mindspeed_rl_plugin.dock import Dock
from mindspeed_rl_plugin.dock.core import Request, called
from mindspeed_rl_plugin.dock.gate import Gate, Opening
from mindspeed_rl_plugin.dock.messages import Reclaim
from mindspeed_rl_plugin.service.invitation import write_secret
from mindspeed_rl_plugin.service.notes import Announced, Follow, News, PromptNumbers, Report, SubmitPrompts, Told

RECORDS = 1000  # records (lines of metrics.jsonl) that are kept
SPANS = 20_000  # spans of processes outside of the job that are kept until `take_spans`
NEWS, TOLD = "(news)", "(told)"  # keys of `Core.wake`

# (prompts as JSON, seconds to wait until they are accepted, whether the asker has ended) -> numbers of the prompts
TakePrompts = Callable[[Sequence[str], float, Callable[[], bool] | None], list[int]]


class JobService:
    """Each rank makes a JobService. Processes outside of the job get news and records only from the leader, and send
    prompts and reports only to the leader. dock: a view of the job's dock. Raises ValueError outside of the job."""

    def __init__(self, dock: Dock) -> None:
        if dock.member is None:
            raise ValueError("only a rank of the job can invite other processes to the dock")
        self._dock, self._core = dock, dock.member.core
        self._announced = Announced()
        self._told, self._records = 0, deque[str](maxlen=RECORDS)  # number of all records, and the newest records
        self._reports: dict[str, dict[str, float]] = {}  # by name of the process
        self._spans: deque[tuple[str, str, float, float]] = deque(maxlen=SPANS)
        self._take_prompts: TakePrompts | None = None
        self._core.serve({News: self._on_news, Follow: self._on_follow, Report: self._on_report})
        self._core.serve({SubmitPrompts: self._on_submit}, locked=False)
        self._core.at_gone.append(lambda peer: self._reports.pop(peer, None))

    def invite(self, secret_file: str | os.PathLike[str], host: str = "", about: str = "") -> str:
        """Let processes outside of the job join: writes the secret into a file of mode 600, and returns the address for
        `GuestDock.join`. Collective. host: address of a network interface, for processes of other machines; about:
        description of the job."""
        member = self._dock.member
        address = member.listen(host, about)
        if self._dock.leader:
            write_secret(secret_file, member.me.secret)
        member.peers.gather(None)
        return address

    def guard(self, open: Mapping[str, Opening]) -> None:
        """From now on processes outside of the job may lease and commit rows of these states only, as each `Opening`
        allows. Called on every rank, since each rank checks the requests that it gets."""
        self._core.gate = Gate(open)

    def expect(self, ranks: Iterable[int]) -> None:
        """On the leader: expect other ranks of the launcher, which must be `linked` within a heartbeat."""
        self._dock.member.watch.expect(ranks)

    def announce(self, version: int) -> None:
        """Announce that weights of `version` are published."""
        with self._core.lock:
            self._announced = Announced(self._announced.number + 1, version)
            self._core.wake(NEWS)

    def record(self, line: str) -> None:
        """Keep a record of the job for processes outside of it. line: JSON."""
        with self._core.lock:
            self._told += 1
            self._records.append(line)
            self._core.wake(TOLD)

    def take_prompts(self, take: TakePrompts) -> None:
        """From now on processes outside of the job may submit prompts. take: called by other threads."""
        self._take_prompts = take

    def reports(self) -> dict[str, dict[str, float]]:
        """Counts of processes outside of the job since they joined, by their names."""
        return dict(self._reports)

    def reclaim(self, state: str, name: str) -> None:
        """End the leases of a state that a process outside of the job holds, so that other processes get its rows. A
        later commit of that process is harmless. name: as in `reports`."""
        self._dock.calls.query(Reclaim, state, name)

    def take_spans(self) -> list[tuple[str, str, float, float]]:
        """Spans of processes outside of the job since the last call: (name, what, begin, end), seconds since 1970 by
        the clock of their machine."""
        with self._core.lock:
            taken = [(called(name), *span) for name, *span in self._spans]
            self._spans.clear()
        return taken

    # requests

    def _on_news(self, request: Request) -> Announced | str:
        news: News = request.message
        return NEWS if self._announced.number <= news.after and request.waited < news.deadline else self._announced

    def _on_follow(self, request: Request) -> Told | str:
        follow: Follow = request.message
        if self._told <= follow.after and request.waited < follow.deadline:
            return TOLD
        first = self._told - len(self._records)
        return Told(max(first, follow.after) + 1, list(self._records)[max(follow.after - first, 0) :])

    def _on_report(self, request: Request) -> Announced:
        self._reports[request.peer] = request.message.counts
        self._spans.extend((request.peer, *span) for span in request.message.spans)
        return self._announced

    def _on_submit(self, request: Request) -> PromptNumbers:
        if self._take_prompts is None:
            raise ValueError("offer: this job takes no prompts from processes outside of it")
        return PromptNumbers(self._take_prompts(request.message.rows, request.message.deadline, request.ended))
