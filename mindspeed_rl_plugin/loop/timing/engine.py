"""An engine apart, in the model: what `generators.choice.choose` says, on the virtual clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mindspeed_rl_plugin.generators.choice import Bound, Work
from mindspeed_rl_plugin.loop.timing.inputs import Setup
from mindspeed_rl_plugin.loop.timing.resources import Clock, Decoder
from mindspeed_rl_plugin.rows import SampleId

POLL_SECONDS = 0.2  # of steps before an engine looks for news, as in generators.service


class Row(NamedTuple):
    """A prompt that is admitted. bound: who may sample it; tokens: of its response."""

    id: SampleId
    bound: Bound
    tokens: int


class _Begun(NamedTuple):
    """A row in the making. version: of the weights that began it."""

    bound: Bound
    version: int


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
        self.work = Work(setup.slots, setup.inflight == "drain", setup.order == "strict")
        self.idle = {"version": 0.0, "back-pressure": 0.0}
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
        elif self.work.running:
            polls = math.ceil((now - self._looked) / POLL_SECONDS)
            look = self.decoder.boundary(self._looked + polls * POLL_SECONDS)
            self._at(min(look, self.decoder.next_end))

    def begin(self) -> None:
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
            self._done(row, self.work.running.pop(row).version)
        self._looked = self.clock.now
        choice = self.work.choose(self._announced())
        while choice.pull >= 0:
            self.work.pull(choice.pull)
            self.clock.at(self.clock.now + self.decoder.costs.pull, self._pull_ended, choice.pull)
            choice = self.work.choose(self._announced())
        if choice.apply >= 0:
            self._apply(choice.apply)
        elif choice.wait:
            self._waits = "version", self.clock.now
        else:
            rows = self.work.resumed(choice.resume)
            self._begin(rows + self.work.fitting(self._take(choice.take) if choice.take else ()))

    def _pull_ended(self, version: int) -> None:
        self.work.pull_ended(version)
        self.wake()

    def _apply(self, version: int) -> None:
        self.decoder.pause(self.decoder.costs.apply)
        self.work.applied(version)
        self._at(self.decoder.at)

    def _begin(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.work.running[row.id] = _Begun(row.bound, self.work.version)
        self.decoder.add((row.id, row.tokens) for row in rows)
        if self.work.running:
            self._at(max(self.decoder.next_end, self.clock.now))
        elif self.work.held:
            self._at(self.clock.now)  # for the weights that these want
        else:
            self._waits = "back-pressure", self.clock.now
