"""What takes time in the model: the virtual clock, an engine's decode steps, graders."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from mindspeed_rl_plugin.loop.timing.inputs import Costs
from mindspeed_rl_plugin.rows import SampleId


class Clock:
    """Virtual seconds. now: of the event that happens."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = itertools.count()

    def at(self, when: float, do: Callable[..., None], *args: Any) -> None:
        """Call `do` at a time that is not over; of those of one time in the order of these calls."""
        heapq.heappush(self._events, (max(when, self.now), next(self._number), do, args))

    def run(self, until: Callable[[], bool]) -> None:
        """Let events happen. Raises RuntimeError where none is left before `until` holds."""
        while not until():
            if not self._events:
                raise RuntimeError(f"everybody waits at {self.now:g} s")
            self.now, _, do, args = heapq.heappop(self._events)
            do(*args)


class Decoder:
    """Continuous batching: in each step every running sequence gets a token; at most `slots` run, the others wait in
    their order.

    at: time up to which steps are counted, always between two steps.
    """

    def __init__(self, costs: Costs, slots: int, at: float = 0.0) -> None:
        self.costs, self.slots, self.at = costs, slots, at
        self.steps = 0
        self._running: list[tuple[int, SampleId]] = []  # last step of each, a heap
        self._waiting: deque[tuple[SampleId, int]] = deque()

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def seconds(self) -> float:
        """Of a step with those that run now."""
        return self.costs.step + self.costs.sequence * len(self._running)

    @property
    def next_end(self) -> float:
        """When the next sequence ends, if none joins before."""
        return self.at + (self._running[0][0] - self.steps) * self.seconds

    def add(self, rows: Iterable[tuple[SampleId, int]]) -> None:
        """Sequences join. rows: with the tokens of each."""
        self._waiting.extend(rows)
        self._fill()

    def pause(self, seconds: float) -> None:
        self.at += seconds

    def boundary(self, when: float) -> float:
        """The first time at or after `when`, and not before `at`, that is between two steps."""
        if not self._running or when <= self.at or not self.seconds:
            return max(when, self.at)
        return self.at + math.ceil((when - self.at) / self.seconds - 1e-9) * self.seconds

    def advance(self, to: float) -> list[SampleId]:
        """Make the steps up to a time between two steps, at most to `next_end`. What has ended by then."""
        if not self._running:
            self.at = max(self.at, to)
            return []
        if to >= self.next_end - 1e-12:
            steps = self._running[0][0] - self.steps
        else:
            steps = round((to - self.at) / self.seconds)
        self.at, self.steps = self.at + steps * self.seconds, self.steps + steps
        ended = []
        while self._running and self._running[0][0] <= self.steps:
            ended.append(heapq.heappop(self._running)[1])
        self._fill()
        return ended

    def drain(self) -> list[tuple[float, SampleId]]:
        """Run until nothing is left: when each sequence ends."""
        ends = []
        while len(self):
            ends += [(self.at, row) for row in self.advance(self.next_end)]
        return ends

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self.slots:
            row, tokens = self._waiting.popleft()
            heapq.heappush(self._running, (self.steps + max(tokens, 1), row))


class Graders:
    """So many grading calls at once, first come first served."""

    def __init__(self, slots: int) -> None:
        self._free = [0.0] * slots

    def grade(self, ready: float, seconds: float) -> float:
        """When a response that is ready at that time is graded. Calls come in the order of `ready`."""
        end = max(ready, heapq.heappop(self._free)) + seconds
        heapq.heappush(self._free, end)
        return end
