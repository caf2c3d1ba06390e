"""What the first rank of an engine decides, turn by turn: which rows to take, which weights to work with."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mindspeed_rl_plugin.dock import Dock, Lease
from mindspeed_rl_plugin.engine.seeds import response_seed
from mindspeed_rl_plugin.generators.description import Description
from mindspeed_rl_plugin.generators.news import News
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, SampleId, Sampling
from mindspeed_rl_plugin.stages.evaluate import EPOCH
from mindspeed_rl_plugin.stages.generate import SPEC, completion_rows

LOOK_SECONDS = 1.0  # that an engine without weights waits for news at a time
REPORT_SECONDS = 0.5  # between two reports of what was counted
ROWS_SECONDS = 0.02  # after which an engine without rows asks for some again


@dataclass(frozen=True)
class Turn:
    """What all ranks of the engine do next. requests: to submit; pull, apply: versions to pull beside the engine's
    steps, and to put into the engine now, -1 for none; end: whether to leave."""

    requests: tuple[GenerateRequest, ...] = ()
    pull: int = -1
    apply: int = -1
    end: bool = False


@dataclass
class _Row:
    """A leased row. oldest, newest: versions that may sample it, -1 where there is no newest."""

    lease: Lease
    oldest: int
    newest: int
    request: GenerateRequest

    def may_have(self, version: int) -> bool:
        """Whether weights of a version may sample it."""
        return self.oldest <= version and (self.newest < 0 or version <= self.newest)


class Lead:
    """slots: responses that the engine samples at once; share: of each rollout under a strict order, (i, n); leaving:
    set where the engine is to leave."""

    def __init__(
        self, dock: Dock, job: Description, slots: int, share: tuple[int, int] | None, leaving: threading.Event
    ) -> None:
        self.dock, self.job, self.slots, self.share = dock, job, slots, share
        self.news = News(dock)
        self.version = -1  # of the engine's weights
        self.pulled = self.pulling = -1
        self.leaving = leaving
        # Since the engine joined: seconds, those without work by cause, and what weights cost.
        self.counts: dict[str, float] = {}
        self._began = self._reported = time.monotonic()
        self._running: dict[SampleId, _Row] = {}
        self._held: deque[_Row] = deque()  # that other weights must sample

    # a turn

    def next(self) -> Turn:
        """The next turn; waits a moment where there is nothing to do. Raises ConnectionError where the job is lost."""
        try:
            return self._next() if self.news.check() and not self.leaving.is_set() else self._leave()
        except ConnectionError:
            if not self.dock.ended:
                raise
            return Turn(end=True)

    def _next(self) -> Turn:
        self._report()
        wanted = self._wanted()
        if self.pulled >= 0 and self._fits(wanted):
            return Turn(apply=self.pulled)
        if wanted not in (-1, self.version, self.pulled) and self.pulling < 0:
            self.pulled, self.pulling = -1, wanted  # what is staged is written over
            return Turn(pull=wanted)
        requests = self._take()
        if not requests and not self._running:
            self._wait()
        return Turn(requests)

    def done(self, completions: Iterable[Completion], digest: str | None) -> None:
        """Write finished responses into the dock. A job that has left needs none."""
        for completion in completions:
            row = self._running.pop(completion.id)
            self.count("responses", 1)
            self.count("tokens", len(completion.tokens))
            try:
                self.dock.commit(row.lease, completion_rows([row.request], [completion], digest))
            except ConnectionError:
                if not self.dock.ended:
                    raise

    def count(self, name: str, value: float) -> None:
        """Add to a count."""
        self.counts[name] = self.counts.get(name, 0.0) + value

    def is_pulled(self, version: int) -> None:
        """A pull is over, well or not; called in its thread."""
        self.pulled, self.pulling = version, -1
        self.news.wake()

    def has(self, version: int) -> None:
        """The engine has the weights that were pulled."""
        self.version, self.pulled = version, -1

    def gone(self, version: int, error: Exception) -> None:
        """Weights that were wanted are no longer to be had. Raises `error` where rows must be sampled by them."""
        if any(row.newest == version for row in (*self._running.values(), *self._held)):
            raise error
        self.pulled = -1

    # inside

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported >= REPORT_SECONDS:
            self._reported = now
            self.dock.exchange.report({**self.counts, "seconds": now - self._began})

    def _leave(self) -> Turn:
        """Hand back what is not finished."""
        for row in (*self._running.values(), *self._held):
            if not self.dock.ended:
                self.dock.release(row.lease)
        return Turn(end=True)

    def _wanted(self) -> int:
        """The version to work with: that of the rows which must be sampled by it, else the newest."""
        if any(row.newest >= 0 for row in self._running.values()):
            return self.version
        newest = self.version if self.job.strict else self.news.version
        return self._held[0].newest if self._held and self._held[0].newest >= 0 else newest

    def _fits(self, wanted: int) -> bool:
        """Whether to put in now what is pulled: what is wanted, or newer than the engine's where any will do."""
        fits = self.pulled == wanted or (wanted == self.news.version and self.pulled > self.version)
        ends_first = self.job.inflight == "drain" and self._running
        return fits and not ends_first and all(row.may_have(self.pulled) for row in self._running.values())

    @property
    def _may_take(self) -> bool:
        """Whether to take more rows: not while some wait for other weights, nor while those in the making are to end
        first."""
        ending = self.job.inflight == "drain" and self.pulled > self.version
        return max(self.version, self.news.version if self.job.strict else -1) >= 0 and not self._held and not ending

    def _take(self) -> tuple[GenerateRequest, ...]:
        """Rows for free slots, those first that waited for these weights, then those of an evaluation."""
        rows: list[_Row] = []
        while self._held and self._held[0].may_have(self.version):
            rows.append(self._held.popleft())
        if self._may_take:
            rows += self._leased(self.slots - len(self._running) - len(rows))
        self._running |= {row.request.id: row for row in rows}
        return tuple(row.request for row in rows)

    def _leased(self, free: int) -> list[_Row]:
        if self.job.strict:
            return self._whole_share() if not self._running else []
        rows: list[_Row] = []
        while len(rows) < free and (row := self._lease()) is not None:
            if (mine := self._running.get(row.request.id)) is not None:
                mine.lease = row.lease  # the one before ran out
            elif row.may_have(self.version):
                rows.append(row)
            else:
                self._held.append(row)
                break
        return rows

    def _whole_share(self) -> list[_Row]:
        """This engine's part of the next rollout, whole, in the order of ids."""
        first = self._lease(share=self.share)
        if first is None:
            return []
        rows, end = [first], time.monotonic() + self.job.deadline
        groups, members = first.lease.rows["order"][0, 2:].tolist()
        part, parts = self.share
        count = (part + 1) * groups * members // parts - part * groups * members // parts
        while len(rows) < count:
            of = {"epoch": first.request.id.epoch, "share": self.share}
            row = self._lease(deadline=end - time.monotonic(), **of)  # all of it is on its way
            if row is None:
                return []  # the job has left
            rows.append(row)
        if first.may_have(self.version):
            return rows
        self._held.extend(rows)
        return []

    def _lease(self, deadline: float = 0.0, **of: object) -> _Row | None:
        lease = self.dock.lease(SPEC.name, max_rows=1, deadline=deadline, **of)
        if not len(lease):
            return None
        oldest, newest = lease.rows["order"][0, :2].tolist()
        return _Row(lease, oldest, newest, self._request(lease))

    def _request(self, lease: Lease) -> GenerateRequest:
        sample, prompt = lease.rows.ids[0], tuple(lease.rows["prompt"].row(0).tolist())
        sampling, epoch = self.job.sampling, sample.epoch
        if epoch < 0:  # each evaluation asks for the same responses
            epoch, sampling = EPOCH, sampling if sample.member else greedy(sampling)
        return GenerateRequest(sample, prompt, sampling, response_seed(self.job.seed, epoch, *sample[1:]))

    def _wait(self) -> None:
        """A moment, for rows or for weights. Nothing runs."""
        began = time.monotonic()
        waits = self._held or self.version < 0
        self.news.wait(LOOK_SECONDS if waits else ROWS_SECONDS)
        self.count("waited" if waits else "starved", time.monotonic() - began)


def greedy(sampling: Sampling) -> Sampling:
    """The likeliest token each time."""
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=0)


def continued(request: GenerateRequest, begun: Completion, seed: int) -> GenerateRequest:
    """The request by which an interrupted response goes on, with a seed of that part."""
    epoch, group, member = request.id
    part = response_seed(seed, EPOCH if epoch < 0 else epoch, group, member, begun=len(begun.tokens))
    return replace(request, begun=begun, seed=part)
