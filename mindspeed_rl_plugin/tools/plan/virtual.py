"""The parts of the simulation that take time: costs, responses, decode steps and graders."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import NormalDist

from mindspeed_rl_plugin.rows import SampleId

ROUNDING = 1e-6  # tolerance for a capacity that is a quotient of sums
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Costs:
    """Costs in seconds."""

    step: float = 0.0  # one decode step of an engine
    sequence: float = 0.0  # added to a step by each sequence in it
    token: float = 0.0  # training on one token, prompts included, on a data parallel rank
    old_token: float = 0.0  # old log-prob of one token
    rollout: float = 0.0  # of the trainers per rollout, whatever its size
    reshard: float = 0.0  # moving weights to colocated engines and back
    publish: float = 0.0  # pause of the trainers to copy weights
    pull: float = 0.0  # an engine reads published weights, while it decodes
    apply: float = 0.0  # pause of an engine to load the weights that it has read
    # from a response's end to the start of its grading, and from its grade to the start of a waiting trainer
    notice: float = 0.0


@dataclass(frozen=True)
class Responses:
    """Properties of responses."""

    length: Callable[[int, int, Random], int]  # (row of the data, member, random numbers) -> tokens
    grading: Callable[[Random], float] = lambda rng: 0.0  # seconds of a grading call
    together: float = 1.0  # concurrent calls in a reward worker
    rows: int = 0  # number of rows of the data, shuffled in each epoch; 0: no row comes twice
    informative: float = 1.0  # share of groups whose rewards differ
    seed: int = 0


def recorded(lengths: Sequence[Sequence[int]]) -> Callable[[int, int, Random], int]:
    """Measured lengths `[row][member]`; further rows and members repeat them."""
    return lambda row, member, rng: lengths[row % len(lengths)][member % len(lengths[row % len(lengths)])]


def lognormal(mean: float, sigma: float, limit: int) -> Callable[[int, int, Random], int]:
    """Lognormal lengths, cut at `limit`, with mean `mean` after the cut. sigma: of the logarithm, 0: all equal. Raises
    ValueError if the mean is not between 1 and the limit."""
    if not 1 <= mean <= limit:
        raise ValueError(f"a mean of {mean:g} tokens is not between 1 and the limit of {limit}")
    low, high = math.log(mean), math.log(mean) + 20.0
    for _ in range(60):  # mu by bisection: the mean after the cut rises with mu
        mu = (low + high) / 2
        low, high = (mu, high) if _cut_mean(mu - sigma**2 / 2, sigma, limit) < mean else (low, mu)
    mu -= sigma**2 / 2
    return lambda row, member, rng: max(1, min(limit, round(math.exp(mu + sigma * rng.gauss(0.0, 1.0)))))


def sigma_of(mean: float, longest: float, count: int, limit: int) -> float:
    """The sigma with which the longest of `count` lognormal lengths, cut at `limit`, is `longest` in the median."""
    longest = min(longest, limit)  # the tail beyond the limit is unknown: take the smallest sigma that reaches it
    quantile = _NORMAL.inv_cdf(0.5 ** (1 / max(count, 2)))
    gain = math.log(max(longest / mean, 1.0))
    # mean * exp(quantile * sigma - sigma^2 / 2) = longest, the smaller root
    return quantile - math.sqrt(max(quantile**2 - 2 * gain, 0.0))


def _cut_mean(mu: float, sigma: float, limit: int) -> float:
    """Mean of min(X, limit), X lognormal."""
    if not sigma:
        return min(math.exp(mu), limit)
    z = (math.log(limit) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * _NORMAL.cdf(z - sigma) + limit * (1 - _NORMAL.cdf(z))


class Decoder:
    """Continuous batching: in each step every running sequence gets a token; at most `slots` run, the others wait in
    order. at: time up to which steps are simulated, always between two steps."""

    def __init__(self, costs: Costs, slots: int, at: float = 0.0) -> None:
        self.costs, self.slots, self.at = costs, slots, at
        self.steps = 0
        self._running: list[tuple[int, SampleId]] = []  # heap of (last step, sequence)
        self._waiting: deque[tuple[SampleId, int]] = deque()

    @property
    def seconds(self) -> float:
        """Seconds of a step with the running sequences."""
        return self.costs.step + self.costs.sequence * len(self._running)

    @property
    def next_end(self) -> float:
        """Time at which the next sequence ends, if no sequence joins before."""
        return self.at + (self._running[0][0] - self.steps) * self.seconds

    def add(self, rows: Iterable[tuple[SampleId, int]]) -> None:
        """Add sequences. rows: each sequence with its number of tokens."""
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
        """Run steps until `to`, a time between two steps, but at most until `next_end`. Returns the ended sequences."""
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
        """Run until all sequences have ended. Returns (time of the end, sequence) of each."""
        ends = []
        while self._running:
            ends += [(self.at, row) for row in self.advance(self.next_end)]
        return ends

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self.slots:
            row, tokens = self._waiting.popleft()
            heapq.heappush(self._running, (self.steps + max(tokens, 1), row))


class Graders:
    """Concurrent grading calls, first come first served. at_once: their number. A fraction is rounded up, and each call
    takes longer by the same factor, so that the calls per second stay the same."""

    def __init__(self, at_once: float) -> None:
        slots = math.ceil(at_once - ROUNDING)
        self._free, self._slower = [0.0] * slots, slots / at_once

    def grade(self, ready: float, seconds: float) -> float:
        """Time at which the grading of a response that is ready at `ready` ends. Call it in the order of `ready`."""
        end = max(ready, heapq.heappop(self._free)) + seconds * self._slower
        heapq.heappush(self._free, end)
        return end
