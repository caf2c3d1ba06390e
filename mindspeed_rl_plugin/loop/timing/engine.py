"""An engine apart, in the model: what `generators.choice.choose` says, on the virtual clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mindspeed_rl_plugin.generators.choice import Bound, Situation, choose
from mindspeed_rl_plugin.loop.timing.inputs import Setup
from mindspeed_rl_plugin.loop.timing.resources import Clock, Decoder
from mindspeed_rl_plugin.rows import SampleId

POLL_SECONDS = 0.2  # of steps before an engine looks for news, as in generators.service


class Row(NamedTuple):
    """A prompt that is admitted. order: who may sample it; tokens: of its response."""

    id: SampleId
    order: Bound
    tokens: int


class Engine:
    """take: (most) -> rows from the dock; done: called with a row and the version that began it, as it ends; announced:
    the newest version of the job.

    idle: seconds without work by cause: "version", it waits for weights; "back-pressure", for admission.
    """

    def __init__(
        self,
        clock: Clock,
        decoder: Decoder,
        setup: Setup,
        take: Callable[[int], Sequence[Row]],
        done: Callable[[SampleId, int], None],
        announced: Callable[[], int],
    ) -> None:
        self.clock, self.decoder, self.setup = clock, decoder, setup
        self._take, self._done, self._announced = take, done, announced
        self.version = self.pulled = self.pulling = -1
        self.idle = {"version": 0.0, "back-pressure": 0.0}
        self._running: dict[SampleId, tuple[Bound, int]] = {}
        self._held: deque[Row] = deque()
        self._waits: tuple[str, float] | None = None  # for what, since when
        self._looked, self._due = 0.0, 0  # when it looked for news last; number of the event that is due

    def wake(self) -> None:
        """There is news: at once for an engine without work, else when its steps so far make a poll."""
        now = self.clock.now
        if self._waits is not None:
            cause, since = self._waits
            self.idle[cause] += now - since
            self._waits = None
            self._at(max(now, self.decoder.at))
        elif self._running:
            polls = math.ceil((now - self._looked) / POLL_SECONDS)
            look = self.decoder.boundary(self._looked + polls * POLL_SECONDS)
            self._at(min(look, self.decoder.next_end))

    def begin(self) -> None:
        """Look for the first time."""
        self._at(self.clock.now)

    def idle_until(self, cause: str, now: float) -> float:
        """`idle` of a cause, with what is going on."""
        waits = self._waits is not None and self._waits[0] == cause
        return self.idle[cause] + (now - self._waits[1] if waits else 0.0)

    def _at(self, when: float) -> None:
        self._due += 1
        self.clock.at(when, self._turn, self._due)

    def _turn(self, number: int) -> None:
        """Hand over what has ended, and do what is to be done next."""
        if number != self._due:
            return
        for row in self.decoder.advance(self.clock.now):
            self._done(row, self._running.pop(row)[1])
        self._looked = self.clock.now
        choice = choose(self._situation())
        while choice.pull >= 0:
            self.pulled, self.pulling = -1, choice.pull
            self.clock.at(self.clock.now + self.decoder.costs.pull, self._pull_ended, choice.pull)
            choice = choose(self._situation())
        if choice.apply >= 0:
            self._apply(choice.apply)
        elif choice.wait:
            self._waits = "version", self.clock.now
        else:
            rows = [self._held.popleft() for _ in range(choice.resume)]
            self._begin(rows + self._fitting(choice.take))

    def _situation(self) -> Situation:
        return Situation(
            version=self.version,
            pulled=self.pulled,
            pulling=self.pulling,
            announced=self._announced(),
            running=[bound for bound, _ in self._running.values()],
            held=[row.order for row in self._held],
            slots=self.setup.slots,
            drain=self.setup.inflight == "drain",
            strict=self.setup.order == "strict",
        )

    def _pull_ended(self, version: int) -> None:
        if self.pulling == version:
            self.pulled, self.pulling = version, -1
            self.wake()

    def _apply(self, version: int) -> None:
        if self.setup.inflight == "recompute":
            self.decoder.recompute()
        self.decoder.pause(self.decoder.costs.apply)
        self.version, self.pulled = version, -1
        self._at(self.decoder.at)

    def _fitting(self, most: int) -> list[Row]:
        """New rows that these weights may sample; the others are held."""
        fit = []
        for row in self._take(most) if most else ():
            if row.order.allows(self.version) and not self._held:
                fit.append(row)
            else:
                self._held.append(row)
        return fit

    def _begin(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._running[row.id] = row.order, self.version
        self.decoder.add((row.id, row.tokens) for row in rows)
        if self._running:
            self._at(max(self.decoder.next_end, self.clock.now))
        elif self._held:
            self._at(self.clock.now)  # for the weights that these want
        else:
            self._waits = "back-pressure", self.clock.now
